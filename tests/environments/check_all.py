#!/usr/bin/env python3.11
"""`make test` and `make lint`: run every part, also after one failed, and close with a table.

    check_all.py            all parts
    check_all.py lint       the parts of one group: lint, rust, python, e2e

Every part prints what its tools print, so each runner's closing line is there. The status is 0 only if no
part failed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from environments.checks import check_programs, check_python
from environments.places import REPOSITORY, Places
from environments.problems import SetupProblem
from environments.progress import PREFIX
from environments.setup_environments import set_up, stop

TEST_SECONDS = 900
"""No single Python test takes longer; one that does is stopped and its stack is shown."""

GRACE_SECONDS = 60
"""An interrupted part gets this long to end what it started."""

COMPONENTS = {"fmt": "rustfmt", "clippy": "clippy"}


@dataclass(frozen=True)
class Part:
    """One command of a check: the group it belongs to and the environment it runs in."""

    name: str
    group: str
    command: Sequence[str]
    environment: str = "tools"
    folders: Sequence[str] = ()
    """Where its tests lie; a part none of whose folders has tests is passed over and says so."""


def pytest_part(name: str, group: str, environment: str, *folders: str) -> Part:
    """The tests of some folders under tests/, in one environment."""
    command = ["python", "-m", "pytest", "-ra", f"--timeout={TEST_SECONDS}"]
    return Part(name, group, command, environment, [f"tests/{folder}" for folder in folders])


def rust_test_parts() -> list[Part]:
    """cargo-nextest where it is installed (it leaves documentation tests to cargo), else cargo alone."""
    if shutil.which("cargo-nextest"):
        runner = ["cargo", "nextest", "run", "--locked", "--workspace", "--no-fail-fast"]
        doc = ["cargo", "test", "--locked", "--workspace", "--doc"]
        return [Part("Rust tests", "rust", runner), Part("Rust documentation tests", "rust", doc)]
    return [Part("Rust tests", "rust", ["cargo", "test", "--locked", "--workspace", "--no-fail-fast"])]


def all_parts() -> list[Part]:
    """The parts in the order they run: the quick ones first."""
    clippy = ["cargo", "clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]
    return [
        Part("rustfmt", "lint", ["cargo", "fmt", "--all", "--check"]),
        Part("ruff check", "lint", ["ruff", "check", "."]),
        Part("ruff format", "lint", ["ruff", "format", "--check", "."]),
        Part("clippy", "lint", clippy),
        *rust_test_parts(),
        pytest_part("Python, training", "python", "training", "training", "gpu"),
        pytest_part("Python, rollout", "python", "rollout", "vllm", "environments", "packaging"),
        pytest_part("end to end", "e2e", "rollout", "e2e"),
    ]


def run_part(part: Part, places: Places) -> int | None:
    """The exit status of one part; None when it has no tests yet."""
    command = list(part.command)
    if part.folders:
        with_tests = [folder for folder in part.folders if any((REPOSITORY / folder).rglob("test_*.py"))]
        if not with_tests:
            return None
        command += with_tests
    variables = places.variables(part.environment)
    variables["PYO3_PYTHON"] = str(places.python("tools"))
    print(f"\n==> {part.name}: {' '.join(command)}", flush=True)
    program = shutil.which(command[0], path=variables["PATH"]) or command[0]
    process = subprocess.Popen(command, executable=program, cwd=REPOSITORY, env=variables)
    try:
        return process.wait()
    except BaseException as interruption:
        # Ctrl-C reaches the command from the terminal; a second one would cut its cleaning up short.
        if not isinstance(interruption, KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def check_components() -> None:
    """What a toolchain may lack is named before the set-up takes its minutes."""
    check_python()
    check_programs()
    for command, component in COMPONENTS.items():
        answer = subprocess.run(["cargo", command, "--version"], cwd=REPOSITORY, capture_output=True, check=False)
        if answer.returncode != 0:
            raise SetupProblem(f"cargo {command} does not run; run `rustup component add {component}`")


def table(results: Sequence[tuple[str, str, float]]) -> str:
    """The closing table: part, outcome, seconds."""
    rows = [("part", "outcome", "seconds")]
    rows += [(name, outcome, f"{seconds:.1f}") for name, outcome, seconds in results]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def main(groups: Sequence[str]) -> int:
    """Set up, run the parts of the groups (all without any), print the table."""
    parts = [part for part in all_parts() if not groups or part.group in groups]
    if not parts:
        print(f"{PREFIX}: no part belongs to {' '.join(groups)}; the groups are lint, rust, python, e2e")
        return 2
    signal.signal(signal.SIGTERM, stop)
    results: list[tuple[str, str, float]] = []
    failed = False
    began = time.monotonic()
    try:
        check_components()
        places = set_up()
        results.append(("set-up", "ok", time.monotonic() - began))
        for part in parts:
            start = time.monotonic()
            status = run_part(part, places)
            outcome = "no tests yet" if status is None else "ok" if status == 0 else f"FAILED ({status})"
            failed |= status not in (None, 0)
            results.append((part.name, outcome, time.monotonic() - start))
    except SetupProblem as problem:
        print(f"{PREFIX}: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{table(results)}\nstopped", flush=True)
        return 128 + signal.SIGINT
    results.append(("all", "FAILED" if failed else "ok", time.monotonic() - began))
    print(f"\n{table(results)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    sys.exit(main(sys.argv[1:]))
