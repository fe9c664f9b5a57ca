"""Running a command of the set-up: output into a log, the last line into the progress, its end with ours."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from environments.progress import Step

GRACE_SECONDS = 5.0


class CommandFailed(Exception):
    """A command ended with a status other than 0."""

    def __init__(self, status: int, output: str, log: Path) -> None:
        super().__init__(f"exit status {status}, output in {log}")
        self.status = status
        self.output = output
        self.log = log


def run(
    command: Sequence[str | os.PathLike[str]],
    step: Step,
    log: Path,
    variables: Mapping[str, str],
    *,
    folder: Path | None = None,
    held_lock: int | None = None,
) -> None:
    """Run `command` to its end and raise `CommandFailed` unless it succeeds.

    The command has its own process group, which is ended when this call is interrupted. `held_lock`, an open
    lock file, is inherited: should this process be killed outright, the lock stays taken until the command
    ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    process = subprocess.Popen(
        [os.fspath(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(variables),
        cwd=folder,
        start_new_session=True,
        pass_fds=() if held_lock is None else (held_lock,),
    )

    def read() -> None:
        assert process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                lines.append(line)
                step.said(line)
                file.write(line)
                file.flush()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            step.tick()
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
    except BaseException:
        end_group(process)
        raise
    finally:
        # A helper that outlives the command may keep the pipe open: do not wait for it.
        reader.join(2.0)
    if process.returncode != 0:
        raise CommandFailed(process.returncode, "".join(lines), log)


def end_group(process: subprocess.Popen[str]) -> None:
    """End a command and what it started: ask first, then insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
