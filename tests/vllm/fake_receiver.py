"""A stand-in for the native receiver: hands out the tasks it was given and keeps the answers."""

import queue
import threading
from types import SimpleNamespace
from typing import Any


class FakeReceiver:
    """Tasks come from `give`; `answers` waits for what the thread said. `broken` raises once for each of its names."""

    def __init__(self, *broken: str) -> None:
        self.broken = list(broken)
        self.closed = threading.Event()
        self._tasks: queue.Queue = queue.Queue()
        self._answers: queue.Queue = queue.Queue()

    def give(self, kind: str, attempt: str = "first", catalog: list | None = None, items: list | None = None) -> None:
        """Queues a task."""
        self._tasks.put(SimpleNamespace(kind=kind, attempt=attempt, catalog=catalog or [], items=items or []))

    def answers(self, count: int, timeout_s: float = 60.0) -> list[Any]:
        """The next answers, in order."""
        return [self._answers.get(timeout=timeout_s) for _ in range(count)]

    def next_task(self, timeout_s: float) -> SimpleNamespace | None:
        self._maybe_break("next_task")
        if self.closed.is_set() and self._tasks.empty():
            return SimpleNamespace(kind="shutdown", attempt=None, catalog=[], items=[])
        try:
            return self._tasks.get(timeout=min(timeout_s, 0.05))
        except queue.Empty:
            return None

    def prewarmed(self, task: Any, classes: list, error: str | None = None) -> None:
        self._maybe_break("prewarmed")
        self._answers.put(("prewarmed", classes, error))

    def applied(self, task: Any, items: int, seconds: float, error: str | None = None) -> None:
        self._maybe_break("applied")
        assert seconds >= 0
        self._answers.put(("applied", items, error))

    def finished(self, task: Any, seconds: float, error: str | None = None) -> None:
        self._answers.put(("finished", error))

    def report_failure(self, reason: str) -> None:
        self._answers.put(("failure", reason))
        self._maybe_break("report_failure")

    def close(self) -> None:
        self._maybe_break("close")
        self.closed.set()

    def _maybe_break(self, name: str) -> None:
        if name in self.broken:
            self.broken.remove(name)
            raise RuntimeError(f"{name}\nis broken")
