#!/usr/bin/env python3.11
"""Set up everything that `make demo` and `make test` need, or see within a second that it is there.

    setup_environments.py                       set up
    setup_environments.py --print               set up, and print the paths as JSON
    setup_environments.py --only tools          only some environments, and no build of dcr
    setup_environments.py --run rollout -- CMD  set up, then become CMD in an environment

The cache folder is $DCR_CACHE, else dcr in the user's cache folder. An error is one line and a status other
than 0.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):
    # Started by its path: import as part of the package, and keep this folder from hiding other modules.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from environments import building, checks, installing
from environments.places import ENVIRONMENTS, Cache, Places, default_cache
from environments.problems import SetupProblem
from environments.progress import PREFIX, step


def set_up(only: Sequence[str] | None = None, folder: Path | None = None) -> Places:
    """Build what is missing and return where everything lies.

    `only` names environments (those beneath are added) and leaves dcr itself out; without it everything is
    set up. Raises `SetupProblem`, whose text is one line.
    """
    checks.check_python()
    checks.check_programs()
    cache = Cache(folder or default_cache())
    names = with_those_beneath(only or list(ENVIRONMENTS))
    key = None if only else building.build_key(cache)
    if missing(cache, names, key):
        checks.check_disk(cache.folder, missing(cache, names, key))
        checks.make_folder(cache.folder)
        with only_one(cache.folder / "setup.lock") as lock:
            build_missing(cache, names, key, lock)
    finished = cache.folder / "dcr" / key if key else None
    if finished:
        # The newest use decides which builds are kept.
        os.utime(finished)
    return Places(cache, finished)


def build_missing(cache: Cache, names: Sequence[str], key: str | None, lock: int) -> None:
    """With the lock held: look again, since another set-up may have ended meanwhile, and build the rest."""
    for name in names:
        if not cache.is_complete(name):
            installing.install(cache, name, lock)
    if key and not (cache.folder / "dcr" / key).is_dir():
        building.build(cache, key, lock)
        building.remove_old_builds(cache)


def with_those_beneath(names: Sequence[str]) -> list[str]:
    """The environments to build for `names`, in the order to build them. The tools build all others."""
    wanted = {"tools", *names}
    wanted |= {ENVIRONMENTS[name].beneath for name in wanted} - {None}
    return [name for name in ENVIRONMENTS if name in wanted]


def missing(cache: Cache, names: Sequence[str], key: str | None) -> dict[str, float]:
    """What is not there yet, with the gigabytes it needs."""
    result = {name: ENVIRONMENTS[name].gigabytes for name in names if not cache.is_complete(name)}
    if key and not (cache.folder / "dcr" / key).is_dir():
        first = not (cache.folder / "build").is_dir()
        result["dcr"] = building.GIGABYTES if first else building.GIGABYTES / 10
    return result


@contextmanager
def only_one(path: Path) -> Iterator[int]:
    """Hold the cache's lock, waiting for another set-up to end."""
    with path.open("a+") as file:
        if not taken(file):
            with step("waiting for another set-up of this cache to end") as waiting:
                while not taken(file):
                    waiting.tick()
                    time.sleep(0.2)
        yield file.fileno()


def taken(file) -> bool:
    """Take the lock if it is free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def become(command: Sequence[str], name: str, places: Places) -> None:
    """Replace this process by a command in an environment; signals then reach it directly."""
    variables = places.variables(name)
    program = shutil.which(command[0], path=variables["PATH"])
    if program is None:
        raise SetupProblem(f"the program {command[0]} is not found in the environment {name} nor on PATH")
    os.execve(program, list(command), variables)


def stop(number: int, _frame: object) -> None:
    """A request to end is handled like Ctrl-C: the running command is ended and nothing unfinished stays."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(description="Set up what make demo and make test need.")
    parser.add_argument("--print", action="store_true", help="print the paths as JSON on standard output")
    names = list(ENVIRONMENTS)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="only these environments")
    parser.add_argument("--run", choices=names, metavar="NAME", help="then become COMMAND in this environment")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --: what to run")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    try:
        places = set_up(options.only)
        if options.print:
            print(json.dumps(places.as_json(), indent=2))
        if options.run and options.command:
            become(options.command, options.run, places)
    except SetupProblem as problem:
        print(f"{PREFIX}: {problem}", file=sys.stderr)
        return 1
    except OSError as error:
        # Of the set-up's own files, for instance a disk that filled up in the meantime.
        print(f"{PREFIX}: {error.strerror}: {error.filename or default_cache()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PREFIX}: stopped; nothing half-built is used, start it again to go on", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
