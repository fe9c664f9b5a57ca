"""Adapters (LoRA by the Bridge): what they are merged into is sent as the Bridge exports it."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from dcr_training.tasks import ADAPTER, Surroundings, describe
from emitted import bits, told
from testbed.checkpoint import make_qwen3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    return make_qwen3(folder, layers=2, vocab=128, hidden=64, head_dim=16, intermediate=96)


def run(rank, checkpoint, layout):
    """What is emitted after nothing, and after the adapters alone have changed, with the exports around it."""
    import dcr._native as native
    from dcr_training import MegatronBridgeSource, RefitClient, RefitConfig
    from testbed.megatron_cpu import model as megatron

    importlib.import_module("megatron.bridge.peft.utils").HAVE_TE = False
    lora = importlib.import_module("megatron.bridge.peft.lora").LoRA
    megatron.initialize_groups(**layout)
    bridge, model = megatron.build(checkpoint)
    model = lora(target_modules=["linear_proj"], dim=4, alpha=8)(model)
    adapters = [(name, weight) for name, weight in model[0].named_parameters() if ".adapter." in name]
    assert adapters, "each rank has adapters"
    client = RefitClient(MegatronBridgeSource(bridge, model), RefitConfig(record="unused", chunk_bytes=5000))
    client.take_baseline()
    exports, emitted, converted = [], [], []

    def emit():
        exported = bridge.export_hf_weights(model, cpu=True, show_progress=False)
        exports.append({name: bits(tensor) for name, tensor in exported})
        totals = client.rehearse(commit=True, keep=True)
        emitted.append([told(item) for payload in client.rehearsed() for item in native.decode_payload(payload)])
        converted.append(totals["residual_tensors"])

    emit()
    generator = torch.Generator().manual_seed(rank)
    for _, weight in adapters:
        weight.data.copy_(torch.randn(weight.shape, generator=generator).to(weight.dtype))
    emit()
    reasons = {client.plan.residual[index] for index in client.plan.residual}
    client.close()
    return exports, emitted, converted, reasons


@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=["tp2", "pp2"])
def test_changed_adapters_send_what_they_are_merged_into(team, checkpoint, layout):
    one, two = team.run(run, str(checkpoint), layout)
    before, after = one[0]
    assert "adapter" in one[3] and one[1][0] == two[1][0] == []
    merged = {name for name in before if name.endswith("o_proj.weight")}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == merged and len(merged) == 2
    # The Bridge converts all that are adapted, and nothing else.
    assert one[2] == [0, len(merged)]
    result = {name: tensor.clone() for name, tensor in before.items()}
    for name, encoding, positions, values in [*one[1][1], *two[1][1]]:
        assert encoding == "overwrite" and name in merged
        assert bool((result[name][positions] != values).any(dim=1).all()), "only what differs is sent"
        result[name][positions] = values
    assert all(torch.equal(result[name], after[name]) for name in after)


def test_adapters_are_the_reason_before_all_others():
    # Whatever else makes the task residual, a client must look at the adapters' own parameters as well.
    mapping = SimpleNamespace(hf_param="o_proj", is_adapter=False, tp_size=1, tp_rank=0)
    module = torch.nn.Linear(2, 2)
    name = "decoder.layers.0.self_attention.linear_proj.to_wrap.weight"
    weight = module.weight
    task = SimpleNamespace(
        param_name=name, global_param_name=name, mapping=mapping, megatron_module=module, param_weight=weight
    )
    assert describe(task, Surroundings(export_hook=True)).reason == ADAPTER
