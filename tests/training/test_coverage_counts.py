"""The coverage counts of the paper's appendix D, from our classification of the Bridge's own mappings.

Expected numbers are the paper's. Qwen3-30B-A3B is reproduced in full. Of Nemotron-3-Ultra-550B-A55B the decoder is;
what the Bridge has no mappings for is added by formula, where the test says so.
"""

import importlib
from math import prod

import pytest
from shaped import items, nemotron_3_ultra, plan_of, qwen3_30b_a3b, residual_names


def registry(module, bridge):
    return getattr(importlib.import_module(f"megatron.bridge.models.{module}"), bridge)().mapping_registry()


@pytest.mark.parametrize(
    ("parts", "affine", "total"), [(1, 18_721, 18_867), (4, 74_161, 74_307), (8, 148_081, 148_227)]
)
def test_qwen3_30b_a3b(parts, affine, total):
    plan = plan_of(registry("qwen.qwen3_moe_bridge", "Qwen3MoEBridge"), qwen3_30b_a3b(), parts)
    found, residual = items(plan), residual_names(plan)
    assert (len(found), len(found) + len(residual)) == (18_721, 18_867)
    assert (found.total(), found.total() + len(residual)) == (affine, total)
    assert found.total() == 18_480 * parts + 241
    split = {name for name, count in found.items() if count == parts}
    whole = {name for name, count in found.items() if count == 1}
    assert split | whole == found.keys()
    assert len([name for name in found if ".experts." in name]) == 18_432
    if parts > 1:
        assert (len(split), len(whole)) == (18_480, 241)
    kinds = {name.split("self_attn.")[-1] for name in residual}
    assert kinds == {f"{kind}_proj.weight" for kind in "qkv"} | {"model.embed_tokens.weight", "lm_head.weight"}


def test_qwen3_30b_a3b_bytes():
    parameters = qwen3_30b_a3b()
    plan = plan_of(registry("qwen.qwen3_moe_bridge", "Qwen3MoEBridge"), parameters, 1)
    total = sum(2 * prod(shape) for _, _, shape, _ in parameters)
    residual = sum(2 * prod(shape) for index, (_, _, shape, _) in enumerate(parameters) if index in plan.residual)
    assert round(total / 1e9, 2) == 61.06
    assert round(100 * (1 - residual / total), 1) == 96.3


def test_nemotron_3_ultra():
    parts = 2
    plan = plan_of(registry("nemotronh.nemotron_h_bridge", "NemotronHBridge"), nemotron_3_ultra(), parts)
    found, residual = items(plan), residual_names(plan)
    # By real mappings: 48 MoE layers, 48 Mamba layers and 12 attention layers, embedding and head.
    routed = {name: count for name, count in found.items() if ".mixer.experts." in name}
    others = {name: count for name, count in found.items() if name not in routed}
    biases = {name for name in residual if name.endswith("e_score_correction_bias")}
    states = {name for name in others if name.split("mixer.")[-1] in ("A_log", "D", "dt_bias", "norm.weight")}
    assert set(routed.values()) == {parts} and all(others[name] == parts for name in states)
    split = sum(count == parts for count in others.values())
    whole = len(others) - split
    # By formula: the layer of multi-token prediction has one attention and one MoE layer, and four tensors more
    # (two norms, one projection, a last norm); each of the 49 MoE layers has two latent projections.
    assert len(routed) + 512 * 2 == 50_176
    assert len(residual - biases) + 3 == 185
    # The paper counts the routers' bias buffers as affine; here they are residual.
    assert len(biases) + 1 == 49
    latent, attention, moe, more = 2 * 49, 2, 4, 4
    assert len(others) + len(biases) + 1 + latent + attention + moe + more == 662
    # The paper's split of the 662 comes out where Mamba states and gated norms count as whole and the latent
    # projections as split. The Bridge's mappings split the states: here they are items of their own on each rank.
    assert len(states) == 48 * 4
    split = split - len(states) + latent + 1 + 2
    whole = whole + len(states) + len(biases) + 1 + (attention - 1) + (moe - 2) + more
    assert (split, whole) == (257, 405)
    assert (len(routed) + 512 * 2) * 8 + split * 8 + whole == 403_869
