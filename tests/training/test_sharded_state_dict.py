"""Trainers that shard with DTensor (FSDP2): shards are compared in place, and nothing is gathered for a delta."""

import pytest
import torch
from dcr_training import RefitClient, RefitConfig, StateDictSource
from emitted import bits, told


def emit(client, mode="mixed"):
    import dcr._native as native

    totals = client.rehearse(mode, commit=True, keep=True)
    return totals, [told(item) for payload in client.rehearsed() for item in native.decode_payload(payload)]


def shard_and_refit(rank):
    """Items of a delta and of a dense refit, the whole tensors around the delta, and how often one was gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(3)
    whole = {
        "rows": torch.randn(6, 4, generator=generator).bfloat16(),
        "uneven": torch.randn(5, 3, generator=generator).bfloat16(),
        "single": torch.randn(1, 3, generator=generator),
        "columns": torch.randn(3, 8, generator=generator).bfloat16(),
        "middle": torch.randn(2, 4, 3, generator=generator).bfloat16(),
        "copied": torch.randn(7, generator=generator),
        "plain": torch.randn(2, 2, generator=generator).bfloat16(),
    }
    how = {"columns": [Shard(1)], "middle": [Shard(1)], "copied": [Replicate()]}
    weights = {name: distribute_tensor(tensor, mesh, how.get(name, [Shard(0)])) for name, tensor in whole.items()}
    weights["plain"] = whole["plain"].clone()
    gathered = []
    full_tensor = DTensor.full_tensor
    DTensor.full_tensor = lambda self: (gathered.append(1), full_tensor(self))[1]
    try:
        client = RefitClient(StateDictSource(lambda: weights), RefitConfig(record="unused", check_replicas=True))
        client.take_baseline()
        before = len(gathered)
        start = {name: bits(tensor) for name, tensor in whole.items()}
        for name, tensor in whole.items():
            flat = tensor.view(-1)
            flat[0], flat[-1] = -0.0, float("nan")
            if name == "plain":
                weights[name] = tensor.clone()
            else:
                weights[name] = distribute_tensor(tensor, mesh, how.get(name, [Shard(0)]))
        totals, delta = emit(client)
        assert len(gathered) == before, "a delta gathers nothing"
        _, dense = emit(client, "dense")
    finally:
        DTensor.full_tensor = full_tensor
    return start, {name: bits(tensor) for name, tensor in whole.items()}, delta, dense, totals, client.baseline_bytes


def test_shards_are_projected(team):
    one, two = team.run(shard_and_refit)
    start, end = one[0], one[1]
    named = {name: torch.zeros(len(tensor), dtype=torch.int64) for name, tensor in end.items()}
    for name, encoding, positions, values in [*one[2], *two[2]]:
        assert encoding == "xor"
        named[name][positions] += 1
        start[name][positions] ^= values
    for name, tensor in end.items():
        assert torch.equal(start[name], tensor), name
        assert int(named[name].max()) == 1, name
    dense = [*one[3], *two[3]]
    assert sorted(name for name, *_ in dense) == sorted(end)
    assert all(encoding == "dense" and torch.equal(values, end[name]) for name, encoding, _, values in dense)
    assert one[4] == two[4]
    assert one[5] + two[5] == sum(tensor.numel() for tensor in end.values()), "one copy, spread over the owners"


def train_fsdp(rank):
    """A model under FSDP2: its optimizer's step arrives as the difference of gathered state dicts."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).bfloat16()
    from torch.distributed.device_mesh import init_device_mesh

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    client = RefitClient(StateDictSource(model), RefitConfig(record="unused"))
    client.take_baseline()

    def gather():
        return {name: bits(tensor.full_tensor()) for name, tensor in model.state_dict().items()}

    start = gather()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    totals, items = emit(client)
    return start, gather(), items, totals["changed"]


def test_fsdp2_training(team):
    one, two = team.run(train_fsdp)
    start, end, changed = one[0], one[1], one[3]
    assert changed > 0
    for name, _, positions, values in [*one[2], *two[2]]:
        start[name][positions] ^= values
    assert all(torch.equal(start[name], end[name]) for name in end)
    assert changed == sum(len(positions) for _, _, positions, _ in [*one[2], *two[2]])


@pytest.mark.parametrize("mode", ["sparse", ""])
def test_unknown_modes_are_refused(mode):
    client = RefitClient(StateDictSource(lambda: {"w": torch.ones(2)}), RefitConfig(record="unused"))
    client.take_baseline()
    with pytest.raises(Exception, match="is not a mode"):
        client.rehearse(mode)
    client.close()


def shard_otherwise(rank):
    """Reasons of tensors whose placement is no plain sharding, and of one whose placement is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    class Interleaved(Shard):
        """Called otherwise than what it derives from: its elements may lie in another order."""

    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(3, 2)
    placed = {"sum": Partial(), "interleaved": Interleaved(0), "rows": Shard(0)}
    weights = {name: DTensor.from_local(local, mesh, [how], run_check=False) for name, how in placed.items()}
    source = StateDictSource(lambda: weights)
    source.refresh()
    return {task.name: (task.reason, task.projection is None, task.shard) for task in source.tasks()}


def test_only_plain_shards_are_projected(team):
    for rank, found in enumerate(team.run(shard_otherwise)):
        for name in ("sum", "interleaved"):
            reason, converted, shard = found[name]
            assert converted and reason.startswith("sharded as "), name
            # Ranks hold different parts, so none may pass for a copy of another's.
            assert shard == f"{name}#{rank}"
        assert found["rows"] == ("", False, f"rows@{3 * rank}.0")


class Spoiling(StateDictSource):
    """Its conversion changes one element, of which rank 1 alone holds the shard."""

    def convert(self, selected):
        for index, name, tensor in super().convert(selected):
            spoiled = tensor.clone()
            if name == "spoiled":
                spoiled[4, 1] += 1
            yield index, name, spoiled


def spoil_the_other_half(rank):
    """Why tasks are residual on this rank, and what is sent of an unchanged model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    names = ("spoiled", "good")
    weights = {name: distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]) for name in names}
    client = RefitClient(Spoiling(lambda: weights), RefitConfig(record="unused"))
    client.take_baseline()
    residual = dict(client.plan.residual)
    return residual, emit(client)[1]


def test_a_difference_that_one_rank_finds_counts_on_all(team):
    found = team.run(spoil_the_other_half)
    # By its canonical index: row 4 of two columns, element 1.
    expected = {0: "the conversion to `spoiled` changes bits, at element 9"}
    assert found == [(expected, []), (expected, [])]
