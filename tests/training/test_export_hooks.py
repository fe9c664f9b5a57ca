"""Models whose bridge has a custom export hook: nothing is projected, and any changed shard converts everything."""

import importlib

import pytest
import torch
from emitted import bits, perturb, told
from testbed.checkpoint import make_qwen3_moe

EXPERTS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return make_qwen3_moe(folder, layers=1, vocab=128, hidden=64, head_dim=16, experts=EXPERTS, moe_intermediate=32)


def stack_experts(self, task, converted, _state):
    """A hook as bridges have it for checkpoints with stacked experts: one tensor, once all experts are there."""
    held = self.__dict__.setdefault("held_experts", {})
    others = {}
    for name, tensor in converted.items():
        if ".experts." not in name:
            others[name] = tensor
            continue
        before, _, rest = name.partition(".experts.")
        expert, _, kind = rest.partition(".")
        held.setdefault((before, kind), {})[int(expert)] = tensor
        if len(held[before, kind]) == EXPERTS:
            stack = held.pop((before, kind))
            others[f"{before}.experts.{kind}"] = torch.stack([stack[number] for number in range(EXPERTS)])
    return others


def run(rank, checkpoint, layout):
    """What is emitted after nothing, one expert, and everything has changed, with the exports around it."""
    import dcr._native as native
    from dcr_training import MegatronBridgeSource, RefitClient, RefitConfig
    from testbed.megatron_cpu import model as megatron

    # After the testbed, which makes it importable without Transformer Engine.
    bridges = importlib.import_module("megatron.bridge.models.conversion.model_bridge")
    megatron.initialize_groups(**layout)
    bridge, model = megatron.build(checkpoint)
    kind = type(bridge._model_bridge)
    assert kind.maybe_modify_converted_hf_weight is bridges.MegatronModelBridge.maybe_modify_converted_hf_weight
    kind.maybe_modify_converted_hf_weight = stack_experts
    try:
        client = RefitClient(MegatronBridgeSource(bridge, model), RefitConfig(record="unused", chunk_bytes=5000))
        client.take_baseline()
        tasks = bridge.get_conversion_tasks(model)
        exports, emitted, converted = [], [], []

        def emit():
            exported = bridge.export_hf_weights(model, cpu=True, show_progress=False)
            exports.append({name: bits(tensor) for name, tensor in exported})
            totals = client.rehearse(commit=True, keep=True)
            decoded = [native.decode_payload(payload) for payload in client.rehearsed()]
            emitted.append([told(item) for items in decoded for item in items])
            converted.append(totals["residual_tensors"])

        emit()
        for task in tasks:
            if task.param_weight is not None and task.global_param_name.endswith("experts.linear_fc2.weight1"):
                task.param_weight.data.view(torch.int16)[0, 0] ^= 1
        emit()
        perturb(tasks, "all")
        emit()
        reasons = set(client.plan.residual.values())
        client.close()
    finally:
        del kind.maybe_modify_converted_hf_weight
    return exports, emitted, converted, reasons


@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"expert_parallel": 2}], ids=["tp2", "ep2"])
def test_stacked_experts(team, checkpoint, layout):
    one, two = team.run(run, str(checkpoint), layout)
    exports, converted, reasons = one[0], one[2], one[3]
    assert reasons == {"the model's bridge has a custom export hook"}
    assert converted == [0, len(exports[0]), len(exports[0])]
    stacked = "model.layers.0.mlp.experts.down_proj.weight"
    emitted = [[*mine, *other] for mine, other in zip(one[1], two[1], strict=True)]
    assert emitted[0] == []
    ((name, encoding, positions, _),) = emitted[1]
    # The first row of expert 1; with tensor parallelism, both ranks hold a half of it.
    assert (name, encoding) == (stacked, "overwrite")
    expert = 64 * 32
    assert positions.tolist() == ([expert, expert + 16] if "tensor_parallel" in layout else [expert])
    for before, after, items in zip(exports, exports[1:], emitted[1:], strict=False):
        result = {name: tensor.clone() for name, tensor in before.items()}
        for name, encoding, positions, values in items:
            assert encoding == "overwrite"
            assert bool((result[name][positions] != values).any(dim=1).all()), "only what differs is sent"
            result[name][positions] = values
        assert all(torch.equal(result[name], after[name]) for name in after)
