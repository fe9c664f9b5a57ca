"""Sources of canonical tensors: names and layouts of a Hugging Face checkpoint, from a model in training.

A source is iterated twice when a client starts and once in every refit, on all training ranks at the same
time: it may use collectives. Each iteration yields the same names in the same order on every rank; a rank's
owner takes the tensors that it owns and drops the others. It runs in a thread beside the caller's.

Where a rank has only a part of a tensor, its source yields a `dcr_training.Part` instead, and the tensor's
owner assembles the parts of all ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dcr_training.parts import Part


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
    of (name, tensor), or `Part`s, or a mapping. It is called in every iteration, on all ranks. Tensors that are sharded as
    `DTensor` (FSDP2) are gathered, which is a collective.
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

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor] | Part]:
        weights = self._weights()
        for item in weights.items() if isinstance(weights, Mapping) else weights:
            if isinstance(item, Part):
                yield item
            else:
                name, tensor = item
                yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def metadata(self) -> dict[str, Any]:
        """The class of what was given."""
        return {"source": "state-dict", "model": self._name}
