"""A receiver without vLLM: the real native part, applied to tensors in a dictionary.

It takes the place of a rollout rank where a test is about the training side. Prewarm, placement and gates are
vLLM's, and tested there.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class SmallReceiver:
    """Holds one tensor for each canonical tensor, written through the real interceptor only."""

    def __init__(self, relay: str, name: str = "receiver/test/0") -> None:
        import dcr._native as native

        self.tensors: dict[str, torch.Tensor] = {}
        self.encodings: set[str] = set()
        self.classify: Callable[[str], tuple[str, str]] = lambda name: ("xor", "")
        self.refuse: str | None = None
        self._native = native
        self._interceptor = native.Interceptor()
        self._scratch = torch.zeros(0, dtype=torch.uint8)
        self._receiver = native.Receiver(name, relay)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._receiver.close()
        self._thread.join(10.0)

    def _serve(self) -> None:
        while True:
            task = self._receiver.next_task(1.0)
            if task is None:
                continue
            if task.kind == "shutdown":
                return
            if task.kind == "prewarm":
                self._allocate(task.catalog)
                classes = [(name, *self.classify(name)) for name, _, _ in task.catalog]
                self._receiver.prewarmed(task, classes)
            elif task.kind == "apply":
                self._receiver.applied(task, len(task.items), 0.0, self.refuse or self._apply(task.items))
            elif task.kind == "finish":
                self._receiver.finished(task)

    def _allocate(self, catalog: list[tuple[str, list[int], str]]) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, shape, dtype in catalog}
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self.tensors.items()}
        self._scratch = torch.zeros(max(sizes.values()), dtype=torch.uint8)
        ranges = [(tensor.data_ptr(), sizes[name], name) for name, tensor in self.tensors.items()]
        self._interceptor.set_resident(ranges)
        self._interceptor.set_scratch(self._scratch.data_ptr(), self._scratch.numel())

    def _apply(self, items: list[Any]) -> str | None:
        for item in items:
            self.encodings.add(item.encoding)
            tensor = self.tensors[item.name]
            view = (str(tensor.dtype), True, list(tensor.shape), list(tensor.stride()))
            self._interceptor.begin_item(item)
            self._interceptor.on_copy(tensor.data_ptr(), *view, self._scratch.data_ptr(), *view)
            violations = self._interceptor.end_item().violations
            if violations:
                return violations[0]
        return None
