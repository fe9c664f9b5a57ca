"""A vLLM OpenAI server with dcr's plugin, for callers that have neither vLLM nor torch."""

import http.client
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed import processes

MODEL = "policy"
QUIET = {
    # One or two shared cores: no pinning, one thread a rank.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # /pause, /resume and /collective_rpc.
    "VLLM_SERVER_DEV_MODE": "1",
}


# The servers here are on this machine: a proxy that the environment names is for others.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
UNREACHABLE = (OSError, http.client.HTTPException)


class ServerError(Exception):
    """The server could not be started, has ended, or did not do what it was asked."""


class VllmServer:
    """One server process and its workers.

    `environment` is all that the server sees, besides `QUIET`; `python` is that of an environment with vLLM, and
    `environment` must make dcr's plugin and `testbed` importable there. The thread that calls `start` must outlive
    the server: the kernel ends it with the thread.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        tp: int = 1,
        environment: Mapping[str, str],
        log: Path,
        python: Path | str = sys.executable,
        port: int | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.tp = tp
        self.environment = {**environment, **QUIET}
        self.log = log
        self.python = python
        self.port = port or free_port()
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the server's first process, which leads a session of its own."""
        if self._process is None:
            raise ServerError("the vLLM server is not running")
        return self._process.pid

    def start(self) -> None:
        """Starts the server; `wait_ready` waits for it."""
        if self._process is not None:
            raise ServerError(f"the vLLM server at {self.url} has been started before; stop it first")
        options = {
            "--model": self.checkpoint,
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": "bfloat16",
            "--max-model-len": 128,
            "--max-num-seqs": 4,
            "--max-num-batched-tokens": 256,
            "--kv-cache-memory-bytes": 64 << 20,
            "--gpu-memory-utilization": 0.2,
            "--tensor-parallel-size": self.tp,
            "--weight-transfer-config": '{"backend": "dcr"}',
            "--worker-extension-cls": "testbed.verify.VerifyExtension",
        }
        # The `vllm` program asks for the distribution "vllm", which the CPU package is not.
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += [str(part) for option in options.items() for part in option]
        self._process = processes.start(command, self.environment, self.log)

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Waits until the server answers. Raises ServerError with the end of its log when it has ended or is late."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._process is None:
                raise ServerError("the vLLM server has not been started")
            if (status := self._process.poll()) is not None:
                ended = f"the vLLM server ended with status {status} while it started"
                raise ServerError(f"{ended}{cause(self.log)}; {self.log} ends:\n{processes.tail(self.log)}")
            try:
                with OPENER.open(f"{self.url}/health", timeout=5):
                    return
            except UNREACHABLE:
                if time.monotonic() > deadline:
                    late = f"the vLLM server was not ready within {timeout_s:g} s"
                    raise ServerError(f"{late}; {self.log} ends:\n{processes.tail(self.log)}") from None
                time.sleep(0.3)

    def completion(self, prompt: str, max_tokens: int = 8) -> str:
        """One greedy completion."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self._call("POST", "/v1/completions", body)["choices"][0]["text"]

    def verify(self, checkpoint: Path) -> list[dict[str, Any]]:
        """Each rank's comparison of its resident model with a dense load; see `testbed.verify`."""
        return self.collective_rpc("dcr_verify", str(checkpoint))

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every worker; one answer a rank. Arguments are JSON; so are dict and list answers, and
        anything else arrives as text."""
        return self._call("POST", "/collective_rpc", {"method": method, "args": list(arguments)})["results"]

    def pause(self, mode: str = "wait", clear_cache: bool = True) -> None:
        """Closes the request gate; with "wait", after all running requests have ended. New ones queue."""
        self._call("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    def resume(self) -> None:
        """Opens the request gate."""
        self._call("POST", "/resume")

    def is_paused(self) -> bool:
        """Whether the request gate is closed."""
        return bool(self._call("GET", "/is_paused", timeout_s=30.0)["is_paused"])

    def stop(self) -> None:
        """Ends the server and its workers. Safe to call again."""
        process, self._process = self._process, None
        processes.stop(process, patience_s=20.0)

    def _call(self, verb: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 300.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=verb)
        try:
            with OPENER.open(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            raise ServerError(f"the vLLM server answered {error.code} to {path}: {text}") from error
        except UNREACHABLE as error:
            raise ServerError(f"the vLLM server does not answer to {path}: {error} (log: {self.log})") from error
        except ValueError as error:
            raise ServerError(f"the vLLM server's answer to {path} is not JSON: {error}") from error


def cause(log: Path) -> str:
    """The last error in a server's log that does not only point at another, after a colon; else nothing.

    vLLM's log ends with the main process's stack; the worker's own words stand above it.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = [match[0] for line in lines if (match := re.search(r"[\w.]+(?:Error|Exception|Interrupt): .*", line))]
    telling = [line for line in found if "root cause above" not in line]
    return f": {telling[-1][:300]}" if telling else ""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
