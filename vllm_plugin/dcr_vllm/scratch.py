"""The scratch manager: hands items to the native loader, one reusable buffer and one loader call for a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from dcr import _native

from dcr_vllm import hook
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
        # Decided now: a hook that is asked for and cannot be used is found before anything is sent.
        hook.copy_hook()
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
        finished: list[str] = []
        feed = self._feed(items, written, finished)
        with torch.no_grad(), hook.intercepting(self.interceptor):
            try:
                loaded = self.model.load_weights(feed)
            finally:
                feed.close()
        if self.interceptor.failure:
            raise LoaderConditionError(self.interceptor.failure)
        if len(finished) < len(items):
            raise LoaderConditionError(
                f"tensor {items[len(finished)].name}: the native loader returned before it had taken it"
            )
        if loaded is not None:
            self._compare(set(loaded), written)

    def _compare(self, reported: set[str], written: set[str]) -> None:
        """What the loader reports as loaded must be what intercepted copies wrote."""
        # A tied tensor may be reported under one of its names and written under another: compare addresses.
        starts = {tensor.name: tensor.start for tensor in self.storage.tensors}
        at = {name: starts.get(name, name) for name in reported | written}
        places_reported, places_written = ({at[name] for name in names} for names in (reported, written))
        silent = sorted(name for name in reported if at[name] not in places_written)
        if silent:
            raise LoaderConditionError(
                f"the native loader reports {silent[0]} as loaded, but no copy into it was intercepted"
            )
        unreported = sorted(name for name in written if at[name] not in places_reported)
        if unreported:
            raise LoaderConditionError(f"the native loader wrote {unreported[0]} without reporting it as loaded")

    def _feed(
        self, items: Sequence[_native.Item], written: set[str], finished: list[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for item in items:
            self.interceptor.begin_item(item)
            try:
                yield item.name, self._view(item)
            finally:
                outcome = self.interceptor.end_item()
            self._check(item, outcome)
            written.update(outcome.written)
            finished.append(item.name)

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
