"""`dcr bench construct` as its users run it. What it measures is not judged here: no test depends on a clock."""

import json
import subprocess
import sys

import pytest


def bench(*arguments):
    command = ["dcr", "bench", "construct", "--megabytes", "1", "--rounds", "1", *arguments]
    if "--python" not in arguments:
        command += ["--python", sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_rates_and_modes_are_printed():
    done = bench("--json", "--model", "testbed.bench_model:build_tiny")
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["rates"]["megabytes"] == 1 and report["rates"]["runs"][0]["threads"] == 1
    assert all(run["compare_of_read"] > 0 and run["construct_gb_s"] > 0 for run in report["rates"]["runs"])
    model = report["model"]
    assert model["ranks"] == 2 and 0.005 < model["changed_share"] < 0.02
    modes = {each["mode"]: each for each in model["modes"]}
    assert list(modes) == ["X", "P", "F"]
    # All three send a changed set of the same size; only X sends XOR, and only F converts everything.
    assert modes["X"]["xor_items"] > 0 and modes["P"]["xor_items"] == modes["F"]["xor_items"] == 0
    assert modes["F"]["residual_tensors"] > modes["P"]["residual_tensors"] == modes["X"]["residual_tensors"] > 0
    assert modes["X"]["bytes"] == modes["P"]["bytes"] == modes["F"]["bytes"] == model["checkpoint_bytes"]


def test_a_table_is_for_people():
    done = bench()
    assert done.returncode == 0
    assert "compare and compact" in done.stdout and "no --model" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--percent", "101"], "--percent 101 is not between 0 and 100"),
        (["--model", "testbed.bench_model"], "training rank 0 ended with"),
        (["--model", "testbed.none:build", "--ranks", "1"], "No module named 'testbed.none'"),
        (["--model", "a:b", "--python", "/nonexistent/python"], "/nonexistent/python"),
    ],
)
def test_mistakes_are_told(arguments, says):
    done = bench(*arguments)
    assert done.returncode == 1
    assert says in done.stderr and done.stderr.splitlines()[-1].startswith("dcr: ")
