"""Iterating a weight source beside the work on its tensors."""

import contextlib
import queue
import threading
from collections.abc import Iterable

import torch

AHEAD = 2
"""Tensors converted ahead of the one that is compared: both overlap, and host memory stays low."""


class End:
    """The source has yielded everything, or has raised `error`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetch:
    """A thread that iterates a source to its end, whatever becomes of the tensors.

    Other ranks wait in the source's collectives, so the iteration goes on when nobody wants the tensors any
    more. And a caller that waits here, instead of inside a collective, can give up.
    """

    def __init__(self, source: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._source = source
        self._queue: queue.Queue = queue.Queue(AHEAD)
        self._unwanted = threading.Event()
        # Device and stream belong to a thread; the source must come after the optimizer's kernels.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._run, name="dcr-source", daemon=True).start()

    def next(self, timeout_s: float) -> tuple[str, torch.Tensor] | End | None:
        """The next tensor with its name, the end, or None when neither came in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def drop(self) -> None:
        """Let the iteration run to its end without anybody taking its tensors."""
        self._unwanted.set()

    def _run(self) -> None:
        error = None
        try:
            on_stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
            with torch.no_grad(), on_stream:
                for pair in self._source:
                    self._put(pair)
        except BaseException as caught:  # the caller raises it, on every rank
            error = caught
        self._put(End(error))

    def _put(self, item: object) -> None:
        while not self._unwanted.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
