"""The trainer program for Python callers. Needs neither torch nor Megatron in the caller's environment."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from testbed.processes import dies_with_parent

TESTS = Path(__file__).resolve().parents[1]


class TrainerError(Exception):
    """The trainer has ended, does not answer, or could not do what it was asked."""


class Trainer:
    """A running `testbed.trainer`: commands in, answers out, and its end known."""

    def __init__(self, process: subprocess.Popen, answers: int, log: Path) -> None:
        self.log = log
        """What the trainer and its libraries print."""
        self.started: dict[str, Any] = {}
        """The answer that it was ready."""
        self._process = process
        self._answers = answers
        self._received = b""

    @classmethod
    def start(
        cls,
        checkpoint: str | Path,
        env: Mapping[str, str] | None = None,
        log: str | Path = "trainer.log",
        *,
        python: str | Path = sys.executable,
        ranks: int = 2,
        lr: float | None = None,
        seed: int | None = None,
        timeout_s: float = 300.0,
    ) -> "Trainer":
        """Start the ranks and wait until they are ready.

        `env` is the whole environment (the caller's when None); `python` an interpreter with Megatron Bridge.
        With what `RefitConfig.from_environment` reads in `env` (`DCR_RELAY`, `DCR_RECORD`, ...), the trainer
        registers at the relay.
        """
        trainer = cls.launch(checkpoint, env, log, python=python, ranks=ranks, lr=lr, seed=seed)
        trainer.wait_ready(timeout_s)
        return trainer

    @classmethod
    def launch(
        cls,
        checkpoint: str | Path,
        env: Mapping[str, str] | None = None,
        log: str | Path = "trainer.log",
        *,
        python: str | Path = sys.executable,
        ranks: int = 2,
        lr: float | None = None,
        seed: int | None = None,
    ) -> "Trainer":
        """Start the ranks without waiting, while other things start as well. See `wait_ready`."""
        environment = dict(os.environ if env is None else env)
        path = [str(TESTS), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
        options = [f"--tp={ranks}"]
        options += [f"--lr={lr}"] if lr is not None else []
        options += [f"--seed={seed}"] if seed is not None else []
        ours, theirs = os.pipe()
        log = Path(log)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [str(python), "-m", "testbed.trainer", str(checkpoint), f"--answers={theirs}", *options],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs],
                    # Ctrl-C on the terminal is the caller's to handle; it then calls `stop`.
                    start_new_session=True,
                    # It calls prctl and nothing that could need a lock of another thread.
                    preexec_fn=dies_with_parent(),  # noqa: PLW1509
                )
        except OSError as error:
            os.close(ours)
            raise TrainerError(f"the trainer cannot be started with {python}: {error.strerror}") from error
        finally:
            os.close(theirs)
        return cls(process, ours, log)

    @property
    def pid(self) -> int:
        """Of the process that watches over the ranks."""
        return self._process.pid

    def wait_ready(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """Wait for the first answer; the trainer is stopped when there is none."""
        try:
            self.started = self._answer("start", timeout_s)
        except BaseException:
            self.stop()
            raise
        return self.started

    def step(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """One optimizer step: step (from 1), loss, grad_norm, updated, seconds."""
        return self._command({"do": "step"}, timeout_s)

    def refit(self, mode: str = "auto", timeout_s: float = 600.0) -> dict[str, Any]:
        """One refit: `RefitReport.as_dict()` of the committed refit."""
        return self._command({"do": "refit", "mode": mode}, timeout_s)["report"]

    def export(self, directory: str | Path, timeout_s: float = 300.0) -> Path:
        """Write the model's weights, as they are now, as a Hugging Face checkpoint in `directory`."""
        target = Path(directory).absolute()
        self._command({"do": "export", "dir": str(target)}, timeout_s)
        return target

    def stop(self, patience_s: float = 15.0) -> None:
        """End the trainer: politely, then by signals to its own processes. Safe to call again."""
        process = self._process
        if process.poll() is None:
            with contextlib.suppress(OSError):
                process.stdin.write(b'{"do": "quit"}\n')
            with contextlib.suppress(OSError):
                process.stdin.close()
            for polite in (True, False):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
                    break
                if polite:
                    process.terminate()
                else:
                    # It leads a session of its own: this reaches its ranks and nobody else.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._ended(f"cannot be asked to {command['do']}") from error
        return self._answer(command["do"], timeout_s)

    def _answer(self, doing: str, timeout_s: float) -> dict[str, Any]:
        line = self._line(doing, time.monotonic() + timeout_s, timeout_s)
        try:
            answer = json.loads(line)
        except ValueError as error:
            shown = line[:200].decode(errors="replace")
            raise TrainerError(f"the trainer gave no JSON but {shown!r} (log: {self.log})") from error
        if not answer.get("ok"):
            raise TrainerError(f"trainer: {doing} failed: {answer.get('error')} (log: {self.log})")
        return answer

    def _line(self, doing: str, deadline: float, timeout_s: float) -> bytes:
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0:
                waited = f"the trainer gave no answer to {doing} within {timeout_s:g} s"
                raise TrainerError(f"{waited}; its log ends:\n{self._tail()}")
            if not select.select([self._answers], [], [], min(left, 1.0))[0]:
                continue
            more = os.read(self._answers, 65536)
            if not more:
                raise self._ended(f"ended during {doing}")
            self._received += more
        line, self._received = self._received.split(b"\n", 1)
        return line

    def _ended(self, what: str) -> TrainerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20.0)
        status = self._process.returncode
        return TrainerError(f"the trainer {what} (exit status {status}); its log ends:\n{self._tail()}")

    def _tail(self, lines: int = 25) -> str:
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"(no log {self.log}: {error.strerror})"
        return "\n".join(text.splitlines()[-lines:]) or "(nothing)"
