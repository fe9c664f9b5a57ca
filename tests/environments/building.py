"""Building dcr once for each state of its sources, and laying it out for use beside any environment."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from environments.checks import rustc_version
from environments.commands import CommandFailed, run
from environments.installing import clean_variables, uv_variables
from environments.places import REPOSITORY, Cache, digest
from environments.problems import explain
from environments.progress import Step, step

GIGABYTES = 2.5
"""Of cargo's downloads and target folder."""

SOURCES = (
    "Cargo.toml",
    "Cargo.lock",
    ".cargo",
    "rust-toolchain.toml",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "rust",
    "cpp",
    "vllm_plugin",
    "training_plugin",
)
"""What the distribution is made of; the ones that do not exist are passed over."""

OUTPUTS = (".pyc", ".so", ".egg-info", "~")

KEPT_BUILDS = 5
KEPT_SECONDS = 2 * 3600.0
"""Older builds go, except those that were used so recently that a process may still run from them."""

CRATE_INDEX = ("the crate index", "source replacement in cargo's configuration")

UNFINISHED = "unfinished-"

BUILD_WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
"""The call that pip makes, with cargo's output as it comes."""


def source_files(repository: Path = REPOSITORY) -> Iterator[Path]:
    """The files of the distribution, committed or not, relative to the checkout, in a fixed order."""
    for name in SOURCES:
        path = repository / name
        if path.is_file():
            yield Path(name)
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(each for each in folders if not is_output(each))
            for file in sorted(files):
                if not is_output(file):
                    yield (Path(folder) / file).relative_to(repository)


def is_output(name: str) -> bool:
    """Whether a file or folder comes from a build or an editor."""
    return name in ("__pycache__", "target") or name.startswith(".") or name.endswith(OUTPUTS)


def build_key(cache: Cache, repository: Path = REPOSITORY) -> str:
    """A digest of everything that decides what comes out of the build."""
    state = hashlib.sha256()
    for file in source_files(repository):
        state.update(f"{file}\0".encode() + hashlib.sha256((repository / file).read_bytes()).digest())
    flags = os.environ.get("RUSTFLAGS", "")
    return digest(state.hexdigest(), rustc_version(), flags, cache.environments["tools"].name)


def copy_sources(repository: Path, target: Path) -> None:
    """Make `target` hold exactly the sources, and leave alone what is the same already.

    cargo looks at modification times and paths: through this one folder, any checkout in a state close to the
    last one built compiles only what differs, and the checkout itself stays free of build outputs.
    """
    wanted = set(source_files(repository))
    for file in wanted:
        data = (repository / file).read_bytes()
        copy = target / file
        if not copy.is_file() or copy.read_bytes() != data:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
    for folder, _, files in os.walk(target, topdown=False):
        for file in files:
            path = Path(folder) / file
            if path.relative_to(target) not in wanted:
                path.unlink()
        if not os.listdir(folder):
            os.rmdir(folder)


def build(cache: Cache, key: str, held_lock: int) -> Path:
    """Build the sources of this checkout into `dcr/KEY` of the cache."""
    sources = cache.folder / "build" / "source"
    finished = cache.folder / "dcr" / key
    finished.parent.mkdir(exist_ok=True)
    copy_sources(REPOSITORY, sources)
    variables = clean_variables()
    variables["CARGO_TARGET_DIR"] = str(cache.folder / "build" / "target")
    with tempfile.TemporaryDirectory(dir=finished.parent, prefix=UNFINISHED) as unfinished:
        wheels = Path(unfinished) / "wheel"
        result = Path(unfinished) / "dcr"
        wheels.mkdir()
        with told(cache, "crates that dcr is built from", "crates", CRATE_INDEX) as (running, log):
            run(["cargo", "fetch", "--locked"], running, log, variables, folder=sources)
        with told(cache, "dcr (release build)", "dcr") as (running, log):
            # Without the lock: what cargo may leave running, like a compiler cache's server, would keep it.
            command = [cache.python("tools"), "-c", BUILD_WHEEL, wheels]
            run(command, running, log, variables, folder=sources)
        with told(cache, "dcr (installation)", "dcr-install") as (running, log):
            uv = cache.environments["tools"] / "bin" / "uv"
            command = [uv, "pip", "install", "--python", cache.python("tools"), "--no-deps", "--no-index"]
            command += ["--compile-bytecode", "--target", result / "site", *wheels.iterdir()]
            run(command, running, log, uv_variables(cache), held_lock=held_lock)
            (result / "site" / "bin").rename(result / "bin")
        result.rename(finished)
    return finished


@contextmanager
def told(cache: Cache, title: str, log_name: str, index: tuple[str, str] | None = None) -> Iterator[tuple[Step, Path]]:
    """Show one step of the build, and tell its failure in one line."""
    log = cache.log(log_name)
    with step(title) as running:
        try:
            yield running, log
        except CommandFailed as failed:
            raise explain(
                title, failed.output, status=failed.status, log=str(log), cache=str(cache.folder), index=index
            ) from None


def remove_old_builds(cache: Cache) -> None:
    """Keep the newest builds; called with the lock held, so that no build is under way."""
    builds = sorted((cache.folder / "dcr").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    finished = [path for path in builds if not path.name.startswith(UNFINISHED)]
    recent = time.time() - KEPT_SECONDS
    old = [path for path in finished[KEPT_BUILDS:] if path.stat().st_mtime < recent]
    for path in old + [path for path in builds if path.name.startswith(UNFINISHED)]:
        shutil.rmtree(path, ignore_errors=True)
