"""`make lock`: resolve the `.in` files anew and write the lock files.

An environment that stands on another one leaves out what that one holds in the same version. No file names an
index.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from environments.commands import CommandFailed, run
from environments.installing import explained, uv_variables
from environments.places import ENVIRONMENTS, HERE
from environments.problems import SetupProblem
from environments.progress import PREFIX, step
from environments.setup_environments import set_up

HEADER = "# Made by `make lock` from {name}.in: every package of the environment with its exact version.\n"
HEADER_BENEATH = "# The packages of {beneath}.lock are seen as well and are left out where the version is the same.\n"


def resolve(name: str, uv: Path, cache, variables: dict[str, str]) -> list[str]:
    """The pins that uv finds for one environment."""
    result = cache.folder / "logs" / f"lock-{name}.txt"
    result.unlink(missing_ok=True)
    command = [uv, "pip", "compile", "--upgrade", "--python", cache.python("tools"), "--output-file", result]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    override = HERE / f"{name}.override"
    if override.exists():
        command += ["--override", override]
    with step(f"resolving {name}.in") as running:
        try:
            run([*command, HERE / f"{name}.in"], running, cache.log(f"lock-{name}"), variables)
        except CommandFailed as failed:
            raise explained(f"resolving {name}.in", failed, variables, cache) from None
    return result.read_text(encoding="utf-8").splitlines()


def main() -> int:
    """Write all lock files, or none when one cannot be resolved."""
    try:
        places = set_up(only=["tools"])
        uv = places.cache.environments["tools"] / "bin" / "uv"
        variables = uv_variables(places.cache)
        pins = {name: resolve(name, uv, places.cache, variables) for name in ENVIRONMENTS}
    except SetupProblem as problem:
        print(f"{PREFIX}: {problem}", file=sys.stderr)
        return 1
    for name, environment in ENVIRONMENTS.items():
        text = HEADER.format(name=name)
        own = pins[name]
        if environment.beneath:
            text += HEADER_BENEATH.format(beneath=environment.beneath)
            own = [pin for pin in own if pin not in pins[environment.beneath]]
        environment.lock.write_text(text + "".join(f"{pin}\n" for pin in own), encoding="utf-8")
        print(f"{environment.lock.name}: {len(own)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
