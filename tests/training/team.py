"""Training ranks for tests: processes on gloo that stay, and run one function after another."""

import contextlib
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_CONTEXT = multiprocessing.get_context("spawn")


class Team:
    """`size` processes in one process group. Functions and arguments must be picklable."""

    def __init__(self, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.size = size
        self._number = 0
        self._tasks = [_CONTEXT.Queue() for _ in range(size)]
        self._results = _CONTEXT.Queue()
        self._processes = [
            _CONTEXT.Process(target=_serve, args=(rank, size, port, tasks, self._results), daemon=True)
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240.0) -> list[Any]:
        """What `function(rank, *arguments)` returned on each rank; None for a rank that has died.

        An exception on a rank is an AssertionError here, with the rank's traceback.
        """
        self._number += 1
        for tasks in self._tasks:
            tasks.put((self._number, function, arguments))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.size:
            try:
                number, rank, good, value = self._results.get(timeout=0.2)
            except queue.Empty:
                for rank, process in enumerate(self._processes):
                    if not process.is_alive():
                        results.setdefault(rank, None)
                if time.monotonic() > deadline:
                    late = [rank for rank in range(self.size) if rank not in results]
                    raise AssertionError(f"{function.__name__} hangs on ranks {late}") from None
                continue
            if number != self._number:
                continue  # of a test that has failed already
            if not good:
                raise AssertionError(f"{function.__name__} failed on rank {rank}:\n{value}")
            results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, size: int, port: int, tasks: Any, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    while (task := tasks.get()) is not None:
        number, function, arguments = task
        try:
            results.put((number, rank, True, function(rank, *arguments)))
        except BaseException:
            results.put((number, rank, False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
