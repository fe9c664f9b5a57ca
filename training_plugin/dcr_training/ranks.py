"""The training ranks of one client: they tell each other what happened, so that all end a refit alike."""

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
        try:
            dist.broadcast_object_list(values, src=0, group=self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return values[0]

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

    def _lost(self, error: RuntimeError) -> RefitError:
        reason = f"training rank {self.rank} lost contact with other training ranks ({_first_line(error)})"
        return RefitError(f"{reason}: see the logs of the others, and restart the job", fatal=True)


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
