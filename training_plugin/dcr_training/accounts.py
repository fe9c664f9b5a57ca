"""What ranks tell each other of their tasks and tensors, and how what they told differs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dcr_training.errors import RefitError
from dcr_training.parts import described
from dcr_training.plan import Told, told
from dcr_training.tasks import ConversionTask


def account_of(task: ConversionTask | None) -> Told | None:
    """This rank's account of a task; an error names it."""
    try:
        return told(task)
    except Exception as error:
        reason = f"tensor `{task.name}`: its shard can't be read: {type(error).__name__}: {error}"
        raise RefitError(reason, tensor=task.name) from error


def difference(task: ConversionTask, name: str, tensor: torch.Tensor) -> str | None:
    """How a shard differs from the canonical tensor that its task converts to."""
    shard = task.read().detach().cpu().contiguous()
    try:
        at = task.projection.first_difference(described(task.name, shard), described(name, tensor))
    except ValueError as error:
        return str(error)
    return None if at is None else f"the conversion to `{name}` changes bits, at element {at}"


def without(everybody: Sequence[Any]) -> list[int]:
    """The ranks that told nothing."""
    return [rank for rank, each in enumerate(everybody) if each is None]


def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of this shape and dtype."""
    elements = 1
    for size in shape:
        elements *= size
    return elements * getattr(torch, dtype.removeprefix("torch.")).itemsize


def catalog_difference(rank: int, catalog: list, first: list) -> str:
    """How what a rank's source yields differs from what rank 0's does."""
    for mine, other in zip(catalog, first, strict=False):
        if mine != other:
            return f"the weight source yields {mine} on rank {rank} where rank 0 has {other}"
    return f"the weight source yields {len(catalog)} tensors on rank {rank} and {len(first)} on rank 0"


def disagreement(everybody: Sequence[Mapping[str, bytes]]) -> tuple[str, int, int] | None:
    """The first shard of which two ranks have different fingerprints, and the ranks. Ranks tell those they hold."""
    first: dict[str, int] = {}
    for rank, found in enumerate(everybody):
        for shard, fingerprint in found.items():
            other = first.setdefault(shard, rank)
            if everybody[other][shard] != fingerprint:
                return shard, other, rank
    return None
