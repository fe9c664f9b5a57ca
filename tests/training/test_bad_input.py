"""What training ranks give wrongly ends the refit with the tensor and the ranks named, and the baseline untouched."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from dcr_training import Part, RefitClient, RefitConfig, RefitError, StateDictSource
from emitted import bits, told
from team import Team
from testbed.checkpoint import make_qwen3


def error_of(call, *arguments):
    """What a RefitError says; None where nothing was raised."""
    try:
        call(*arguments)
    except RefitError as error:
        return {"text": str(error), "rank": error.rank, "tensor": error.tensor, "fatal": error.fatal}
    return None


def emitted(client, mode="mixed"):
    """This rank's items of a rehearsed refit."""
    import dcr._native as native

    client.rehearse(mode, keep=True)
    return [told(item) for payload in client.rehearsed() for item in native.decode_payload(payload)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("dense"), vocab=128, hidden=64, head_dim=16, intermediate=96, layers=1)


def spoil_megatron(rank, checkpoint):
    """Errors after each kind of spoiled shard, and what is emitted once it is whole again."""
    from dcr_training import MegatronBridgeSource
    from testbed.megatron_cpu import model as megatron

    megatron.initialize_groups(tensor_parallel=2)
    bridge, model = megatron.build(checkpoint)
    config = RefitConfig(record="unused", chunk_bytes=5000, bucket_bytes=20_000, check_replicas=True)
    client = RefitClient(MegatronBridgeSource(bridge, model), config)
    client.take_baseline()
    layer = model[0].module.module.decoder.layers[0]
    errors = {}

    def spoil(what, module, weight):
        good = module.weight
        if rank == 1:
            module.weight = torch.nn.Parameter(weight)
        errors[what] = error_of(client.rehearse)
        module.weight = good

    fc2, qkv = layer.mlp.linear_fc2, layer.self_attention.linear_qkv
    spoil("affine shape", fc2, fc2.weight.data.t())
    spoil("affine dtype", fc2, fc2.weight.data.half())
    spoil("residual shape", qkv, qkv.weight.data[:-1])
    norm = model[0].module.module.decoder.final_layernorm.weight
    if rank == 1:
        norm.data.view(torch.int16)[3] ^= 1
    errors["replicas in a refit"] = error_of(client.rehearse)
    errors["replicas on request"] = error_of(client.check_replicas)
    if rank == 0:
        norm.data.view(torch.int16)[3] ^= 1
    return (
        errors,
        error_of(client.check_replicas),
        [(name, len(positions)) for name, _, positions, _ in emitted(client)],
    )


def test_spoiled_shards_are_named(team, checkpoint):
    (errors, whole, mine), (other_errors, _, others) = team.run(spoil_megatron, str(checkpoint))
    assert errors == other_errors and whole is None
    fc2 = "decoder.layers.0.mlp.linear_fc2.weight"
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    norm = "decoder.final_layernorm.weight"
    for what, tensor, says in (
        ("affine shape", fc2, "[48, 64], but [64, 48] is tracked"),
        ("affine dtype", fc2, "dtype F16, but BF16 is tracked"),
        ("residual shape", qkv, "is tracked"),
        ("replicas in a refit", norm, "training ranks 0 and 1 hold copies that differ"),
        ("replicas on request", norm, "training ranks 0 and 1 hold copies that differ"),
    ):
        error = errors[what]
        assert error is not None, what
        assert error["tensor"] == tensor and says in error["text"], error
        assert "\n" not in error["text"] and not error["fatal"]
        assert what.startswith("replicas") or (error["rank"] == 1 and "rank 1" in error["text"]), error
    # Only the bit that both ranks changed in the end: nothing of the failed attempts went into the baseline.
    assert mine + others == [("model.norm.weight", 1)]


class Experts(StateDictSource):
    """A stacked tensor of four experts, of which each rank converts two; and one that both yield whole."""

    def __init__(self, rank):
        super().__init__(self._yield)
        generator = torch.Generator().manual_seed(1)
        self.stack = torch.randn(4, 3, 5, generator=generator).bfloat16()
        self.norm = torch.ones(7)
        self.mine = slice(2 * rank, 2 * rank + 2)
        self.at = rank

    def _yield(self):
        yield "norm", self.norm
        if self.mine is not None:
            yield Part("experts", (4, 3, 5), (self.mine.start, 0, 0), self.stack[self.mine])


def convert_parts(rank):
    """What is emitted of parts, and what is said of parts that do not make up their tensor."""
    source = Experts(rank)
    client = RefitClient(source, RefitConfig(record="unused"))
    client.take_baseline()
    source.stack[3, 1, 2] *= -1
    source.norm[2] = -0.0
    first = emitted(client)
    errors = {}
    mine = source.mine
    source.mine = slice(1, 4) if rank == 1 else mine
    if rank == 1:
        source.stack[1, 0, 4] += 1
    errors["overlap"] = error_of(client.rehearse)
    if rank == 1:
        source.stack[1, 0, 4] = 0
    if rank == 0:
        source.stack[1, 0, 4] = 0
    agreeing = emitted(client)
    source.mine = slice(3, 4) if rank == 1 else mine
    errors["gap"] = error_of(client.rehearse)
    source.mine = None if rank == 1 else mine
    errors["missing"] = error_of(client.rehearse)
    source.mine = mine
    after = emitted(client)
    dense = emitted(client, "dense")
    return first, agreeing, errors, after, dense, source.stack


def test_parts_are_assembled_by_their_owner_or_refused(team):
    one, two = team.run(convert_parts)
    first, agreeing, after, dense = ([*one[n], *two[n]] for n in (0, 1, 3, 4))
    stack = one[5]
    changed = {"experts": [3 * 15 + 1 * 5 + 2], "norm": [2]}
    assert {name: positions.tolist() for name, _, positions, _ in first} == changed
    changed["experts"].insert(0, 1 * 15 + 4)
    for items in (agreeing, after):
        assert {name: positions.tolist() for name, _, positions, _ in items} == changed
    (whole,) = [values for name, _, _, values in dense if name == "experts"]
    assert torch.equal(whole, bits(stack))
    assert one[2] == two[2]
    for what, says in (
        ("overlap", "training ranks 0 and 1 disagree on the bits of element 19"),
        (
            "gap",
            "15 of 60 elements are in no converted part, the first is element 30; parts came from",
        ),
        ("missing", "30 of 60 elements"),
    ):
        error = one[2][what]
        assert error["tensor"] == "experts" and says in error["text"], error


def accumulate(rank):
    """The delta after three steps that no refit came between."""
    weights = {"w": torch.zeros(10, dtype=torch.bfloat16), "v": torch.zeros(4)}
    client = RefitClient(StateDictSource(lambda: weights), RefitConfig(record="unused"))
    client.take_baseline()
    for step in (1, 2, 3):
        weights["w"][step] = step
    weights["w"][1] = 0
    return [(name, positions.tolist()) for name, _, positions, _ in emitted(client)]


def test_steps_between_refits_accumulate(team):
    one, two = team.run(accumulate)
    # Element 1 is back at its committed bits.
    assert one + two == [("w", [2, 3])]


def change_every_width(rank):
    """A sign of zero, a NaN payload and a subnormal in each dtype: what changed, and what was sent."""
    names = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "bool")
    weights = {name: torch.zeros(9, dtype=getattr(torch, name)) for name in names}
    client = RefitClient(StateDictSource(lambda: weights), RefitConfig(record="unused"))
    client.take_baseline()
    for tensor in weights.values():
        raw = tensor.view(torch.uint8).view(9, -1)
        raw[1, -1] = 0x80  # the sign
        raw[3, 0] = 1  # the smallest subnormal
        raw[5] = 0x7F  # a NaN, in most
    if tensor.dtype == torch.bool:
        raw[1, -1] = 1
    return [(name, positions.tolist(), values.tolist()) for name, _, positions, values in emitted(client)]


def test_stored_bits_of_every_width_count(team):
    one, two = team.run(change_every_width)
    for name, positions, values in one + two:
        width = getattr(torch, name).itemsize
        assert positions == [1, 3, 5], name
        sign = [1] if name == "bool" else [0] * (width - 1) + [0x80]
        assert values == [sign, [1] + [0] * (width - 1), [0x7F] * width], name
    assert len(one + two) == 9


def leave(rank):
    """One rank ends where the others wait for its flags."""
    client = RefitClient(Experts(rank), RefitConfig(record="unused", timeout_s=5.0))
    client.take_baseline()
    if rank == 1:
        os._exit(3)
    began = time.monotonic()
    return error_of(client.rehearse), time.monotonic() - began


def test_a_rank_that_is_gone_is_named():
    ranks = Team(2)
    try:
        (error, seconds), dead = ranks.run(leave)
    finally:
        ranks.close()
    assert dead is None and seconds < 60.0
    assert error["fatal"] and error["rank"] == 1 and "training rank 1" in error["text"]
    assert "\n" not in error["text"]


def yield_fewer(rank):
    names = ["a", "b"] if rank == 0 or not dist.is_initialized() else ["a"]
    source = StateDictSource(lambda: {name: torch.ones(2) for name in names})
    return error_of(RefitClient(source, RefitConfig(record="unused")).take_baseline)


def test_tensors_that_only_some_ranks_yield_are_refused(team):
    one, two = team.run(yield_fewer)
    assert one == two
    assert "yields 1 tensors on rank 1 and 2 on rank 0" in one["text"]


def change_dtype(rank):
    weights = {"w": torch.zeros(10, dtype=torch.complex64 if rank == 5 else torch.bfloat16), "x": torch.zeros(3)}
    client = RefitClient(StateDictSource(lambda: weights), RefitConfig(record="unused"))
    client.take_baseline()
    weights["x"] = torch.zeros(3, dtype=torch.complex64)
    unknown = error_of(client.rehearse)
    weights["x"] = torch.zeros(3)
    weights["new"] = torch.zeros(1)
    more = error_of(client.rehearse)
    del weights["new"], weights["w"]
    fewer = error_of(client.rehearse)
    return unknown, more, fewer


def test_changed_sources_are_refused(team):
    one, two = team.run(change_dtype)
    assert one == two
    unknown, more, fewer = one
    assert unknown["tensor"] == "x" and "complex64" in unknown["text"]
    assert more["tensor"] == "new", more
    assert fewer["tensor"] == "w" and "not offered" in fewer["text"]
