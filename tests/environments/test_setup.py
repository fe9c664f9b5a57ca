"""The builder itself, on the smallest environment: interrupted, beside another one, without an index."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from environments import building
from environments.places import HERE, MARKER, Cache, default_cache
from environments.setup_environments import set_up, with_those_beneath

BUILDER = HERE / "setup_environments.py"
SECONDS = 120


def start(cache: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    """Start the builder as a person would, with another cache folder."""
    return subprocess.Popen(
        [sys._base_executable, BUILDER, *options],
        env={**os.environ, "DCR_CACHE": str(cache), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have had Ctrl-C ignored; a person's shell has not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def wait_for(condition, what: str) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {SECONDS} s"
        time.sleep(0.02)


def unfinished(cache: Path) -> list[Path]:
    """The environments of a cache that lack the marker."""
    return [folder for folder in cache.glob("envs/*") if not (folder / MARKER).exists()]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A cache with the tools only, built once."""
    cache = tmp_path_factory.mktemp("built")
    process = start(cache, "--only", "tools", "--print")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "environment tools (uv, ruff and the build backend): done in" in err
    paths = json.loads(out)
    for program in (paths["uv"], paths["ruff"]):
        subprocess.run([program, "--version"], check=True, capture_output=True)
    return cache


def test_a_second_run_installs_nothing_and_says_nothing(built):
    began = time.monotonic()
    before = {path: path.stat().st_mtime_ns for path in built.glob("envs/*/*")}
    process = start(built, "--only", "tools")
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (0, "", "")
    assert time.monotonic() - began < 5
    assert before == {path: path.stat().st_mtime_ns for path in built.glob("envs/*/*")}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_set_up_leaves_no_environment(tmp_path, number, status):
    process = start(tmp_path, "--only", "tools")
    wait_for(lambda: list(tmp_path.glob("envs/*/bin/python")), "the first program of the environment")
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == status
    assert "Traceback" not in err
    assert not list(tmp_path.glob("envs/*"))


def test_a_killed_set_up_leaves_nothing_that_looks_finished_and_the_next_one_builds_anew(tmp_path):
    process = start(tmp_path, "--only", "tools")
    wait_for(lambda: list(tmp_path.glob("envs/*/bin/python")), "the first program of the environment")
    process.kill()
    process.communicate(timeout=SECONDS)
    assert len(unfinished(tmp_path)) == 1
    assert not Cache(tmp_path).is_complete("tools")

    again = start(tmp_path, "--only", "tools")
    _, err = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, err
    assert "environment tools (uv, ruff and the build backend): done in" in err
    assert not unfinished(tmp_path)


def test_two_set_ups_at_once_do_the_work_once(tmp_path):
    both = [start(tmp_path, "--only", "tools") for _ in range(2)]
    errors = [process.communicate(timeout=SECONDS)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert sum("environment tools (uv, ruff and the build backend): done" in text for text in errors) == 1
    assert sum("waiting for another set-up of this cache to end: done" in text for text in errors) == 1


@pytest.fixture
def closed_port() -> int:
    """A loopback port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_an_unreachable_index_is_named_in_one_line(tmp_path, closed_port):
    index = f"http://user:secret@127.0.0.1:{closed_port}/simple"
    process = start(tmp_path, "--only", "tools", UV_DEFAULT_INDEX=index)
    _, err = process.communicate(timeout=SECONDS)
    last = err.splitlines()[-1]
    assert process.returncode == 1
    assert last.startswith("dcr set-up: environment tools: the package index http://127.0.0.1:")
    assert "cannot be reached; check the network" in last
    assert "secret" not in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("envs/*"))


def test_an_unreachable_index_is_named_by_uv_too(built, closed_port):
    index = f"http://127.0.0.1:{closed_port}/simple"
    process = start(built, "--only", "torch", UV_DEFAULT_INDEX=index, UV_HTTP_RETRIES="0")
    _, err = process.communicate(timeout=SECONDS)
    last = err.splitlines()[-1]
    assert process.returncode == 1
    assert last.startswith(f"dcr set-up: environment torch: the package index {index} cannot be reached")
    assert not list(built.glob("envs/torch-*"))


def test_the_environments_beneath_are_built_first():
    assert with_those_beneath(["rollout"]) == ["tools", "torch", "rollout"]
    assert with_those_beneath(["tools"]) == ["tools"]


def test_the_default_cache_folder_follows_the_variables():
    assert default_cache({"DCR_CACHE": "/a/b"}) == Path("/a/b")
    assert default_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/dcr")
    assert default_cache({}) == Path.home() / ".cache" / "dcr"


def test_every_environment_of_the_set_up_in_use_has_the_locked_packages():
    """The set-up that runs these tests: each environment holds exactly what its lock file says."""
    places = set_up(only=["rollout", "training"])
    for name in ("tools", "torch", "rollout", "training"):
        code = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions(path=[PATH])]"
        folder = next(places.cache.environments[name].glob("lib/python3.*/site-packages"))
        answer = subprocess.run(
            [places.python(name), "-I", "-c", code.replace("PATH", repr(str(folder)))],
            capture_output=True,
            text=True,
            check=True,
        )
        installed = {canonical(line.replace(" ", "==")) for line in answer.stdout.splitlines()}
        lock = (HERE / f"{name}.lock").read_text().splitlines()
        locked = {canonical(line) for line in lock if not line.startswith("#")}
        assert locked <= installed, locked - installed
        assert {line.partition("==")[0] for line in installed - locked} <= {"pip"}


def canonical(pin: str) -> str:
    """A pin with its name as indexes spell it."""
    return pin.lower().replace("_", "-")


def test_no_committed_file_names_an_index():
    for path in [*HERE.glob("*.lock"), *HERE.glob("*.in"), *HERE.glob("*.override")]:
        assert "://" not in path.read_text(), path


def a_checkout(folder: Path) -> Path:
    """A small stand-in for the sources of the distribution."""
    for name, text in {"Cargo.toml": "a", "setup.py": "b", "rust/x/src/lib.rs": "c"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_build_key_changes_with_the_sources_only(tmp_path):
    checkout = a_checkout(tmp_path / "one")
    cache = Cache(tmp_path / "cache")
    first = building.build_key(cache, checkout)
    (checkout / "rust" / "target").mkdir()
    (checkout / "rust" / "target" / "output").write_text("not a source")
    (checkout / "rust" / "x" / "module.so").write_text("not a source")
    assert building.build_key(cache, checkout) == first
    assert building.build_key(cache, a_checkout(tmp_path / "two")) == first
    (checkout / "rust" / "x" / "src" / "lib.rs").write_text("changed")
    assert building.build_key(cache, checkout) != first


def test_copied_sources_follow_the_checkout_and_keep_what_did_not_change(tmp_path):
    checkout = a_checkout(tmp_path / "one")
    copy = tmp_path / "copy"
    building.copy_sources(checkout, copy)
    kept = (copy / "setup.py").stat().st_mtime_ns
    (copy / "build").mkdir()
    (copy / "build" / "leftover.py").write_text("")
    (checkout / "rust" / "x" / "src" / "lib.rs").rename(checkout / "rust" / "x" / "src" / "main.rs")
    building.copy_sources(checkout, copy)
    assert sorted(building.source_files(copy)) == sorted(building.source_files(checkout))
    assert (copy / "setup.py").stat().st_mtime_ns == kept
    assert not (copy / "build").exists()


def test_old_builds_are_removed_unless_they_were_used_lately(tmp_path):
    cache = Cache(tmp_path)
    now = time.time()
    ages = {
        "new": 0,
        "lately": 3600,
        "old": 9000,
        "older": 9001,
        "oldest": 9002,
        "gone": 9003,
        "gone-too": 9004,
    }
    for name, age in ages.items():
        folder = tmp_path / "dcr" / name
        folder.mkdir(parents=True)
        os.utime(folder, (now - age, now - age))
    (tmp_path / "dcr" / f"{building.UNFINISHED}x").mkdir()
    building.remove_old_builds(cache)
    left = {path.name for path in (tmp_path / "dcr").iterdir()}
    assert left == {"new", "lately", "old", "older", "oldest"}
