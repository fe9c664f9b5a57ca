"""`pip install .` in a virtual environment of the user's own, with build isolation, as the README says."""

import os
import subprocess
from pathlib import Path

import pytest
from environments import building
from environments.installing import pip_variables
from environments.places import REPOSITORY, base_interpreter
from environments.setup_environments import only_one, set_up

SECONDS = 600


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A new virtual environment with the distribution installed by pip, and nothing else.

    pip is given the cache's copy of this checkout, which keeps build outputs out of the checkout and lets
    cargo reuse the crates that were compiled for the set-up.
    """
    folder = tmp_path_factory.mktemp("user") / "venv"
    cache = set_up().cache
    sources = cache.folder / "build" / "source"
    variables = {**pip_variables(), "CARGO_TARGET_DIR": str(cache.folder / "build" / "target")}
    run([str(base_interpreter()), "-m", "venv", str(folder)], variables)
    with only_one(cache.folder / "setup.lock"):
        building.copy_sources(REPOSITORY, sources)
        run([str(folder / "bin" / "pip"), "install", str(sources)], variables)
    return folder


def run(command: list[str], variables: dict[str, str]) -> str:
    """The output of a command, which must succeed."""
    answer = subprocess.run(
        command,
        env=variables,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert answer.returncode == 0, f"{' '.join(command)}\n{answer.stdout}"
    return answer.stdout


def python(environment: Path, code: str) -> str:
    """What a program in the environment prints, without this process's search path."""
    return run([str(environment / "bin" / "python"), "-I", "-c", code], {"PATH": os.environ["PATH"]})


def test_the_program_is_on_the_path_of_the_environment(environment):
    variables = {"PATH": str(environment / "bin")}
    answer = run(["/usr/bin/env", "dcr", "--help"], variables)
    assert "relay" in answer


def test_the_three_packages_import_without_torch_vllm_or_megatron(environment):
    code = "import dcr, dcr._native, dcr_vllm, dcr_training; print(dcr._native.__file__)"
    assert str(environment) in python(environment, code)


def test_the_vllm_plugin_is_declared(environment):
    code = "from importlib.metadata import entry_points as e; print(*e(group='vllm.general_plugins'))"
    answer = python(environment, code)
    assert "name='dcr'" in answer
    assert "value='dcr_vllm:register'" in answer


def test_one_wheel_serves_every_python_from_3_10(environment):
    code = "from importlib.metadata import distribution as d; print(d('dcr-refit').read_text('WHEEL'))"
    assert "Tag: cp310-abi3-" in python(environment, code)


def test_nothing_else_is_installed(environment):
    code = "from importlib.metadata import distributions as d; print(*sorted(x.name for x in d()))"
    assert set(python(environment, code).split()) <= {"dcr-refit", "pip", "setuptools"}
