"""Parts of canonical tensors that several training ranks convert, and their way to the rank that assembles them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcr_training import native
from dcr_training.errors import RefitError

Header = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]
"""Name, canonical shape, offset, extent and dtype of a part."""


@dataclass(frozen=True)
class Part:
    """A block of a canonical tensor, converted by this rank. A source may yield it in place of a whole tensor."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    """Canonical shape."""
    offset: tuple[int, ...]
    """First index of the block in each dimension."""
    tensor: torch.Tensor
    """The block itself."""

    @property
    def header(self) -> Header:
        """All but its bits."""
        return self.name, tuple(self.shape), tuple(self.offset), tuple(self.tensor.shape), self.tensor.dtype

    def with_tensor(self, tensor: torch.Tensor) -> "Part":
        """The same block from other memory."""
        return replace(self, tensor=tensor)


class Unassembled(RefitError):
    """Parts do not make up a canonical tensor."""


def assemble(parts: Iterable[Part], owner_of: dict[str, int], ranks: Any) -> list[tuple[str, torch.Tensor]]:
    """Bring parts to their tensors' owners; the tensors that this rank owns, assembled. All ranks call it.

    Parts must cover every element, and agree bit for bit where they overlap; else `Unassembled`, on the owner only.
    """
    assemblies: dict[str, Any] = {}
    metas: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    problem: Unassembled | None = None
    for rank, (name, shape, offset, _, dtype), tensor in _arriving(list(parts), owner_of, ranks):
        try:
            if name not in assemblies:
                assemblies[name] = native.load().Assembly(name, list(shape), str(dtype))
                metas[name] = (shape, dtype)
            assemblies[name].add(rank, list(offset), described(name, tensor))
        except ValueError as error:
            # Later parts still have to be received: their senders wait.
            problem = problem or _unassembled(name, error)
    if problem is not None:
        raise problem
    return [(name, _finish(name, assembly, *metas[name])) for name, assembly in assemblies.items()]


def _arriving(parts: list[Part], owner_of: dict[str, int], ranks: Any) -> Iterator[tuple[int, Header, torch.Tensor]]:
    """The parts of tensors that this rank owns, with the ranks that they come from.

    All ranks go through all parts in the same order, so each send meets its receive.
    """
    headers = ranks.gather([part.header for part in parts])
    own = iter(parts)
    for rank, told in enumerate(headers):
        for header in told:
            name, _, _, extent, dtype = header
            owner = owner_of[name]
            tensor = next(own).tensor if rank == ranks.rank else None
            if owner != rank and 0 not in extent:
                if ranks.rank == rank:
                    ranks.send(tensor, owner)
                elif ranks.rank == owner:
                    tensor = ranks.receive(extent, dtype, rank)
            if ranks.rank == owner:
                yield rank, header, torch.empty(extent, dtype=dtype) if tensor is None else tensor


def _finish(name: str, assembly: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    try:
        bits = assembly.finish()
    except ValueError as error:
        raise _unassembled(name, error) from error
    flat = torch.frombuffer(bits, dtype=torch.uint8) if bits else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def described(name: str, tensor: torch.Tensor) -> tuple[str, list[int], str, int, int]:
    """A contiguous host tensor as the native part takes it; the caller keeps it alive."""
    nbytes = tensor.numel() * tensor.element_size()
    return name, list(tensor.shape), str(tensor.dtype), tensor.data_ptr(), nbytes


def _unassembled(name: str, error: ValueError) -> Unassembled:
    text = str(error)
    return Unassembled(text if name in text else f"tensor `{name}`: {text}", tensor=name)
