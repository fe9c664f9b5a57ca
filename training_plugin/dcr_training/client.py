"""The client of a training loop: baseline, refits, and one outcome on all training ranks."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dcr_training import native
from dcr_training.config import RefitConfig
from dcr_training.errors import RefitError
from dcr_training.prefetch import End, Prefetch
from dcr_training.ranks import Failure, Ranks, first_of, out_of_step
from dcr_training.report import RefitReport
from dcr_training.sources import WeightSource

logger = logging.getLogger(__name__)

MODES = ("auto", "mixed", "overwrite", "dense")
SLICE_S = 0.25
"""Native waits are cut into slices, so that Ctrl-C and other ranks' news get through."""
STOP_PATIENCE_S = 180.0
"""For the coordinator to stop everybody after a failure."""


@dataclass(frozen=True)
class _Outcome:
    """How a refit ended for the coordinator: a report in JSON, or a reason."""

    report: str | None = None
    reason: str = ""
    weights: str = "untouched"


class RefitClient:
    """Refits the rollout servers with a source's tensors; one on every training rank.

    All methods are collectives: call them on all ranks, in the same order. Any rank's failure raises the same
    `RefitError` on all of them.
    """

    def __init__(self, source: WeightSource, config: RefitConfig) -> None:
        self.source = source
        self.config = config
        self._ranks: Ranks | None = None
        self._owner: Any = None
        self._coordinator: Any = None
        self._catalog: list[tuple[str, tuple[int, ...], str]] = []
        self._walks = 0

    def initialize(self) -> None:
        """Take the model's present tensors as the source baseline, and connect to the relay."""
        if self._owner is not None:
            raise RefitError("this client is initialized already")
        source = self.source
        # Ranks meet only at the end of a stage, and the slowest stage is a refit.
        self._ranks = Ranks(source.rank, source.world_size, self.config.timeout_s + 2 * STOP_PATIENCE_S)
        logger.info("refit client on rank %d of %d: %s", source.rank, source.world_size, source.metadata())
        try:
            self._settle(self._attempt(self._make_owner))
            self._settle(self._walk(self._track))
            self._settle(self._check_catalogs())
            self._settle(self._attempt(self._connect))
        except BaseException:
            self.close()
            raise

    def refit(self, mode: str = "auto") -> RefitReport:
        """Bring the receivers to the source's present tensors; returns when they serve them.

        `mode` is "auto" (dense when a receiver does not hold the committed version, else mixed), "mixed",
        "overwrite" or "dense".
        """
        if self._owner is None:
            raise RefitError("the refit client is not initialized, or closed: call initialize() on every rank")
        try:
            return self._refit(mode)
        except RefitError as error:
            if error.fatal:
                self.close()
            raise
        except BaseException as error:
            reason = f"interrupted by {type(error).__name__}"
            self._owner.fail(reason)
            if self._coordinator is not None:
                self._coordinator.abort(reason)
            raise

    def close(self) -> None:
        """Close this rank's connections."""
        owner, coordinator, ranks = self._owner, self._coordinator, self._ranks
        self._owner = self._coordinator = self._ranks = None
        for part in (coordinator, owner, ranks):
            if part is not None:
                part.close()

    def __enter__(self) -> "RefitClient":
        self.initialize()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The stages of `initialize`.

    def _make_owner(self) -> None:
        sizes = {"bucket_bytes": self.config.bucket_bytes, "window_bytes": self.config.window_bytes}
        options = {name: value for name, value in sizes.items() if value is not None}
        self._owner = native.load().Owner(self._ranks.rank, self._ranks.size, **options)

    def _track(self, name: str, tensor: torch.Tensor) -> None:
        self._catalog.append((name, tuple(tensor.shape), str(tensor.dtype)))
        if self._owner.owns(name):
            self._hand_over(self._owner.track, name, tensor)

    def _check_catalogs(self) -> Failure | None:
        """A tensor that only some ranks yield could be missed by its owner, and would be in no refit."""
        digest = hashlib.blake2b(repr(self._catalog).encode()).digest()
        if len(set(self._ranks.gather(digest))) > 1:
            catalogs = self._ranks.gather(self._catalog)
            for rank, catalog in enumerate(catalogs):
                if catalog != catalogs[0]:
                    return self._failure(_difference(rank, catalog, catalogs[0]))
        names = {name for name, _, _ in self._catalog}
        if len(names) < len(self._catalog):
            return self._failure("the weight source yields a tensor name twice")
        return None if names else self._failure("the weight source yields no tensors")

    def _connect(self) -> None:
        relay = self.config.relay or os.environ.get("DCR_RELAY", "")
        try:
            self._owner.register(self.config.connect_timeout_s, self.config.relay)
        except Exception as error:
            if relay in str(error):
                raise
            raise RefitError(f"{_told(error)}: is `dcr relay` running at {relay}?") from error
        if self._ranks.rank == 0:
            self._coordinator = native.load().Coordinator(
                self._ranks.size,
                self.config.receivers,
                str(self.config.record),
                [str(gate) for gate in self.config.gates],
                application=self.config.application,
                relay=self.config.relay,
                timeout_s=self.config.connect_timeout_s,
                peers_timeout_s=self.config.peers_timeout_s,
            )

    # The stages of `refit`.

    def _refit(self, mode: str) -> RefitReport:
        deadline = time.monotonic() + self.config.timeout_s
        self._forget_last_attempt()
        modes = self._ranks.gather(mode)
        if len(set(modes)) > 1 or mode not in MODES:
            raise RefitError(f"refit modes {modes} of the training ranks: all must be the same of {MODES}")
        outcome = None
        mine = self._attempt(self._coordinator.start, mode) if self._coordinator else None
        if mine:
            outcome = _Outcome(reason=mine.reason)
        failures, outcome = self._await_prepared(mine, outcome, deadline)
        if not failures:
            failures = self._ranks.failures(self._stream())
        if self._coordinator:
            outcome = outcome or self._wait(failures, deadline)
        outcome = self._ranks.broadcast(outcome)
        if outcome.report is not None:
            failures += self._ranks.failures(self._attempt(self._await_end, deadline))
        if failures or outcome.report is None:
            raise self._error(failures, outcome)
        try:
            return RefitReport.from_json(outcome.report)
        except ValueError as error:
            raise RefitError(str(error), weights="committed") from error

    def _await_prepared(
        self, mine: Failure | None, outcome: _Outcome | None, deadline: float
    ) -> tuple[list[Failure], _Outcome | None]:
        """Rounds of waiting and agreeing, until all owners are prepared or one rank has failed.

        The coordinator may fail before it has asked any owner. Only rank 0 learns of that: none waits alone.
        """
        prepared = None
        while True:
            if mine is None and prepared is None:
                try:
                    prepared = self._owner.await_prepared(SLICE_S)
                except Exception as error:
                    if not native.timed_out(error):
                        mine = self._failure(error, kind="follows")
            if self._coordinator and mine is None and prepared is None:
                outcome = self._ended()
                if outcome is not None:
                    mine = self._failure(outcome.reason, kind="follows")
                elif time.monotonic() > deadline:
                    mine = self._failure(f"owners were not prepared within {self.config.timeout_s:g} s")
            states = self._ranks.gather((mine, prepared and prepared["attempt"]))
            failures = [failure for failure, _ in states if failure is not None]
            attempts = {attempt for _, attempt in states}
            if failures:
                return failures, outcome
            if None not in attempts:
                if len(attempts) > 1:
                    failures = [self._failure(f"owners are prepared for different attempts: {attempts}")]
                return failures, outcome
            if self._coordinator and prepared is not None:
                outcome = self._ended()
                if outcome is not None:
                    mine = self._failure(outcome.reason, kind="follows")

    def _stream(self) -> Failure | None:
        failure = self._walk(self._offer)
        return failure or self._attempt(self._owner.end_stream)

    def _offer(self, name: str, tensor: torch.Tensor) -> None:
        if self._owner.owns(name):
            self._hand_over(self._owner.offer, name, tensor)

    def _wait(self, failures: list[Failure], deadline: float) -> _Outcome:
        """The coordinator's outcome, ending the refit if ranks have failed or time is up."""
        if not failures:
            while time.monotonic() < deadline:
                outcome = self._ended(SLICE_S)
                if outcome is not None:
                    return outcome
            reason = f"the refit has not ended within {self.config.timeout_s:g} s"
        else:
            first = first_of(failures)
            reason = f"training rank {first.rank}: {first.reason}"
        self._coordinator.abort(reason)
        patience = time.monotonic() + STOP_PATIENCE_S
        while time.monotonic() < patience:
            outcome = self._ended(SLICE_S)
            if outcome is not None:
                return outcome
        return _Outcome(reason=f"{reason}; and the coordinator did not stop it", weights="unusable")

    def _ended(self, timeout_s: float = 0.0) -> _Outcome | None:
        """The coordinator's outcome, if there is one within `timeout_s`."""
        try:
            return _Outcome(report=self._coordinator.wait(timeout_s))
        except Exception as error:
            if native.timed_out(error):
                return None
            return _Outcome(reason=str(error), weights=getattr(error, "weights", "untouched"))

    def _await_end(self, deadline: float) -> None:
        while True:
            try:
                self._owner.await_end(SLICE_S)
                return
            except Exception as error:
                if not native.timed_out(error) or time.monotonic() > deadline:
                    raise

    def _forget_last_attempt(self) -> None:
        """Drop what a failed attempt may have left to be read at the owner."""
        for _ in range(4):  # at most a preparation and an end, each of two attempts
            try:
                self._owner.await_prepared(0.0)
            except Exception as error:
                if native.timed_out(error):
                    return

    def _error(self, failures: list[Failure], outcome: _Outcome) -> RefitError:
        reason, weights = outcome.reason, outcome.weights
        if outcome.report is not None:
            weights = "committed"
        if not failures:
            return RefitError(reason, weights=weights)
        first = first_of(failures)
        if not reason:
            reason = f"training rank {first.rank}: {first.reason}"
        fatal = out_of_step(failures, self._ranks.size)
        if fatal:
            reason += "; training ranks have lost step: restart the job"
        rank = None if first.kind == "follows" else first.rank
        return RefitError(reason, rank=rank, tensor=first.tensor, weights=weights, fatal=fatal)

    # Shared by both.

    def _walk(self, consume: Callable[[str, torch.Tensor], None]) -> Failure | None:
        """Iterate the source to its end, on this rank as on all others, even when `consume` has failed."""
        self._walks += 1
        topic = f"walk-{self._walks}"
        stream = Prefetch(self.source)
        failure, count, give_up_at = None, 0, None
        try:
            while True:
                item = stream.next(SLICE_S)
                if item is None:
                    news = self._ranks.heard(topic) if give_up_at is None else None
                    if news:
                        give_up_at = time.monotonic() + self.config.source_grace_s
                    if give_up_at is not None and time.monotonic() > give_up_at:
                        return failure or self._failure("its source hangs", kind="abandoned", count=count)
                    continue
                if give_up_at is not None:
                    give_up_at = time.monotonic() + self.config.source_grace_s
                if isinstance(item, End):
                    if item.error is None:
                        return failure
                    told = _told(item.error)
                    reason = f"the weight source failed after {count} tensors: {told}"
                    ended = self._failure(reason, kind="source", count=count)
                    self._ranks.announce(topic, f"training rank {ended.rank}: {reason}")
                    self._owner.fail(reason)
                    return ended
                count += 1
                if failure is None:
                    name, tensor = item
                    failure = self._attempt(consume, name, tensor, tensor=str(name))
                    if failure is not None:
                        self._owner.fail(failure.reason)
        finally:
            stream.drop()

    def _hand_over(self, call: Callable[..., Any], name: str, tensor: torch.Tensor) -> None:
        """Pass a tensor's memory to the native part; `host` keeps it alive during the call."""
        host = tensor.detach().to("cpu").contiguous()
        call(name, list(host.shape), str(host.dtype), host.data_ptr(), host.numel() * host.element_size())

    def _attempt(self, call: Callable[..., Any], *arguments: Any, tensor: str | None = None) -> Failure | None:
        try:
            call(*arguments)
        except Exception as error:
            return self._failure(error, tensor=tensor)
        return None

    def _failure(
        self, error: Exception | str, *, tensor: str | None = None, kind: str = "own", count: int = 0
    ) -> Failure:
        reason = error if isinstance(error, str) else _told(error)
        if tensor is not None and f"`{tensor}`" not in reason:
            if type(error).__name__ == "RefitError":
                # The native part names the tensor in what is about a tensor: this is about the attempt.
                kind, tensor = "follows", None
            else:
                reason = f"tensor `{tensor}`: {reason}"
        return Failure(self._ranks.rank, reason, tensor, kind, count)

    def _settle(self, mine: Failure | None) -> None:
        """The end of a stage of `initialize`: all ranks go on, or all raise."""
        failures = self._ranks.failures(mine)
        if failures:
            first = first_of(failures)
            fatal = out_of_step(failures, self._ranks.size)
            reason = f"training rank {first.rank}: {first.reason}"
            raise RefitError(reason, rank=first.rank, tensor=first.tensor, fatal=fatal)


def _told(error: BaseException) -> str:
    """One line for people: native errors speak for themselves, others need their type."""
    text = (str(error).strip().splitlines() or [""])[0]
    if type(error).__name__ == "RefitError" and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _difference(rank: int, catalog: list, first: list) -> str:
    for mine, other in zip(catalog, first, strict=False):
        if mine != other:
            return f"the weight source yields {mine} on rank {rank} where rank 0 has {other}"
    return f"the weight source yields {len(catalog)} tensors on rank {rank} and {len(first)} on rank 0"
