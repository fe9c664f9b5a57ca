"""Whole refits between real parts: Megatron Bridge trainer, relay and vLLM server, compared bit for bit.

The truth is a dense load of the trainer's exported weights into a second, fresh model by vLLM's own loader.
"""

import json
import os
import signal
import subprocess
import time

import pytest
from environments.setup_environments import set_up
from testbed.run import Run
from testbed.train import TrainerError


@pytest.fixture(scope="module")
def places():
    """The environments and the build of dcr that all tests use."""
    return set_up()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def run(request, places, tmp_path_factory):
    """One run for each tensor-parallel degree; its tests go on where the one before stopped."""
    with Run(places, tmp_path_factory.mktemp(f"tp{request.param}"), tp=request.param) as run:
        yield run


def assert_exact(run: Run, name: str) -> None:
    """Every parameter and buffer of every vLLM rank has the bits of a dense load."""
    exported = run.trainer.export(run.folder / "exports" / name)
    ranks = run.server.verify(exported)
    assert len(ranks) == run.tp
    for rank in ranks:
        assert rank["error"] is None
        assert rank["differing"] == []
        assert rank["tensors"] > 20


def committed(run: Run) -> dict:
    return json.loads((run.folder / "commit-record.json").read_text(encoding="utf-8"))


def test_a_first_refit_is_dense(run):
    report = run.trainer.refit()
    assert (report["mode"], report["version"], report["changed"]) == ("dense", 1, 0)
    assert len(report["receivers"]) == run.tp
    assert_exact(run, "dense")
    assert committed(run)["version"] == 1


def test_steps_travel_as_deltas(run):
    for version in (2, 3):
        run.trainer.step()
        report = run.trainer.refit()
        assert (report["mode"], report["version"]) == ("mixed", version)
        # AdamW at this learning rate changes a few percent of the stored values, and only those travel.
        assert 0 < report["changed_share"] < 0.2
        assert 0 < report["payload_share"] < 0.2
        assert report["raw"]["totals"]["xor_items"] > 0
        assert_exact(run, f"mixed-{version}")


def test_requests_are_served_between_refits(run):
    assert run.server.completion("baba babe babi babo", max_tokens=4)
    assert not run.server.is_paused()


def test_overwrites_are_exact_as_well(run):
    run.trainer.step()
    report = run.trainer.refit("overwrite")
    assert report["mode"] == "overwrite"
    assert report["raw"]["totals"]["xor_items"] == 0
    assert_exact(run, "overwrite")


def test_nothing_changed_nothing_travels(run):
    before = committed(run)["version"]
    report = run.trainer.refit()
    assert (report["changed"], report["payloads"], report["version"]) == (0, 0, before + 1)
    assert_exact(run, "unchanged")


def test_a_commit_that_fails_leaves_weights_unusable_until_a_dense_refit(run):
    # A folder in place of the draft makes the store's write fail, after the receivers have applied.
    run.trainer.step()
    before = committed(run)["version"]
    obstacle = run.folder / "commit-record.json.new"
    obstacle.mkdir()
    try:
        with pytest.raises(TrainerError, match="commit"):
            run.trainer.refit()
    finally:
        obstacle.rmdir()
    assert committed(run)["version"] == before
    assert run.server.is_paused(), "partly committed weights must not serve"
    report = run.trainer.refit()
    assert (report["mode"], report["version"]) == ("dense", before + 1)
    assert not run.server.is_paused()
    assert_exact(run, "repaired")


def test_a_relay_that_dies_is_named_and_nothing_hangs(run):
    run.trainer.step()
    os.kill(run.relay.pid, signal.SIGKILL)
    run.relay.wait()
    with pytest.raises(TrainerError, match="relay"):
        run.trainer.refit(timeout_s=120)


def test_no_process_is_left_behind(run):
    trainer, server = run.trainer.pid, run.server.pid
    run.stop()
    deadline = time.monotonic() + 20
    while (left := sessions([trainer, server])) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, left


def sessions(leaders: list[int]) -> list[str]:
    """Processes that still belong to these sessions."""
    lines = subprocess.run(["ps", "-eo", "sid,pid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in lines.splitlines()[1:]]
    return [" ".join(row) for row in rows if int(row[0]) in leaders and not row[2].startswith("Z")]


def test_a_missing_relay_is_one_line(places):
    environment = places.variables("training") | {"DCR_INSECURE_LOOPBACK": "1", "DCR_RELAY": "tcp://127.0.0.1:9"}
    code = "from dcr import _native; _native.Owner(0, 1).register(timeout_s=7)"
    command = [places.python("training"), "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    last = result.stderr.strip().splitlines()[-1]
    assert "tcp://127.0.0.1:9" in last and "dcr relay" in last
