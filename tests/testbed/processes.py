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
    """Ends a process that `start` started, and all that it started itself. Safe to call again.

    All of its process group are asked first. What is left after `patience_s` seconds is killed, one by one, also
    what has left the group or the session; a ProcessError names what even then does not end.
    """
    if process is None:
        return
    # Whoever leaves the session and then loses its parent is found only now.
    known = family(process)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    deadline = time.monotonic() + patience_s
    while left := {pid: start for pid, start in (known | family(process)).items() if started_at(pid) == start}:
        known |= left
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ProcessError(f"{process.args[0]}: processes {sorted(left)} do not end, not even killed")
        time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)


def family(process: subprocess.Popen) -> dict[int, int]:
    """Running processes of the session that `process` leads, and all their descendants, with `started_at`."""
    leader = process.pid
    if process.poll() is not None and status_of(leader):
        # It has been waited for, so its number is a stranger's now; and that only if its session is empty.
        return {}
    stats = {pid: stat for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (stat := status_of(pid))}
    found = {pid for pid, stat in stats.items() if leader in (pid, stat["session"])}
    grown = True
    while grown:
        children = {pid for pid, stat in stats.items() if stat["parent"] in found} - found
        found |= children
        grown = bool(children)
    return {pid: stats[pid]["start"] for pid in found}


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone. Tells a number that is used again."""
    stat = status_of(pid)
    return stat and stat["start"]


def status_of(pid: int) -> dict[str, int] | None:
    """Parent, session and start of a process that still runs."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything; the fields after it are counted from the last one.
    state, parent, _, session, *rest = text.rpartition(")")[2].split()
    if state in "ZX":
        return None
    return {"parent": int(parent), "session": int(session), "start": int(rest[15])}


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
