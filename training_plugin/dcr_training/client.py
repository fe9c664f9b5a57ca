"""The client of a training loop: baseline, refits, and one outcome on all training ranks."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcr_training import native
from dcr_training.config import RefitConfig
from dcr_training.construction import Construction
from dcr_training.errors import RefitError
from dcr_training.plan import Plan
from dcr_training.ranks import Failure, Ranks, attempt, first_of, out_of_step, told
from dcr_training.report import RefitReport
from dcr_training.sources import WeightSource
from dcr_training.threads import share_of_cores
from dcr_training.walk import SLICE_S

logger = logging.getLogger(__name__)

MODES = ("auto", "mixed", "overwrite", "dense")
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
        self._construction: Construction | None = None
        self._connected = False

    def initialize(self) -> None:
        """Take the model's present tensors as the source baseline, and connect to the relay."""
        self.take_baseline()
        try:
            self._settle(self._attempt(self._connect))
            self._connected = True
        except BaseException:
            self.close()
            raise

    def take_baseline(self) -> None:
        """Take the model's present tensors as the source baseline, without a connection: enough to `rehearse`."""
        if self._owner is not None:
            raise RefitError("this client is initialized already")
        source = self.source
        # Ranks meet only at the end of a stage, and the slowest stage is a refit.
        self._ranks = Ranks(source.rank, source.world_size, self.config.timeout_s + 2 * STOP_PATIENCE_S)
        try:
            fair = share_of_cores(self._ranks)  # a collective, whatever each rank's configuration says
            threads = self.config.threads or fair
            self._settle(self._attempt(self._make_owner, threads))
            self._construction = Construction(source, self.config, self._ranks, self._owner)
            for stage in self._construction.baseline_stages():
                self._settle(stage())
        except BaseException:
            self.close()
            raise
        self._log_plan()

    def rehearse(self, mode: str = "mixed", *, commit: bool = False, keep: bool = False) -> dict[str, Any]:
        """What a refit in this mode would send now, without sending it; all ranks get the sum over all owners.

        With `commit`, which only a client without a connection can, the next rehearsal is against the present tensors.
        With `keep`, this rank's payloads can be had from `rehearsed`.
        """
        if self._construction is None:
            raise RefitError("the refit client has no baseline: call initialize() or take_baseline() on every rank")
        began = time.monotonic()
        modes = self._ranks.gather(mode)
        if modes != [mode] * len(modes):
            raise RefitError(f"modes {modes} of the training ranks: all must rehearse the same")
        self._settle(self._attempt(self._owner.rehearse, mode, keep))
        failure = self._construction.stream(mode)
        seconds = time.monotonic() - began
        self._settle(failure)
        if commit:
            # After all ranks' streams have ended well: none is a step ahead of the others.
            self._settle(self._attempt(self._owner.commit_rehearsed))
        everybody = self._ranks.gather({**self._construction.totals, "seconds": seconds})
        summed = {name: sum(each[name] for each in everybody) for name in everybody[0]}
        return {**summed, "seconds": max(each["seconds"] for each in everybody)}

    def rehearsed(self) -> list[bytes]:
        """This rank's payloads of the last rehearsal that kept them."""
        return [] if self._owner is None else self._owner.rehearsed()

    @property
    def plan(self) -> Plan | None:
        """Which conversion tasks are affine, and who owns what; None without a baseline, or without such tasks."""
        return None if self._construction is None else self._construction.plan

    def check_replicas(self) -> None:
        """Raise `RefitError`, on every rank, if copies of a tensor on several ranks differ in any bit."""
        if self._construction is None:
            raise RefitError("the refit client has no baseline: call initialize() or take_baseline() on every rank")
        self._settle(self._construction.check_replicas())

    @property
    def baseline_bytes(self) -> int:
        """Bytes that this rank's share of the source baseline takes."""
        return 0 if self._owner is None else self._owner.baseline_bytes

    def refit(self, mode: str = "auto") -> RefitReport:
        """Bring the receivers to the source's present tensors; returns when they serve them.

        `mode` is "auto" (dense when a receiver does not hold the committed version, else mixed), "mixed",
        "overwrite" or "dense".
        """
        if self._owner is None:
            raise RefitError("the refit client is not initialized, or closed: call initialize() on every rank")
        if not self._connected:
            raise RefitError("the refit client has a baseline but no relay: call initialize(), not take_baseline()")
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
        self._owner = self._coordinator = self._ranks = self._construction = None
        self._connected = False
        for part in (coordinator, owner, ranks):
            if part is not None:
                part.close()

    def __enter__(self) -> "RefitClient":
        self.initialize()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The stages of `initialize`.

    def _make_owner(self, threads: int) -> None:
        rank, size = self._ranks.rank, self._ranks.size
        logger.info("refit client on rank %d of %d, %d threads: %s", rank, size, threads, self.source.metadata())
        names = ("chunk_bytes", "bucket_bytes", "window_bytes", "bucket_queue", "baseline_folder")
        options = {name: getattr(self.config, name) for name in names}
        self._owner = native.load().Owner(rank, size, threads=threads, **options)

    def _log_plan(self) -> None:
        plan = self._construction.plan
        if plan is not None and self._ranks.rank == 0:
            logger.info("%d of %d conversion tasks are affine", plan.count - len(plan.residual), plan.count)
            for index, reason in sorted(plan.residual.items()):
                logger.debug("residual: %s (%s)", ", ".join(sorted(plan.names[index])), reason)

    def _connect(self) -> None:
        relay = self.config.relay or os.environ.get("DCR_RELAY", "")
        try:
            self._owner.register(self.config.connect_timeout_s, self.config.relay)
        except Exception as error:
            if relay in str(error):
                raise
            raise RefitError(f"{told(error)}: is `dcr relay` running at {relay}?") from error
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
        failures, outcome, used = self._await_prepared(mine, outcome, deadline)
        if not failures:
            failures = self._ranks.failures(self._construction.stream(used))
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
    ) -> tuple[list[Failure], _Outcome | None, str]:
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
            if self._coordinator and mine is None and time.monotonic() > deadline:
                # Also where this rank's own is: another may wait for ever.
                mine = self._failure(f"owners were not prepared within {self.config.timeout_s:g} s")
            states = self._ranks.gather((mine, prepared and prepared["attempt"]))
            failures = [failure for failure, _ in states if failure is not None]
            attempts = {attempt for _, attempt in states}
            if failures:
                return failures, outcome, "" if prepared is None else prepared["mode"]
            if None not in attempts:
                if len(attempts) > 1:
                    failures = [self._failure(f"owners are prepared for different attempts: {attempts}")]
                return failures, outcome, "" if prepared is None else prepared["mode"]
            if self._coordinator and prepared is not None:
                outcome = self._ended()
                if outcome is not None:
                    mine = self._failure(outcome.reason, kind="follows")

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
        # Several ranks may have failed: the one that the coordinator heard of first is told of.
        heard = [failure for failure in failures if failure.kind != "follows" and failure.reason in reason]
        first = first_of(heard or failures)
        if not reason:
            reason = f"training rank {first.rank}: {first.reason}"
        fatal = out_of_step(failures, self._ranks.size)
        if fatal:
            reason += "; training ranks have lost step: restart the job"
        rank = None if first.kind == "follows" else first.rank
        return RefitError(reason, rank=rank, tensor=first.tensor, weights=weights, fatal=fatal)

    # Shared by both.

    def _attempt(self, call: Callable[..., Any], *arguments: Any, **about: str | None) -> Failure | None:
        return attempt(self._ranks.rank, call, *arguments, **about)

    def _failure(self, error: Exception | str, *, kind: str = "own") -> Failure:
        reason = error if isinstance(error, str) else told(error)
        return Failure(self._ranks.rank, reason, kind=kind)

    def _settle(self, mine: Failure | None) -> None:
        """The end of a stage of `initialize`: all ranks go on, or all raise."""
        failures = self._ranks.failures(mine)
        if failures:
            first = first_of(failures)
            fatal = out_of_step(failures, self._ranks.size)
            reason = f"training rank {first.rank}: {first.reason}"
            if fatal:
                # Nothing more can be agreed on.
                self.close()
                reason += "; training ranks have lost step: restart the job"
            raise RefitError(reason, rank=first.rank, tensor=first.tensor, fatal=fatal)
