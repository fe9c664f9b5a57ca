"""Iterating a weight source beside the work on its tensors, in chunks of host memory."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from dcr_training.parts import Part
from dcr_training.staging import Staging


@dataclass
class Chunk:
    """Some tensors of a source, in host memory, with all that is needed to find their errors."""

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0
    count: int = 0
    """Tensors that the source had yielded by the end of this chunk, wanted or not."""

    @property
    def names(self) -> list[str]:
        """Of all its tensors and parts."""
        return [name for name, _ in self.tensors] + [part.name for part in self.parts]


@dataclass
class End:
    """The source has yielded everything, or has raised `error`."""

    error: BaseException | None = None
    count: int = 0
    tensor: str | None = None
    """The tensor that could not be taken, if it was one."""
    complete: bool = False
    """Whether the source was iterated to its end, also where a tensor of it could not be taken."""


class Prefetch:
    """A thread that iterates a source to its end, whatever becomes of the tensors.

    Other ranks wait in the source's collectives, so the iteration goes on when nobody wants the tensors any
    more. And a caller that waits here, instead of inside a collective, can give up. Tensors for which `wanted` is
    false are dropped where they come; the others are collected until they total `chunk_bytes`. One chunk is filled
    while another waits and a third is compared: no more are held.
    """

    def __init__(
        self,
        source: Iterable[Any],
        wanted: Callable[..., bool],
        chunk_bytes: int,
    ) -> None:
        self._source = source
        self._wanted = wanted
        self._chunk_bytes = chunk_bytes
        self._queue: queue.Queue = queue.Queue(1)
        self._unwanted = threading.Event()
        # Device and stream belong to a thread; the source must come after the optimizer's kernels.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._run, name="dcr-source", daemon=True).start()

    def next(self, timeout_s: float) -> Chunk | End | None:
        """The next chunk, the end, or None when neither came in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def drop(self) -> None:
        """Let the iteration run to its end without anybody taking its tensors."""
        self._unwanted.set()

    def _run(self) -> None:
        end = End()
        try:
            on_stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
            with torch.no_grad(), on_stream:
                self._iterate(end)
        except BaseException as caught:  # the caller raises it, on every rank
            end.error, end.tensor, end.complete = caught, None, False
        self._put(end)

    def _iterate(self, end: End) -> None:
        """Other ranks wait for this one in the source's collectives: a tensor that can't be taken ends nothing."""
        staging, chunk = Staging(self._chunk_bytes), Chunk()
        for item in self._source:
            end.count += 1
            if self._unwanted.is_set() or end.error is not None:
                continue
            try:
                chunk = self._add(item, chunk, end, staging)
            except Exception as error:
                end.error = error
        end.complete = True
        if end.error is None and chunk.names:
            try:
                self._put(self._close(chunk, end, staging))
            except Exception as error:
                end.error = error

    def _add(self, item: Any, chunk: Chunk, end: End, staging: Staging) -> Chunk:
        """Copy what was yielded into the chunk, or into the next one when this one is full."""
        part = item if isinstance(item, Part) else None
        name, tensor = (part.name, part.tensor) if part else item[-2:]
        if not part and not self._wanted(name):
            return chunk
        end.tensor = name
        nbytes = tensor.numel() * tensor.element_size()
        if chunk.nbytes and chunk.nbytes + nbytes > self._chunk_bytes:
            self._put(self._close(chunk, end, staging))
            chunk = Chunk()
        host = staging.copy(tensor)
        if part:
            chunk.parts.append(part.with_tensor(host))
        else:
            chunk.tensors.append((name, host))
        chunk.nbytes += nbytes
        end.tensor = None
        return chunk

    def _close(self, chunk: Chunk, end: End, staging: Staging) -> Chunk:
        staging.finish()
        chunk.count = end.count
        return chunk

    def _put(self, item: object) -> None:
        while not self._unwanted.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
