"""The processes of a run end with whoever started them, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from testbed import processes

STARTER = """
import os, sys, time
from pathlib import Path
from testbed import processes
process = processes.start(["sleep", "600"], os.environ, Path(sys.argv[1]) / "log")
print(process.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition, patience_s: float = 10.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_starter_that_is_killed_leaves_nothing_behind(tmp_path):
    starter = subprocess.Popen([sys.executable, "-c", STARTER, tmp_path], stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    assert is_running(pid)
    starter.kill()
    starter.wait()
    assert wait_for(lambda: not is_running(pid))


def test_stop_ends_children_as_well(tmp_path):
    script = "sleep 600 & echo $! > child; trap '' TERM; while :; do sleep 0.1; done"
    process = processes.start(["bash", "-c", f"cd {tmp_path}; {script}"], os.environ, tmp_path / "log")
    assert wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
    child = int((tmp_path / "child").read_text())
    processes.stop(process, patience_s=0.5)
    assert process.returncode == -signal.SIGKILL
    assert wait_for(lambda: not is_running(child))
    processes.stop(process)


def test_a_program_that_is_missing_or_ends_early_is_named(tmp_path):
    with pytest.raises(processes.ProcessError, match=r"/no/such/program cannot be started"):
        processes.start(["/no/such/program"], os.environ, tmp_path / "log")
    process = processes.start(["bash", "-c", "echo too bad; exit 3"], os.environ, tmp_path / "log")
    with pytest.raises(processes.ProcessError, match=r"(?s)ended with status 3: too bad"):
        processes.wait_for_file(tmp_path / "never", process, tmp_path / "log", 10)
