"""What is missing is named in one line, with what to do about it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from environments import checks
from environments.places import ENVIRONMENTS, HERE
from environments.problems import SetupProblem, explain


def programs_without(folder: Path, missing: str) -> str:
    """A search path with every program the set-up asks for but one."""
    for name in checks.PROGRAMS:
        if name != missing:
            (folder / name).symlink_to(shutil.which(name))
    return str(folder)


@pytest.mark.parametrize("command", ["setup_environments.py", "check_all.py"])
@pytest.mark.parametrize("missing", checks.PROGRAMS)
def test_a_missing_program_is_named_in_one_line(tmp_path, missing, command):
    search = programs_without(tmp_path, missing)
    cache = tmp_path / "cache"
    answer = subprocess.run(
        [sys._base_executable, HERE / command],
        env={**os.environ, "PATH": search, "DCR_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr == f"dcr set-up: the program {missing} is not found; {checks.PROGRAMS[missing]}\n"
    assert not cache.exists()


def test_a_toolchain_without_clippy_is_named_before_anything_is_built(tmp_path):
    cargo = tmp_path / "cargo"
    cargo.write_text("#!/bin/sh\ntest $1 = fmt\n")
    cargo.chmod(0o755)
    cache = tmp_path / "cache"
    answer = subprocess.run(
        [sys._base_executable, HERE / "check_all.py"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DCR_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stderr == "dcr set-up: cargo clippy does not run; run `rustup component add clippy`\n"
    assert not cache.exists()


def test_all_programs_present_is_no_problem():
    checks.check_programs()
    checks.check_python()


@pytest.mark.parametrize("module", checks.MODULES)
def test_a_missing_venv_module_is_named(module):
    with pytest.raises(SetupProblem, match=f"Python's module {module} is missing; run `apt install python3.11-venv`"):
        checks.check_python(find_module=lambda name: None if name == module else object())


def test_another_python_is_refused():
    with pytest.raises(SetupProblem, match=r"Python 3\.11 is needed and 3\.12 was used"):
        checks.check_python(version=(3, 12))


def test_another_machine_is_refused():
    with pytest.raises(SetupProblem, match="this is linux on aarch64"):
        checks.check_python(machine="aarch64")


def test_an_old_compiler_is_named_with_the_version_needed(tmp_path):
    old = tmp_path / "rustc"
    old.write_text("#!/bin/sh\necho rustc 1.63.0\n")
    old.chmod(0o755)
    with pytest.raises(SetupProblem, match=r"rustc 1\.63 is too old, 1\.\d+ is needed; run `rustup update stable`"):
        checks.rustc_version({**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_a_compiler_that_does_not_run_is_named(tmp_path):
    broken = tmp_path / "rustc"
    broken.write_text("#!/bin/sh\necho error: no default toolchain >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(SetupProblem, match=r"rustc does not run \(error: no default toolchain\)"):
        checks.rustc_version({**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"})


def disk_with(gigabytes: float):
    """A statvfs that reports so much free space."""
    size = 4096
    blocks = int(gigabytes * 10**9 / size)
    return lambda _path: os.statvfs_result((size, size, blocks * 2, blocks, blocks, 0, 0, 0, 0, 255))


def test_a_full_disk_names_the_folder_and_what_is_missing(tmp_path):
    needed = {"torch": 6.0, "rollout": 2.0}
    folder = tmp_path / "not" / "there" / "yet"
    with pytest.raises(SetupProblem) as caught:
        checks.check_disk(folder, needed, statvfs=disk_with(3.21))
    text = str(caught.value)
    assert text.startswith(f"{folder} has 3.2 GB free and 8.0 GB are needed (torch 6.0, rollout 2.0)")
    assert "DCR_CACHE" in text
    assert not folder.exists()


def test_enough_room_is_no_problem(tmp_path):
    checks.check_disk(tmp_path, {name: each.gigabytes for name, each in ENVIRONMENTS.items()}, disk_with(9.1))


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SetupProblem, match=f"the cache folder {file}/dcr cannot be made"):
        checks.make_folder(file / "dcr")


@pytest.mark.parametrize(
    ("output", "meaning"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk of /cache .* is full"),
        (
            "error: Failed to fetch: `https://x/`\n  Caused by: tcp connect error",
            "the index cannot be reached",
        ),
        ("warning: spurious network error (3 tries remaining)", "the index cannot be reached"),
        ("invalid peer certificate: UnknownIssuer", "the certificate of the index is not trusted"),
        ("HTTP status client error (403 Forbidden) for url", "the index answered with HTTP status 403"),
        ("Because nonesuch was not found in the package registry and", "the index does not serve nonesuch"),
        ("ERROR: No matching distribution found for uv==0.0.1\n", "the index does not serve uv==0.0.1"),
        ("Because there is no version of torch==9.9.9 and you", "the index does not serve torch==9.9.9"),
        ("error: lock file needs to be updated but --locked was passed", "Cargo.lock does not fit"),
        (
            "note: x\nerror[E0432]: unresolved import\nmore",
            r"exit status 2: error\[E0432\]: unresolved import",
        ),
    ],
)
def test_what_a_failed_command_printed_is_told_in_one_line(output, meaning):
    problem = explain("it", output, status=2, log="/log", cache="/cache", index=("the index", "SETTING"))
    assert "\n" not in str(problem)
    with pytest.raises(SetupProblem, match=f"^it: .*{meaning}.*output: /log"):
        raise problem


def test_a_compiler_error_that_speaks_of_connections_is_not_taken_for_the_network():
    output = 'error: expected `;`\n  | "Connection refused"\n'
    problem = explain("it", output, status=1, log="/log", cache="/cache", index=None)
    assert "expected `;`" in str(problem)
