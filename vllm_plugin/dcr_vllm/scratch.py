"""The scratch manager: hands items to the native loader, one reusable buffer and one loader call for a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from dcr import _native

from dcr_vllm.hook import intercepting
from dcr_vllm.prewarm import DTYPES, Prewarmed
from dcr_vllm.storage import ResidentStorage


class LoaderConditionError(Exception):
    """A rule of table A.2 was broken while items went through the native loader; one line says which."""


class ScratchManager:
    """Applies items through `model.load_weights` with its final copies intercepted (section 6.1)."""

    def __init__(self, model: torch.nn.Module, storage: ResidentStorage, prewarmed: Prewarmed) -> None:
        self.model = model
        self.storage = storage
        self.prewarmed = prewarmed
        self.interceptor = _native.Interceptor()
        self.interceptor.set_resident(storage.ranges())
        # Typed views need alignment, which a torch allocation has; one byte keeps an empty catalog simple.
        self.buffer = torch.zeros(max(prewarmed.largest, 1), dtype=torch.uint8)
        self.interceptor.set_scratch(self.buffer.data_ptr(), self.buffer.numel())

    def begin_attempt(self) -> None:
        """Forgets a failed attempt; raises when the model's storage is not what prewarm saw."""
        if moved := self.storage.moved(self.model):
            raise LoaderConditionError(moved)
        self.interceptor.begin_attempt()

    def apply(self, items: Sequence[_native.Item]) -> None:
        """Hands the items to the loader, in order. Raises `LoaderConditionError` when a rule is broken."""
        written: set[str] = set()
        with torch.no_grad(), intercepting(self.interceptor):
            loaded = self.model.load_weights(self._feed(items, written))
        if self.interceptor.failure:
            raise LoaderConditionError(self.interceptor.failure)
        if loaded is not None and (only := set(loaded) - written):
            names = {tensor.name: tensor.start for tensor in self.storage.tensors}
            # A tied tensor is reported under one of its names and written under another.
            starts = {names.get(name) for name in written}
            if missing := sorted(name for name in only if names.get(name) not in starts):
                raise LoaderConditionError(
                    f"the native loader reports {missing[0]} as loaded, but no copy into it was intercepted"
                )

    def _feed(self, items: Sequence[_native.Item], written: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in items:
            self.interceptor.begin_item(item)
            outcome = None
            try:
                yield item.name, self._view(item)
            finally:
                outcome = self.interceptor.end_item()
            self._check(item, outcome)
            written.update(outcome.written)

    def _view(self, item: _native.Item) -> torch.Tensor:
        dtype = DTYPES[item.dtype]
        elements = 1
        for size in item.shape:
            elements *= size
        return self.buffer[: elements * dtype.itemsize].view(dtype).view(item.shape)

    def _check(self, item: _native.Item, outcome: _native.Outcome) -> None:
        if outcome.violations:
            raise LoaderConditionError(outcome.violations[0])
        kind, _ = self.prewarmed.classes.get(item.name, ("unsupported", ""))
        if kind == "skip" and outcome.copies:
            raise LoaderConditionError(
                f"tensor {item.name}: the native loader skipped it at prewarm and now wrote {outcome.written}"
            )
        if kind != "skip" and not outcome.copies:
            raise LoaderConditionError(
                f"tensor {item.name}: the native loader wrote nothing, although it did at prewarm"
            )
