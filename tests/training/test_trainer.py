"""The trainer program of the demo and the end-to-end tests."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_receiver import SmallReceiver
from testbed.checkpoint import make_qwen3_moe
from testbed.train import Trainer, TrainerError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3_moe(tmp_path_factory.mktemp("checkpoint"))


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("DCR_")}


def changed_share(one, two):
    one, two = (load_file(directory / "model.safetensors") for directory in (one, two))
    assert one.keys() == two.keys()
    pairs = [(one[name].view(torch.int16), two[name].view(torch.int16)) for name in one]
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def ranks_of(trainer):
    children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def name_of(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def expect_bits(receiver, directory):
    weights = load_file(directory / "model.safetensors")
    assert receiver.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(receiver.tensors[name].view(torch.int16), tensor.view(torch.int16)), name


def test_steps_refits_and_exports(checkpoint, tmp_path, relay):
    log = tmp_path / "trainer.log"
    env = {**environment(), "DCR_RELAY": relay, "DCR_RECORD": str(tmp_path / "record")}
    env["DCR_INSECURE_LOOPBACK"] = "1"
    receiver = SmallReceiver(relay)
    with Trainer.start(checkpoint, env, log, lr=2e-6) as trainer:
        assert trainer.started["ranks"] == 2 and trainer.started["refits"]
        start = trainer.export(tmp_path / "start")
        assert changed_share(checkpoint, start) == 0.0
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (start / name).read_bytes() == (checkpoint / name).read_bytes()
        report = trainer.refit()
        assert (report["mode"], report["version"], report["changed"]) == ("dense", 1, 0)
        expect_bits(receiver, start)
        before = start
        for step in (1, 2):
            answer = trainer.step()
            assert answer["step"] == step and answer["updated"] and answer["loss"] > 0
            report = trainer.refit()
            now = trainer.export(tmp_path / f"step{step}")
            expect_bits(receiver, now)
            share = changed_share(before, now)
            assert 0.001 < share < 0.1
            assert report["changed_share"] == pytest.approx(share)
            assert report["payload_share"] < 0.1
            before = now
        with pytest.raises(TrainerError, match=r"refit failed: refit modes .* must be the same"):
            trainer.refit("sparse")
        assert trainer.step()["step"] == 3, "a refused command ends nothing"
        # A rank that dies takes the trainer with it, and the caller is told.
        ranks = ranks_of(trainer)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(TrainerError):
            for _ in range(3):
                trainer.step()
        trainer.stop()
    receiver.close()
    assert "rank 1 ended with status -9" in log.read_text()
    assert not [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]


def test_killing_the_watching_process_ends_the_ranks(checkpoint, tmp_path):
    trainer = Trainer.launch(checkpoint, environment(), tmp_path / "trainer.log")
    try:
        deadline = time.monotonic() + 60.0
        ranks: list[int] = []
        while [name_of(pid) for pid in ranks] != ["dcr-rank-0", "dcr-rank-1"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            ranks = ranks_of(trainer)
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TrainerError, match="ended during start"):
            trainer.wait_ready(60.0)
        while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
            assert time.monotonic() < deadline + 60.0
            time.sleep(0.1)
    finally:
        trainer.stop()


def test_no_checkpoint(tmp_path):
    with pytest.raises(TrainerError, match=r"is not a Hugging Face checkpoint \(no config.json\)"):
        Trainer.start(tmp_path, environment(), tmp_path / "trainer.log")


def test_bad_relay_is_named(checkpoint, tmp_path):
    env = {**environment(), "DCR_RELAY": "127.0.0.1:1", "DCR_RECORD": str(tmp_path / "record")}
    with pytest.raises(TrainerError, match=r"relay '127.0.0.1:1' is not of the form tcp://HOST:PORT"):
        Trainer.start(checkpoint, env, tmp_path / "trainer.log")


def test_checkpoints_are_the_same_bits_everywhere(checkpoint, tmp_path):
    again = make_qwen3_moe(tmp_path / "again")
    for file in checkpoint.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    other = make_qwen3_moe(tmp_path / "other", seed=1)
    assert changed_share(checkpoint, other) > 0.9
    assert json.loads((other / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    with pytest.raises(ValueError, match="3 of 2 experts"):
        make_qwen3_moe(tmp_path / "bad", experts=2, experts_per_token=3)
