"""The serving model's parameters and buffers as memory: where each lies, and whether it still lies there."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import chain

import torch


@dataclass(frozen=True)
class Resident:
    """One parameter or buffer: its memory and geometry. `start` is an address, `nbytes` the span of its view."""

    name: str
    start: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class ResidentStorage:
    """All parameters and buffers of a model at one moment.

    Tied tensors appear under every name they have. Tensors without elements have no memory to write and
    are kept only for `moved`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensors = [resident(name, tensor) for name, tensor in named_storage(model)]
        placed = sorted((tensor for tensor in self.tensors if tensor.nbytes), key=lambda t: t.start)
        self._starts = [tensor.start for tensor in placed]
        self._placed = placed
        # Views may nest (a fused buffer and its parts): how far back one that covers an address can start.
        self._longest = max((tensor.nbytes for tensor in placed), default=0)

    def ranges(self) -> list[tuple[int, int, str]]:
        """(address, bytes, name) of everything that has memory."""
        return [(tensor.start, tensor.nbytes, tensor.name) for tensor in self._placed]

    def find(self, address: int) -> Resident | None:
        """A parameter or buffer whose memory holds this address."""
        index = bisect_right(self._starts, address) - 1
        while index >= 0 and self._starts[index] + self._longest > address:
            if address < self._starts[index] + self._placed[index].nbytes:
                return self._placed[index]
            index -= 1
        return None

    def moved(self, model: torch.nn.Module) -> str | None:
        """One line about the first tensor that no longer is where and what it was; None when all are."""
        now = {name: resident(name, tensor) for name, tensor in named_storage(model)}
        for was in self.tensors:
            if (found := now.get(was.name)) != was:
                what = "is gone" if found is None else "has other storage, shape, strides or dtype"
                return f"resident tensor {was.name} {what}: something replaced it after prewarm"
        if len(now) != len(self.tensors):
            new = sorted(now.keys() - {tensor.name for tensor in self.tensors})
            return f"resident tensor {new[0]} appeared after prewarm"
        return None


def named_storage(model: torch.nn.Module):
    """(name, tensor) of every parameter and buffer, tied ones under each name."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def resident(name: str, tensor: torch.Tensor) -> Resident:
    """Where and what a tensor is."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    elements = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    nbytes = elements * tensor.element_size()
    return Resident(name, tensor.data_ptr() if nbytes else 0, nbytes, shape, stride, tensor.dtype)
