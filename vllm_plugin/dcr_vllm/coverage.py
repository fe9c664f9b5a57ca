"""Whether a catalog and the served model fit: no parameter is left out, no tensor is cut.

A native loader narrows what it is given to the rank's part and copies it. It does not notice when more was there to
take, nor when less than a parameter arrived; both would commit a version that the receiver does not hold.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

import torch

from dcr_vllm.storage import resident


class Coverage:
    """What the dry runs of one catalog write to and read from, in bytes.

    `shards` is the largest number of ranks among which the loader may divide one tensor.
    """

    def __init__(self, shards: int = 1) -> None:
        self.shards = max(shards, 1)
        self._written: dict[tuple, int] = {}

    def add(self, shape: tuple[int, ...], copies: Iterable[tuple], writes: Iterable[tuple]) -> str | None:
        """Takes one tensor's records, as `classify` does; one line when the loader cannot have taken all of it."""
        read, filled = {}, 0
        for _, address, dtype, sizes, strides, offset, _, _, source_strides in copies:
            place = (address, tuple(sizes), tuple(strides))
            # A repeated copy writes the same bytes again, and a broadcast one reads the same element.
            self._written[place] = math.prod(sizes) * getattr(torch, dtype.removeprefix("torch.")).itemsize
            distinct = (size for size, stride in zip(sizes, source_strides, strict=True) if stride)
            read[(offset, tuple(sizes), tuple(source_strides))] = math.prod(distinct)
        for _, _, address, nbytes in writes:
            self._written[(address, nbytes)] = nbytes
            filled += nbytes
        if not read:
            return None
        # The last rank of a padded vocabulary takes fewer rows, and fills the others: bytes are at least elements.
        elements, taken = math.prod(shape), sum(read.values())
        if (taken + filled) * self.shards >= elements:
            return None
        ranks = f", and at most {self.shards} ranks divide it" if self.shards > 1 else ""
        return (
            f"it has shape {list(shape)}, but the native loader takes {taken} of its {elements} elements here{ranks}: "
            "the served model has another shape"
        )

    def incomplete(self, model: torch.nn.Module) -> str | None:
        """One line about the first parameter that the catalog does not fill; None when all are."""
        writes = sorted((place[0], nbytes) for place, nbytes in self._written.items())
        addresses = [address for address, _ in writes]
        before = [0, *accumulate(nbytes for _, nbytes in writes)]
        reasons = []
        for name, parameter in model.named_parameters():
            here = resident(name, parameter)
            first, end = (bisect_left(addresses, at) for at in (here.start, here.start + here.nbytes))
            missing = parameter.numel() * parameter.element_size() - (before[end] - before[first])
            if missing > 0:
                what = "nothing" if first == end else f"all but {missing // parameter.element_size()} elements"
                reasons.append(f"the training side's tensors fill {what} of parameter {name}")
        if not reasons:
            return None
        more = f" (and {len(reasons) - 1} more parameters)" if len(reasons) > 1 else ""
        return f"{reasons[0]}{more}: it exports too few tensors, or another shape than the served model's"
