"""What must be there before anything is downloaded: programs, Python's own modules, room on the disk."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from environments.places import REPOSITORY
from environments.problems import SetupProblem

GIGABYTE = 10**9

PROGRAMS = {
    "cargo": "install Rust with rustup (Debian's own cargo is too old)",
    "rustc": "install Rust with rustup (Debian's own is too old)",
    "g++": "run `apt install g++`",
    "cc": "run `apt install gcc`",
}
MODULES = ("venv", "ensurepip")


def check_python(
    version: tuple[int, ...] = sys.version_info[:2],
    machine: str = platform.machine(),
    find_module: Callable[[str], object] = importlib.util.find_spec,
) -> None:
    """The interpreter must be the one the pins were made for, and able to make virtual environments."""
    if version != (3, 11):
        raise SetupProblem(
            f"Python 3.11 is needed and {version[0]}.{version[1]} was used; run `apt install python3.11 "
            f"python3.11-venv` or name one with `make PYTHON=/path/to/python3.11`"
        )
    if (sys.platform, machine) != ("linux", "x86_64"):
        raise SetupProblem(
            f"the environments are pinned for Linux on x86_64 and this is {sys.platform} on {machine}; "
            f"run it on an x86_64 machine"
        )
    for name in MODULES:
        if find_module(name) is None:
            raise SetupProblem(f"Python's module {name} is missing; run `apt install python3.11-venv`")


def check_programs(search: str | None = None) -> None:
    """The compilers must be on PATH (`search` when given)."""
    for name, cure in PROGRAMS.items():
        if shutil.which(name, path=search) is None:
            raise SetupProblem(f"the program {name} is not found; {cure}")


def rustc_version(environ: Mapping[str, str] = os.environ) -> str:
    """The compiler's version line; refused when it is older than the workspace's `rust-version`."""
    answer = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=False, env=dict(environ))
    found = re.match(r"rustc (\d+)\.(\d+)", answer.stdout)
    if answer.returncode != 0 or found is None:
        why = (answer.stderr.strip().splitlines() or ["it printed no version"])[0]
        raise SetupProblem(f"rustc does not run ({why}); run `rustup default stable`")
    manifest = (REPOSITORY / "Cargo.toml").read_text(encoding="utf-8")
    needed = re.search(r'^rust-version = "(\d+)\.(\d+)', manifest, re.MULTILINE)
    if needed and (int(found[1]), int(found[2])) < (int(needed[1]), int(needed[2])):
        raise SetupProblem(
            f"rustc {found[1]}.{found[2]} is too old, {needed[1]}.{needed[2]} is needed; run `rustup update stable`"
        )
    return answer.stdout.strip()


def check_disk(
    folder: Path, needed: Mapping[str, float], statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
) -> None:
    """The disk of `folder` must have room for what is still missing: `needed`, gigabytes by name."""
    total = sum(needed.values())
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    disk = statvfs(existing)
    free = disk.f_bavail * disk.f_frsize / GIGABYTE
    if free < total:
        parts = ", ".join(f"{name} {size:.1f}" for name, size in needed.items())
        raise SetupProblem(
            f"{folder} has {free:.1f} GB free and {total:.1f} GB are needed ({parts}); "
            f"free some space or set DCR_CACHE to a folder on a larger disk"
        )


def make_folder(folder: Path) -> None:
    """Make the cache folder and see that it can be written to."""
    cure = "set DCR_CACHE to a folder of yours"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupProblem(f"the cache folder {folder} cannot be made ({error.strerror}); {cure}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SetupProblem(f"the cache folder {folder} cannot be written to; {cure}")
