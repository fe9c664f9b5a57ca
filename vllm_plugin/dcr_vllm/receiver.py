"""The receiver's thread in a vLLM worker: prewarm, apply and finish, as the native receiver hands them out.

Nothing here may raise into the worker: vLLM's executor loses step with its ranks when one of them raises. What goes
wrong is reported through the native receiver, in one line.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import torch
from dcr import _native

from dcr_vllm.loader_layout import layout_is_kept
from dcr_vllm.prewarm import CanonicalTensor, Prewarmed, one_line, prewarm
from dcr_vllm.scratch import ScratchManager
from dcr_vllm.storage import ResidentStorage

logger = logging.getLogger("vllm.dcr")

POLL_S = 1.0


class ReceiverThread:
    """Runs the tasks of one native receiver against one model.

    `shards` is the largest number of ranks among which the native loader may divide one tensor.
    """

    def __init__(
        self, model: torch.nn.Module, name: str, relay: str | None = None, *, shards: int = 1, receiver: Any = None
    ) -> None:
        self.model = model
        self.name = name
        self.shards = shards
        self._receiver = receiver or _native.Receiver(name, relay=relay)
        self._manager: ScratchManager | None = None
        self._attempt: str | None = None
        self._thread = threading.Thread(target=self._run, name="dcr-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and the connection. A task that runs is finished first."""
        self._receiver.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)

    def _run(self) -> None:
        while True:
            try:
                task = self._receiver.next_task(POLL_S)
                if task is None:
                    continue
                if task.kind == "shutdown":
                    return
                self._do(task)
            except BaseException as error:
                # The native receiver answers for what it can; a broken one must not spin.
                logger.error("dcr: %s: %s", self.name, one_line(error))
                with contextlib.suppress(Exception):
                    self._receiver.report_failure(one_line(error))
                time.sleep(POLL_S)

    def _do(self, task: _native.Task) -> None:
        started = time.perf_counter()
        if task.kind == "prewarm":
            try:
                classes, error = self._prewarm(task.catalog).rows(), None
            except Exception as cause:
                classes, error = [], one_line(cause)
            self._receiver.prewarmed(task, classes, error)
        elif task.kind == "apply":
            items = task.items
            error = self._try(self._apply, task.attempt, items)
            self._receiver.applied(task, len(items), time.perf_counter() - started, error)
        elif task.kind == "finish":
            error = self._try(self._finish)
            self._receiver.finished(task, time.perf_counter() - started, error)

    def _try(self, call, *args) -> str | None:
        try:
            call(*args)
            return None
        except Exception as error:
            logger.error("dcr: %s: %s", self.name, one_line(error))
            return one_line(error)

    def _prewarm(self, catalog: list[tuple[str, list[int], str]]) -> Prewarmed:
        self._manager = None
        if (reason := layout_is_kept(self.model)) is not None:
            raise RuntimeError(reason)
        storage = ResidentStorage(self.model)
        tensors = [CanonicalTensor(name, tuple(shape), dtype) for name, shape, dtype in catalog]
        prewarmed = prewarm(self.model, storage, tensors, self.shards)
        refused = any(kind == "unsupported" for kind, _ in prewarmed.classes.values())
        # A tensor that is refused leaves its parameter out as well: its own reason says more.
        if prewarmed.incomplete and not refused:
            raise RuntimeError(prewarmed.incomplete)
        self._manager = ScratchManager(self.model, storage, prewarmed)
        counts: dict[str, int] = {}
        for kind, _ in prewarmed.classes.values():
            counts[kind] = counts.get(kind, 0) + 1
        logger.info("dcr: %s: prewarmed %d tensors: %s", self.name, len(tensors), counts)
        return prewarmed

    def _apply(self, attempt: str | None, items: list[_native.Item]) -> None:
        manager = self._prepared()
        if attempt != self._attempt:
            manager.begin_attempt()
            self._attempt = attempt
        manager.apply(items)

    def _finish(self) -> None:
        manager = self._prepared()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if moved := manager.storage.moved(self.model):
            raise RuntimeError(moved)

    def _prepared(self) -> ScratchManager:
        if self._manager is None:
            raise RuntimeError("this receiver has not been prewarmed")
        return self._manager
