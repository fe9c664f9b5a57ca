"""Building one virtual environment from its lock file."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from environments.commands import CommandFailed, run
from environments.places import ENVIRONMENTS, HERE, MARKER, Cache, base_interpreter
from environments.problems import explain, without_credentials
from environments.progress import Step, step

SHARED_PACKAGES = "zz-torch.pth"
"""Names the packages of the environment beneath; read after the environment's own, which therefore win."""

PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""uv does not read pip's settings: those that decide whether an index is reached are handed to it."""

NOT_INHERITED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_USER",
)


def clean_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of an installing command, without those that would lead it elsewhere."""
    return {name: value for name, value in environ.items() if name not in NOT_INHERITED}


def pip_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables pip runs with: an index set for uv alone holds for pip as well."""
    variables = clean_variables(environ)
    if index := environ.get("UV_DEFAULT_INDEX"):
        variables.setdefault("PIP_INDEX_URL", index)
    return variables


def uv_variables(cache: Cache, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables uv runs with: pip's settings where its own are not set, its cache by the environments."""
    variables = clean_variables(environ)
    settings = pip_settings(cache, environ)
    for pip_name, uv_name in PIP_TO_UV.items():
        if value := settings.get(pip_name):
            variables.setdefault(uv_name, value)
    # On the same file system the environments are hard links into uv's cache and take no room of their own.
    variables.setdefault("UV_CACHE_DIR", str(cache.folder / "uv"))
    variables["UV_PYTHON_DOWNLOADS"] = "never"
    return variables


def pip_settings(cache: Cache, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """pip's settings from its files and variables; the variables win."""
    command = [str(cache.python("tools")), "-m", "pip", "config", "list"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_variables(environ))
    found: dict[str, str] = {}
    for wanted in ("global.", "install.", ":env:."):
        for line in answer.stdout.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(wanted):
                found[name.removeprefix(wanted)] = " ".join(value.strip("'\"").split("\\n")).strip()
    return found


def index_for_people(variables: Mapping[str, str]) -> str:
    """How a message names the package index that was asked."""
    url = variables.get("UV_DEFAULT_INDEX") or variables.get("PIP_INDEX_URL")
    return f"the package index {without_credentials(url)}" if url else "the package index"


def install(cache: Cache, name: str, held_lock: int) -> None:
    """Build the environment `name`; what it stands on is complete already.

    A folder that is not complete is removed first, and again when this build does not reach its end. A
    virtual environment cannot be renamed when it is done (its programs name its folder), hence the marker,
    written last.
    """
    environment = ENVIRONMENTS[name]
    folder = cache.environments[name]
    remove(folder)
    try:
        with step(f"environment {name} ({environment.purpose})") as running:
            if name == "tools":
                install_with_pip(cache, folder, running, held_lock)
            else:
                install_with_uv(cache, name, running, held_lock)
            (folder / MARKER).write_text(json.dumps({"name": name, "lock": environment.lock.name}) + "\n")
    except BaseException:
        remove(folder)
        raise


def install_with_pip(cache: Cache, folder: Path, running: Step, held_lock: int) -> None:
    """The first environment, with what Python brings along."""
    log = cache.log("tools")
    variables = pip_variables()
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--no-deps", "--retries", "2"]
    pip += ["--disable-pip-version-check", "--progress-bar", "off"]
    commands = (
        [base_interpreter(), "-m", "venv", folder],
        [*pip, "-r", ENVIRONMENTS["tools"].lock],
    )
    try:
        for command in commands:
            run(command, running, log, variables, held_lock=held_lock)
    except CommandFailed as failed:
        raise explained("environment tools", failed, variables, cache) from None


def install_with_uv(cache: Cache, name: str, running: Step, held_lock: int) -> None:
    """Every other environment."""
    environment = ENVIRONMENTS[name]
    folder = cache.environments[name]
    variables = uv_variables(cache)
    uv = cache.environments["tools"] / "bin" / "uv"
    python = folder / "bin" / "python"
    # No dependency is resolved here: the lock file names them all. Compiled now, since where Python may not
    # write bytecode every start of vLLM would compile ten thousand files again.
    install = [uv, "pip", "install", "--python", python, "--no-deps", "--compile-bytecode"]
    install += ["--build-constraints", HERE / "tools.lock", "-r", environment.lock]
    commands = (
        [uv, "venv", "--python", base_interpreter(), folder],
        install,
    )
    try:
        for command in commands:
            run(command, running, cache.log(name), variables, held_lock=held_lock)
    except CommandFailed as failed:
        raise explained(f"environment {name}", failed, variables, cache) from None
    if environment.beneath:
        shared = packages(cache.environments[environment.beneath])
        (packages(folder) / SHARED_PACKAGES).write_text(f"{shared}\n", encoding="utf-8")


def packages(environment: Path) -> Path:
    """Where an environment's packages lie."""
    return environment / "lib" / "python3.11" / "site-packages"


def explained(what: str, failed: CommandFailed, variables: Mapping[str, str], cache: Cache) -> Exception:
    """The one-line form of a failed installation."""
    index = (index_for_people(variables), "UV_DEFAULT_INDEX or PIP_INDEX_URL")
    folder, log = str(cache.folder), str(failed.log)
    return explain(what, failed.output, status=failed.status, log=log, cache=folder, index=index)


def remove(folder: Path) -> None:
    """Remove a folder, its marker first, so that a removal cut short leaves nothing that looks finished."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
