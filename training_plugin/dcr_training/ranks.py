"""The training ranks of one client: they tell each other what happened, so that all end a refit alike."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcr_training.errors import RefitError


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank."""

    rank: int
    reason: str
    tensor: str | None = None
    kind: str = "own"
    """"own": this rank's own doing. "follows": the attempt had ended for a reason from elsewhere. "source":
    the weight source raised. "abandoned": its source hangs since another rank's raised."""
    count: int = 0
    """Tensors that the source had yielded (kinds "source" and "abandoned")."""


class Ranks:
    """Agreement among the ranks of torch's default process group, over a gloo group of its own.

    Constructing it is a collective. A group of its own keeps agreement apart from the trainer's collectives:
    it works from host memory, and also when another group hangs.
    """

    _made = 0

    def __init__(self, rank: int, size: int, patience_s: float) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None
        self._store: Any = None
        self._meeting = 0
        if size == 1:
            return
        if not dist.is_initialized() or dist.get_world_size() != size:
            have = dist.get_world_size() if dist.is_initialized() else "no process group"
            raise RefitError(f"the weight source says {size} training ranks but torch.distributed has {have}")
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
        # A connection of its own where the store allows it: another may be busy in a hanging collective.
        store = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(AttributeError, RuntimeError):
            store = store.clone()
        Ranks._made += 1
        self._store = dist.PrefixStore(f"dcr/{Ranks._made}", store)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks; all ranks must call it."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._meet()
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value; all ranks must call it."""
        if self.size == 1:
            return value
        values = [value]
        self._meet()
        try:
            dist.broadcast_object_list(values, src=0, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return values[0]

    def any(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether any rank has set it (`all_reduce_flags`); all ranks must call it."""
        if self.size == 1 or not flags:
            return flags
        combined = torch.tensor(flags, dtype=torch.uint8)
        self._meet()
        try:
            dist.all_reduce(combined, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return [bool(flag) for flag in combined]

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous host tensor to a rank that receives it."""
        try:
            dist.send(_bytes(tensor), group_dst=to, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receive a tensor of this shape and dtype from a rank that sends it."""
        tensor = torch.empty(shape, dtype=dtype)
        try:
            dist.recv(_bytes(tensor), group_src=source, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return tensor

    def failures(self, mine: Failure | None) -> list[Failure]:
        """All ranks' failures."""
        return [failure for failure in self.gather(mine) if failure is not None]

    def announce(self, topic: str, text: str) -> None:
        """Tell the other ranks something while they do not gather."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(topic, text)

    def heard(self, topic: str) -> str | None:
        """What another rank announced, if one did."""
        if self._store is None:
            return None
        try:
            return self._store.get(topic).decode() if self._store.check([topic]) else None
        except RuntimeError as error:
            return f"the store of torch.distributed is gone ({_first_line(error)})"

    def close(self) -> None:
        """Give the group back."""
        group, self._group, self._store = self._group, None, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

    def _meet(self) -> None:
        """Note that this rank has come to the next meeting, so that others can tell who has not."""
        self._meeting += 1
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"met/{self.rank}", str(self._meeting))

    def _absent(self) -> list[int]:
        """The ranks that have not come to this meeting."""
        absent = []
        for rank in range(self.size):
            try:
                known = self._store.check([f"met/{rank}"])
                if not known or int(self._store.get(f"met/{rank}")) < self._meeting:
                    absent.append(rank)
            except RuntimeError:
                return []  # the store is gone with the rank that kept it
        return absent

    def _lost(self, error: RuntimeError) -> RefitError:
        absent = self._absent()
        who = (
            f"training rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
            if absent
            else "other training ranks"
        )
        reason = f"training rank {self.rank} lost contact with {who} ({_first_line(error)})"
        missing = absent[0] if absent else None
        return RefitError(f"{reason}: see their logs, and restart the job", rank=missing, fatal=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as bytes: gloo does not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def attempt(rank: int, call: Callable[..., Any], *arguments: Any, **about: str | None) -> Failure | None:
    """Call something; this rank's failure if it raised. `about` is as in `failure_of`."""
    try:
        call(*arguments)
    except Exception as error:
        return failure_of(rank, error, **about)
    return None


def failure_of(rank: int, error: BaseException, *, tensor: str | None = None, otherwise: str = "own") -> Failure:
    """A rank's failure from what was raised.

    `tensor` is what it was about, where the error itself does not say. `otherwise` is the kind of a native error
    that names no tensor: while a stream is fed, such an error is about the attempt.
    """
    reason = told(error)
    named = getattr(error, "tensor", None)
    about_attempt = tensor is None or (otherwise != "own" and f"`{tensor}`" not in reason)
    if type(error).__name__ == "RefitError" and named is None and about_attempt:
        return Failure(rank, reason, kind=otherwise)
    tensor = named or tensor
    if tensor is not None and f"`{tensor}`" not in reason:
        reason = f"tensor `{tensor}`: {reason}"
    return Failure(rank, reason, tensor)


def told(error: BaseException) -> str:
    """One line for people: native errors speak for themselves, others need their type."""
    text = (str(error).strip().splitlines() or [""])[0]
    if type(error).__name__ in ("RefitError", "Unassembled") and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_of(failures: list[Failure]) -> Failure:
    """The failure that is the cause rather than a consequence."""
    order = {"own": 0, "source": 1, "follows": 2, "abandoned": 3}
    return min(failures, key=lambda failure: (order[failure.kind], failure.rank))


def out_of_step(failures: list[Failure], size: int) -> bool:
    """Whether ranks have left their sources at different points: their collectives no longer match."""
    if any(failure.kind == "abandoned" for failure in failures):
        return True
    left = [failure.count for failure in failures if failure.kind == "source"]
    return bool(left) and (len(left) < size or len(set(left)) > 1)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
