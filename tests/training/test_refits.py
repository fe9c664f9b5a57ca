"""The client with the real native part and a real relay, into a receiver without vLLM: bits, and failures."""

import os
import time
from pathlib import Path

import torch
from dcr_training import RefitClient, RefitConfig, RefitError, StateDictSource
from small_receiver import SmallReceiver

SHAPES = {f"layers.{n}.weight": (16, 8) for n in range(8)} | {"norm.weight": (24,), "empty": (0, 3)}
_clients: dict[str, tuple[RefitClient, dict[str, torch.Tensor]]] = {}


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name == "norm.weight" else torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def start(rank, key, relay, record, options):
    """Initialize a client under `key`, to be used by later calls; the error if that failed."""
    os.environ["DCR_INSECURE_LOOPBACK"] = "1"
    weights = model(0)
    config = RefitConfig(record=record, relay=relay, **options)
    client = RefitClient(StateDictSource(lambda: dict(weights)), config)
    began = time.monotonic()
    try:
        client.initialize()
    except RefitError as error:
        return str(error), time.monotonic() - began
    _clients[key] = (client, weights)
    return None


def change(rank, key, step):
    """Change a few elements, in special ways too; the same on every rank."""
    weights = _clients[key][1]
    first = weights["layers.0.weight"].view(-1)
    first[step] = float("nan")
    first[step + 1] = -0.0 if first[step + 1] == 0 else 0.0
    weights["norm.weight"][step] *= 1.5
    weights["layers.5.weight"].view(-1)[3 * step] += 1.0


def replace(rank, key, name, shape):
    """Put a tensor of another shape in the place of one."""
    weights = _clients[key][1]
    weights[name] = torch.zeros(shape, dtype=weights[name].dtype)


def refit(rank, key, mode):
    """Report and weights, or the error."""
    client, weights = _clients[key]
    began = time.monotonic()
    try:
        report = client.refit(mode)
    except RefitError as error:
        told = {"text": str(error), "rank": error.rank, "tensor": error.tensor, "weights": error.weights}
        return {**told, "seconds": time.monotonic() - began}
    return report.as_dict(), weights


def stop(rank, key):
    _clients.pop(key)[0].close()


def same_error(results):
    one, two = results
    assert one.pop("seconds") < 15.0 and two.pop("seconds") < 15.0
    assert one == two
    assert "\n" not in one["text"]
    return one


def expect_bits(receiver, weights):
    assert receiver.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(receiver.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_changes_arrive_bit_for_bit(team, relay, tmp_path):
    receiver = SmallReceiver(relay)
    record = str(tmp_path / "record")
    try:
        assert team.run(start, "bits", relay, record, {}) == [None, None]
        (report, weights), other = team.run(refit, "bits", "auto")
        assert other[0] == report
        assert (report["version"], report["mode"]) == (1, "dense")
        assert report["elements"] == sum(tensor.numel() for tensor in weights.values())
        assert receiver.encodings == {"dense"}
        expect_bits(receiver, weights)
        for step, mode, used in ((1, "auto", "xor"), (2, "mixed", "xor"), (3, "overwrite", "overwrite")):
            receiver.encodings.clear()
            team.run(change, "bits", step)
            (report, weights), other = team.run(refit, "bits", mode)
            assert other[0] == report
            assert report["version"] == step + 1
            assert report["changed"] == 4
            assert receiver.encodings == {used}
            expect_bits(receiver, weights)
        (report, weights), _ = team.run(refit, "bits", "auto")
        assert report["changed"] == 0 and report["version"] == 5
        expect_bits(receiver, weights)
    finally:
        team.run(stop, "bits")
        receiver.close()


def test_failures_leave_the_ranks_in_step(team, relay, tmp_path):
    record = str(tmp_path / "record")
    options = {"peers_timeout_s": 1.0}
    assert team.run(start, "fails", relay, record, options) == [None, None]
    try:
        error = same_error(team.run(refit, "fails", "auto"))
        assert "receivers (0 of 1 connected)" in error["text"] and error["weights"] == "untouched"
        receiver = SmallReceiver(relay)
        receiver.classify = lambda name: ("unsupported", "rotated at load") if name == "norm.weight" else ("xor", "")
        try:
            error = same_error(team.run(refit, "fails", "auto"))
            assert "norm.weight" in error["text"] and "rotated at load" in error["text"]
            error = same_error(team.run(refit, "fails", "mixed"))
            assert "use mode `dense` or `auto`" in error["text"]
        finally:
            receiver.close()
        receiver = SmallReceiver(relay, "receiver/test/1")
        try:
            (report, weights), _ = team.run(refit, "fails", "auto")
            assert report["version"] == 1
            team.run(replace, "fails", "layers.3.weight", (8, 8))
            error = same_error(team.run(refit, "fails", "auto"))
            assert error["tensor"] == "layers.3.weight" and error["rank"] in (0, 1)
            assert f"owner/{error['rank']}: tensor `layers.3.weight`" in error["text"]
            assert error["weights"] == "untouched"
            expect_bits(receiver, weights)
            team.run(replace, "fails", "layers.3.weight", (16, 8))
            receiver.refuse = "the loader is broken"
            error = same_error(team.run(refit, "fails", "auto"))
            assert "the loader is broken" in error["text"] and error["weights"] == "unusable"
            receiver.refuse = None
            (report, weights), _ = team.run(refit, "fails", "auto")
            assert (report["version"], report["mode"]) == (2, "dense")
            expect_bits(receiver, weights)
        finally:
            receiver.close()
    finally:
        team.run(stop, "fails")


def test_no_relay(team, tmp_path):
    options = {"connect_timeout_s": 1.0}
    nowhere = "tcp://127.0.0.1:9"
    results = team.run(start, "nowhere", nowhere, str(tmp_path / "record"), options)
    assert results[0][0] == results[1][0]
    assert nowhere in results[0][0] and "\n" not in results[0][0]
    assert all(seconds < 10.0 for _, seconds in results)


def test_a_record_that_cannot_be_used(team, relay, tmp_path):
    Path(tmp_path / "record").mkdir()
    results = team.run(start, "folder", relay, str(tmp_path / "record"), {})
    if results == [None, None]:
        # It is read when a refit starts.
        error = same_error(team.run(refit, "folder", "auto"))
        team.run(stop, "folder")
        assert str(tmp_path / "record") in error["text"] and error["rank"] == 0
    else:
        assert results[0][0] == results[1][0] and str(tmp_path / "record") in results[0][0]
