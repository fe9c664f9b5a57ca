"""Megatron Bridge on a real model with TP=2: the source, and the training callback."""

import itertools

import pytest
import torch
import torch.distributed as dist
from dcr_training import MegatronBridgeSource, WeightSource, native
from fake_native import FakeNative
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


class SmallBridge:
    """The part of an AutoBridge that a source uses."""

    def export_hf_weights(self, model, cpu, show_progress):
        yield from model[0].state_dict().items()


def train_with_callbacks(rank):
    """The versions after the start, a skipped step, a step; and what was closed at the end."""
    import testbed.megatron_cpu  # noqa: F401 (makes megatron.bridge importable)
    from dcr_training.megatron import REPORT, RefitCallback, register
    from megatron.bridge.training.callbacks import Callback, CallbackContext

    fake = FakeNative(rank, dist.get_world_size(), "callbacks", {})
    native.load = lambda: fake

    class Before(Callback):
        def on_train_step_end(self, context):
            context.user_state["seen"] = context.user_state[REPORT].version

    manager = register(SmallBridge(), {"record": "record"}, [Before()])
    model = [torch.nn.Linear(4, 4)]
    versions = []

    def fire(event, **fields):
        manager.fire(event, CallbackContext(state=None, model=model, user_state=manager.user_state, **fields))
        versions.append(manager.user_state[REPORT].version)

    fire("on_train_start")
    fire("on_train_step_end", skipped_iter=True)
    fire("on_train_step_end", skipped_iter=False)
    seen = manager.user_state["seen"]
    fire("on_train_end")
    with pytest.raises(ValueError, match="`recievers` not known"):
        RefitCallback(SmallBridge(), {"record": "record", "recievers": 2})
    return versions, seen, fake.closed


def test_refit_callback(team):
    one, two = team.run(train_with_callbacks)
    assert one == ([1, 1, 2, 2], 1, 2), "callbacks that were given run before the refit"
    assert two == ([1, 1, 2, 2], 1, 1)
