"""Sources of canonical tensors, Megatron Bridge's on a real model with TP=2."""

import itertools

import pytest
import torch
import torch.distributed as dist
from dcr_training import MegatronBridgeSource, StateDictSource, WeightSource
from safetensors.torch import load_file
from testbed.checkpoint import make_qwen3_moe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3_moe(tmp_path_factory.mktemp("checkpoint"), layers=1, vocab=128, hidden=64, experts=4)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def train_and_export(rank, checkpoint, steps):
    """Names, shapes and bits before the first step and after each one."""
    from testbed.megatron_cpu import model as megatron

    megatron.initialize_groups(tensor_parallel=2)
    bridge, model = megatron.build(checkpoint)
    optimizer = megatron.make_optimizer(model, lr=2e-6)
    source = MegatronBridgeSource(bridge, model)
    assert isinstance(source, WeightSource)
    assert (source.rank, source.world_size) == (rank, 2)
    assert source.metadata()["tensor_parallel"] == 2
    states = []
    for step in range(steps + 1):
        if step:
            megatron.train_step(model, optimizer, megatron.random_batch(128, 2, 32, str(step)))
        states.append([(name, tuple(tensor.shape), bits(tensor)) for name, tensor in source])
    return states, source.metadata()


def test_megatron_bridge_source(team, checkpoint):
    (states, metadata), other = team.run(train_and_export, str(checkpoint), 2)
    # Replicated tensors are trained on both ranks, and each rank offers its own copy.
    assert other == (states, metadata)
    assert metadata["model"] == "GPTModel"
    loaded = load_file(checkpoint / "model.safetensors")
    start = {name: (shape, content) for name, shape, content in states[0]}
    assert start == {name: (tuple(tensor.shape), bits(tensor)) for name, tensor in loaded.items()}
    elements = sum(tensor.numel() for tensor in loaded.values())
    for before, after in itertools.pairwise(states):
        assert [(name, shape) for name, shape, _ in before] == [(name, shape) for name, shape, _ in after]
        old, new = (b"".join(content for _, _, content in state) for state in (before, after))
        old, new = (torch.frombuffer(bytearray(content), dtype=torch.int16) for content in (old, new))
        changed = int((old != new).sum())
        assert 0.001 < changed / elements < 0.1


def test_state_dict_source_takes_modules_and_callables():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    names = [name for name, _ in StateDictSource(module)]
    assert names == list(module.state_dict())
    pairs = [("a", torch.ones(2)), ("b", torch.zeros(0))]
    for callable_ in (lambda: iter(pairs), lambda: dict(pairs), lambda: pairs):
        source = StateDictSource(callable_)
        assert isinstance(source, WeightSource)
        assert list(source) == list(source) == pairs
        assert (source.rank, source.world_size) == (0, 1)
    with pytest.raises(TypeError, match="callable that returns tensors; not dict"):
        StateDictSource(dict(pairs))


def gather_sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(12.0).reshape(6, 2)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    assert sharded.to_local().shape == (3, 2)
    ((name, tensor),) = StateDictSource(lambda: {"weight": sharded})
    return name, bool(torch.equal(tensor, full)), type(tensor).__name__


def test_state_dict_source_gathers_sharded_tensors(team):
    assert team.run(gather_sharded) == [("weight", True, "Tensor")] * 2


def test_stale_parameters_are_gathered_first():
    calls = []

    class Settings:
        overlap_param_gather = True

    class Chunk(torch.nn.Module):
        ddp_config = Settings()

        def start_param_sync(self, force_sync):
            calls.append(("sync", force_sync))

    class Bridge:
        def export_hf_weights(self, model, cpu, show_progress):
            calls.append(("export", cpu, show_progress))
            yield "weight", torch.ones(1)

    assert [name for name, _ in MegatronBridgeSource(Bridge(), Chunk())] == ["weight"]
    assert calls == [("sync", True), ("export", True, False)]
