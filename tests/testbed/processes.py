"""Starting and ending the processes of a run: each in a session of its own, none left behind."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


class ProcessError(Exception):
    """A process could not be started, ended early or was late; one line, then the end of its log."""


def start(command: Sequence[str | Path], env: Mapping[str, str], log: Path) -> subprocess.Popen:
    """Starts a process with its output in `log`.

    Ctrl-C on the terminal does not reach it (its own session): whoever started it ends it. Should the starter be
    killed, the kernel ends it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as output:
            return subprocess.Popen(
                [str(part) for part in command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # It calls prctl and nothing that could need a lock of another thread.
                preexec_fn=dies_with_parent(),  # noqa: PLW1509
            )
    except OSError as error:
        raise ProcessError(f"{command[0]} cannot be started: {error.strerror}") from error


def dies_with_parent() -> Callable[[], None]:
    """For `preexec_fn`: the kernel ends the new process when the thread that starts it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask_the_kernel() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask_the_kernel


def stop(process: subprocess.Popen | None, patience_s: float = 15.0) -> None:
    """Ends a process that `start` started, and its session. Safe to call again."""
    if process is None:
        return
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    # Its session holds nobody else's processes.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)


def wait_for_file(path: Path, process: subprocess.Popen, log: Path, timeout_s: float) -> str:
    """The text of a file that a process writes once it is ready."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if process.poll() is not None:
            raise ProcessError(f"{process.args[0]} ended with status {process.returncode}: {tail(log)}")
        if time.monotonic() > deadline:
            raise ProcessError(f"{process.args[0]} was not ready within {timeout_s:g} s: {tail(log)}")
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"(no log {log}: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:])
