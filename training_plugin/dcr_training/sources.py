"""Sources of canonical tensors: names and layouts of a Hugging Face checkpoint, from a model in training.

A source is iterated twice when a client starts and once in every refit, on all training ranks at the same
time: it may use collectives. Each iteration yields the same names in the same order on every rank; a rank's
owner takes the tensors that it owns and drops the others. It runs in a thread beside the caller's.

Where a rank has only a part of a tensor, its source yields a `dcr_training.Part` instead, and the tensor's
owner assembles the parts of all ranks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dcr_training import native
from dcr_training.parts import Part
from dcr_training.tasks import ConversionTask


@runtime_checkable
class WeightSource(Protocol):
    """What a `RefitClient` needs from a training loop."""

    @property
    def rank(self) -> int:
        """This process among the training ranks."""
        ...

    @property
    def world_size(self) -> int:
        """Number of training ranks: all must take part in every iteration."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor] | Part]:
        """Canonical names and full tensors, on any device; a part where this rank has no more."""
        ...

    def metadata(self) -> dict[str, Any]:
        """What this source is, for logs."""
        ...


class Distributed:
    """Rank and size of torch's default process group; a single process without one."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | Part]


class StateDictSource(Distributed):
    """Canonical tensors of a training loop without Megatron.

    `weights` is a module whose state dict has canonical names, or a callable that returns them in an iterable
    of (name, tensor), or `Part`s, or a mapping. It is called in every iteration, on all ranks. Where it gives a
    mapping with tensors that are sharded as `DTensor` (FSDP2), each rank compares its own shards in place, and they
    are gathered for a dense refit only; in an iterable they are gathered, which is a collective.
    """

    def __init__(self, weights: torch.nn.Module | Callable[[], Weights]) -> None:
        if isinstance(weights, torch.nn.Module):
            self._weights: Callable[[], Weights] = weights.state_dict
        elif callable(weights):
            self._weights = weights
        else:
            kind = type(weights).__name__
            raise TypeError(f"a state-dict source takes a module, or a callable that returns tensors; not {kind}")
        self._name = type(weights).__name__
        self._current: Mapping[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor] | Part]:
        weights = self._weights()
        for item in weights.items() if isinstance(weights, Mapping) else weights:
            if isinstance(item, Part):
                yield item
            else:
                name, tensor = item
                yield name, _whole(tensor)

    @property
    def direct_projection(self) -> bool:
        """Whether ranks hold shards that they can compare in place."""
        weights = self._weights()
        return isinstance(weights, Mapping) and any(hasattr(each, "full_tensor") for each in weights.values())

    dependencies_known = True

    def refresh(self) -> None:
        """Take the tensors as they are now; all ranks call it before shards are read."""
        weights = self._weights()
        self._current = weights if isinstance(weights, Mapping) else {}

    def tasks(self) -> list[ConversionTask | None]:
        """One task for each tensor, affine where its sharding is a block."""
        return [self._task(name, tensor) for name, tensor in self._current.items()]

    def convert(self, selected: Collection[int] | None) -> Iterator[tuple[int, str, torch.Tensor]]:
        """The tensors with these indices (None: all), gathered; the same on all ranks."""
        for index, (name, tensor) in enumerate(self._current.items()):
            if selected is None or index in selected:
                yield index, name, _whole(tensor)

    def metadata(self) -> dict[str, Any]:
        """The class of what was given."""
        return {"source": "state-dict", "model": self._name}

    def _task(self, name: str, tensor: torch.Tensor) -> ConversionTask:
        def read() -> torch.Tensor:
            now = self._current[name]
            return now.to_local() if hasattr(now, "to_local") else now

        shape, dtype = list(tensor.shape), str(tensor.dtype)
        offset, extent = [0] * len(shape), shape
        if hasattr(tensor, "to_local"):
            placements = tensor.placements
            # Exactly these: a subclass of `Shard` may interleave.
            if any(type(each).__name__ not in ("Shard", "Replicate") for each in placements):
                reason = f"sharded as {', '.join(map(str, placements))}"
                return ConversionTask(name, (name,), read, None, reason, f"{name}#{dist.get_rank()}")
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            extent, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
        projection = native.load().Projection.block(name, shape, dtype, list(offset), list(extent))
        shard = f"{name}@{'.'.join(map(str, offset))}"
        return ConversionTask(name, (name,), read, projection, "", shard)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
