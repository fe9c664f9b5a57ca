"""Sources of canonical tensors; Megatron Bridge's on a real model is in test_megatron."""

import pytest
import torch
import torch.distributed as dist
from dcr_training import MegatronBridgeSource, StateDictSource, WeightSource


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
    assert calls == [("sync", True), ("export", False, False)]
