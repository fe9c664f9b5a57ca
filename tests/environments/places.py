"""Where things lie in the cache, and under which key.

$DCR_CACHE/setup.lock            held while anything below is built
$DCR_CACHE/envs/NAME-KEY/        one virtual environment for each set of pins
$DCR_CACHE/uv/                   uv's downloads; the environments are hard links into it
$DCR_CACHE/build/                dcr's sources and cargo's target folder, the same for every checkout
$DCR_CACHE/dcr/KEY/site, bin     dcr built from one state of the sources
$DCR_CACHE/logs/                 what the last run of each step printed
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

RECIPE = "1"
"""Part of every key: raise it when an environment is built in another way from the same pins."""

MARKER = "complete.json"
"""Written last into an environment. Without it the folder is a remnant, and is built anew."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment: what it is for, how large it gets, and on which other one it stands."""

    name: str
    purpose: str
    gigabytes: float
    beneath: str | None = None

    @property
    def lock(self) -> Path:
        """Its packages with exact versions, all of them and nothing else."""
        return HERE / f"{self.name}.lock"


ENVIRONMENTS = {
    each.name: each
    for each in (
        Environment("tools", "uv, ruff and the build backend", 0.3),
        Environment("torch", "torch, shared by the two below", 6.0),
        Environment("rollout", "vLLM on the CPU", 2.0, beneath="torch"),
        Environment("training", "Megatron Bridge on the CPU", 0.7, beneath="torch"),
    )
}


def default_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The cache folder: `DCR_CACHE`, else `dcr` in the user's cache folder."""
    if chosen := environ.get("DCR_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "dcr"


def base_interpreter() -> Path:
    """The Python outside of any virtual environment that runs this."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def digest(*parts: str) -> str:
    """A short key for the parts, sensitive to where one ends and the next begins."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:12]


@dataclass(frozen=True)
class Cache:
    """The paths of one cache folder, for the pins and the interpreter at hand."""

    folder: Path

    @cached_property
    def environments(self) -> dict[str, Path]:
        """The folder of each environment; its name changes with what would be in it."""
        interpreter = f"{base_interpreter()} {sys.version}"
        folders: dict[str, Path] = {}
        for name, environment in ENVIRONMENTS.items():
            below = folders[environment.beneath].name if environment.beneath else ""
            key = digest(RECIPE, interpreter, below, environment.lock.read_text(encoding="utf-8"))
            folders[name] = self.folder / "envs" / f"{name}-{key}"
        return folders

    def python(self, name: str) -> Path:
        """The interpreter of an environment."""
        return self.environments[name] / "bin" / "python"

    def is_complete(self, name: str) -> bool:
        """Whether an environment was built to its end, and its base interpreter is still there."""
        return (self.environments[name] / MARKER).is_file() and self.python(name).exists()

    def log(self, step: str) -> Path:
        """Where the output of a step goes."""
        return self.folder / "logs" / f"{step}.log"


@dataclass(frozen=True)
class Places:
    """A finished set-up."""

    cache: Cache
    dcr: Path | None
    """The folder with dcr's `site` and `bin`; None when only environments were asked for."""

    def python(self, name: str) -> Path:
        """The interpreter of the environment `tools`, `torch`, `rollout` or `training`."""
        return self.cache.python(name)

    def variables(self, name: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables of a process in an environment: its programs and dcr's on PATH, dcr importable.

        dcr is laid over the environment through PYTHONPATH instead of being installed in it, since checkouts
        in different states share the environments. Entry points are found there as well, and so is `tests`.
        """
        folder = self.cache.environments[name]
        programs = [folder / "bin"]
        modules = [HERE.parent]
        if self.dcr:
            programs.insert(0, self.dcr / "bin")
            modules.insert(0, self.dcr / "site")
        result = dict(environ)
        result.pop("PYTHONHOME", None)
        result["VIRTUAL_ENV"] = str(folder)
        result["PATH"] = joined(programs, environ.get("PATH"))
        result["PYTHONPATH"] = joined(modules, environ.get("PYTHONPATH"))
        return result

    def as_json(self) -> dict[str, object]:
        """The paths for tools that do not import this package."""
        tools = self.cache.environments["tools"] / "bin"
        return {
            "cache": str(self.cache.folder),
            "python": {name: str(self.python(name)) for name in ENVIRONMENTS},
            "uv": str(tools / "uv"),
            "ruff": str(tools / "ruff"),
            "dcr": self.dcr and {"site": str(self.dcr / "site"), "bin": str(self.dcr / "bin")},
        }


def joined(first: list[Path], rest: str | None) -> str:
    """A search path with `first` before `rest`."""
    known = [str(path) for path in first]
    others = [part for part in (rest or "").split(os.pathsep) if part and part not in known]
    return os.pathsep.join(known + others)
