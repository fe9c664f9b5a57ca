"""A small stand-in for `dcr._native` that fails where a test wants it to.

Owner and coordinator speak through the store of torch.distributed. It exists for tests of agreement among
ranks only; everything that moves a weight is tested with the real one.
"""

import json
import time
from typing import Any

import torch.distributed as dist

Described = tuple[str, list[int], str, int, int]
"""Name, shape, dtype, pointer and bytes of a tensor."""


class RefitError(Exception):
    """As the native one: one line, what it means for the weights, and the tensor that it is about."""

    weights = "untouched"
    tensor: str | None = None


class FakeNative:
    """A module: `Owner`, `Coordinator`, `RefitError`.

    `script` says what goes wrong: {"where": reason} with "where" one of "construct", "track", "register",
    "coordinator", "start", "peers", "prepare", "offer", "end_stream", "commit", or any of them with "@RANK"
    for one rank. It is emptied by `heal`.
    """

    RefitError = RefitError

    def __init__(self, rank: int, size: int, key: str, script: dict[str, str]) -> None:
        self.rank = rank
        self.size = size
        self.script = dict(script)
        self.store = dist.PrefixStore(f"fake/{key}", dist.distributed_c10d._get_default_store())
        self.offered: list[str] = []
        self.closed = 0

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.script.clear()
        self.offered.clear()

    def trouble(self, where: str) -> str | None:
        """The reason to fail here, if there is one."""
        return self.script.get(where) or self.script.get(f"{where}@{self.rank}")

    def check(self, where: str) -> None:
        """Fail here if the script says so."""
        if reason := self.trouble(where):
            raise RefitError(reason)

    def read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def put_once(self, key: str, value: str) -> None:
        self.store.compare_set(key, "", value)

    def assign_owners(self, shares: list[tuple[str, int, list[int]]], owners: int) -> list[int]:
        return [holders[sum(name.encode()) % len(holders)] for name, _, holders in shares]

    def Owner(self, index: int, owners: int, **_: Any) -> "FakeOwner":
        self.check("construct")
        assert (index, owners) == (self.rank, self.size)
        return FakeOwner(self)

    def Coordinator(self, *_: Any, **__: Any) -> "FakeCoordinator":
        self.check("coordinator")
        return FakeCoordinator(self)


class _Peer:
    def __init__(self, native: FakeNative) -> None:
        self.native = native
        self.refit = 0

    def wait_for(self, suffixes: list[str], timeout_s: float) -> tuple[str, str]:
        deadline = time.monotonic() + timeout_s
        while True:
            for suffix in suffixes:
                if value := self.native.read(f"{self.refit}/{suffix}"):
                    return suffix, value
            if time.monotonic() >= deadline:
                raise RefitError(f"waited {timeout_s}s for the refit to end")
            time.sleep(0.01)

    def tell(self, suffix: str, value: str) -> None:
        self.native.put_once(f"{self.refit}/{suffix}", value)

    def close(self) -> None:
        self.native.closed += 1


class FakeOwner(_Peer):
    """An owner that fails where the script says so."""

    def __init__(self, native: FakeNative) -> None:
        super().__init__(native)
        self.attempt: str | None = None

    def track(self, tensor: Described, role: str) -> None:
        if reason := self.native.trouble("track"):
            raise about(tensor[0], reason)

    def register(self, timeout_s: float, relay: str | None = None) -> None:
        self.native.check("register")

    def await_prepared(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            current = int(self.native.read("current") or 0)
            attempt = self.native.read(f"{current}/prepare")
            if current > self.refit and attempt:
                self.refit = current
                reason = self.native.trouble("prepare")
                if reason is None:
                    self.attempt = attempt
                    return {"attempt": attempt, "version": current, "mode": "dense"}
                self.tell("failed", f"owner/{self.native.rank}: {reason}")
            if time.monotonic() >= deadline:
                raise RefitError(f"waited {timeout_s}s for the coordinator to prepare a refit")
            time.sleep(0.01)

    def offer(self, tensors: list[Described]) -> None:
        if ended := self.native.read(f"{self.refit}/failed"):
            raise RefitError(ended)
        if reason := self.native.trouble("offer"):
            raise about(tensors[0][0], reason)
        self.native.offered += [tensor[0] for tensor in tensors]

    def end_stream(self, required: list[str]) -> dict[str, Any]:
        self.native.check("end_stream")
        self.tell(f"end/{self.native.rank}", "done")
        return {}

    def await_end(self, timeout_s: float) -> dict[str, Any]:
        _, value = self.wait_for(["report"], timeout_s)
        self.attempt = None
        return json.loads(value)["committed"]

    def fail(self, reason: str) -> None:
        if self.attempt is not None:
            self.tell("failed", f"owner/{self.native.rank}: {reason}")
            self.attempt = None


class FakeCoordinator(_Peer):
    """Prepares at once, commits when every owner has ended its stream."""

    def start(self, mode: str) -> None:
        self.native.check("start")
        self.refit += 1
        # Owners learn nothing of a refit that fails before it reaches them.
        if not self.native.trouble("peers"):
            self.tell("prepare", f"attempt-{self.refit}")
        self.native.store.set("current", str(self.refit))

    def wait(self, timeout_s: float) -> str:
        if reason := self.native.trouble("peers"):
            raise RefitError(reason)
        deadline = time.monotonic() + timeout_s
        for rank in range(self.native.size):
            kind, value = self.wait_for(["failed", f"end/{rank}"], max(0.0, deadline - time.monotonic()))
            if kind == "failed":
                raise failed(value)
        if reason := self.native.trouble("commit"):
            self.tell("failed", reason)
            raise failed(reason)
        report = {
            "attempt": f"attempt-{self.refit}",
            "mode": "dense",
            "committed": {"version": self.refit, "baseline": "00"},
            "totals": {"payloads": 2, "payload_bytes": 10, "changed": 3, "elements": 30, "bytes": 60},
            "stages": {"peers": 0.1, "streamed": 0.3, "staged": 0.0, "gate_opened": 0.5},
            "something_new": True,
        }
        self.tell("report", json.dumps(report))
        return json.dumps(report)

    def abort(self, reason: str) -> None:
        self.tell("failed", reason)


def failed(reason: str) -> RefitError:
    """What the coordinator raises."""
    error = RefitError(reason)
    error.weights = "unusable" if "wrote" in reason else "untouched"
    return error


def about(name: str, reason: str) -> RefitError:
    """What an owner raises about a tensor."""
    error = RefitError(f"tensor `{name}`: {reason}")
    error.tensor = name
    return error
