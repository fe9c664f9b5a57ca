"""Conversion tasks of models too large to build: the Bridge's own mappings and our classification, without weights.

Parameters are on torch's meta device, of the shape of one tensor-parallel rank; modules have only the class names that
the Bridge goes by. Mappings come from the registry of the model's bridge, and are told which rank they are on.
"""

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from unittest.mock import patch

import testbed.megatron_cpu  # noqa: F401
import torch
from dcr_training.plan import Plan, told
from dcr_training.tasks import Surroundings, describe
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

Parameter = tuple[str, str, tuple[int, ...], int | None]
"""Megatron's name, its module's class, the full shape, and the axis that tensor parallelism splits (None: none)."""

COLUMN, ROW, FUSED = "TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear"


def plan_of(registry: object, parameters: Iterable[Parameter], parts: int) -> Plan:
    """What `parts` tensor-parallel ranks, which are as many expert-tensor-parallel ones, agree on."""
    parameters = list(parameters)
    # As in the paper, embedding and head count as residual.
    surroundings = Surroundings(project_vocabulary=False)
    modules = {kind: type(kind, (torch.nn.Module,), {})() for _, kind, _, _ in parameters}
    accounts = []
    for part in range(parts):
        with (
            patch.object(MegatronParamMapping, "tp_rank", part),
            patch.object(MegatronParamMapping, "tp_size", parts),
        ):
            account = []
            for name, kind, shape, axis in parameters:
                local = [size // parts if at == axis else size for at, size in enumerate(shape)]
                tensor = torch.empty(local, dtype=torch.bfloat16, device="meta")
                buffer = name.endswith("expert_bias")
                mapping = registry.megatron_to_hf_lookup(name)
                assert mapping is not None, name
                task = SimpleNamespace(
                    param_name=name,
                    global_param_name=name,
                    mapping=mapping,
                    megatron_module=modules[kind],
                    param_weight=tensor if buffer else torch.nn.Parameter(tensor, requires_grad=False),
                )
                account.append(told(describe(task, surroundings)))
            accounts.append(account)
    return Plan(accounts)


def items(plan: Plan) -> Counter:
    """XOR items by canonical tensor when every shard changes: one for each block that one owner compares."""
    blocks = {
        (name, offset)
        for account in plan.accounts
        for index, each in enumerate(account)
        if index not in plan.residual
        for name, _, _, offset, _ in each.blocks
    }
    return Counter(name for name, _ in blocks)


def residual_names(plan: Plan) -> set[str]:
    """Canonical tensors that are converted."""
    return {name for names in plan.names for name in names if plan.is_residual(name)}


def attention(layer: int, hidden: int, heads: int, groups: int, head: int) -> list[Parameter]:
    """Self-attention with the norm before it."""
    where = f"decoder.layers.{layer}.self_attention."
    return [
        (where + "linear_qkv.layer_norm_weight", FUSED, (hidden,), None),
        (where + "linear_qkv.weight", FUSED, ((heads + 2 * groups) * head, hidden), 0),
        (where + "linear_proj.weight", ROW, (hidden, heads * head), 1),
    ]


def experts(layer: int, hidden: int, count: int, size: int, gated: bool) -> list[Parameter]:
    """Routed experts, their router, and the norm before it."""
    where = f"decoder.layers.{layer}."
    result = [
        (where + "pre_mlp_layernorm.weight", "TENorm", (hidden,), None),
        (where + "mlp.router.weight", "TopKRouter", (count, hidden), None),
    ]
    for expert in range(count):
        first, second = (where + f"mlp.experts.linear_fc{number}.weight{expert}" for number in (1, 2))
        result.append((first, "TEColumnParallelGroupedLinear", (size * (1 + gated), hidden), 0))
        result.append((second, "TERowParallelGroupedLinear", (hidden, size), 1))
    return result


def vocabulary(hidden: int, words: int) -> list[Parameter]:
    """Embedding and head."""
    return [
        ("embedding.word_embeddings.weight", "VocabParallelEmbedding", (words, hidden), 0),
        ("output_layer.weight", "ColumnParallelLinear", (words, hidden), 0),
    ]


def qwen3_30b_a3b() -> list[Parameter]:
    """Qwen3-30B-A3B by its published configuration."""
    result = [*vocabulary(2048, 151_936), ("decoder.final_layernorm.weight", "TENorm", (2048,), None)]
    for layer in range(48):
        result += attention(layer, 2048, heads=32, groups=4, head=128)
        for kind in "qk":
            name = f"decoder.layers.{layer}.self_attention.{kind}_layernorm.weight"
            result.append((name, "TENorm", (128,), None))
        result += experts(layer, 2048, 128, 768, gated=True)
    return result


def nemotron_3_ultra(experts_a_layer: int = 512) -> list[Parameter]:
    """The decoder of Nemotron-3-Ultra-550B-A55B by kinds of layers; sizes are small, as only counts are asked for.

    48 Mamba, 12 attention and 48 MoE layers: the paper does not tell them, its counts lead to them. Left out is what
    the Bridge has no mappings for: the latent projections of MoE layers, and the multi-token-prediction layer.
    """
    result = [*vocabulary(64, 128), ("decoder.final_norm.weight", "TENorm", (64,), None)]
    for layer in range(48):
        where = f"decoder.layers.{layer}.mixer."
        result += [(where + name, "MambaMixer", (16,), 0) for name in ("A_log", "D", "dt_bias")]
        result += [
            (where + "in_proj.layer_norm_weight", FUSED, (64,), None),
            (where + "in_proj.weight", FUSED, (256, 64), 0),
            (where + "conv1d.weight", "Conv1d", (192, 1, 4), 0),
            (where + "conv1d.bias", "Conv1d", (192,), 0),
            (where + "norm.weight", "ExtendedRMSNorm", (128,), 0),
            (where + "out_proj.weight", ROW, (64, 128), 1),
        ]
    for layer in range(48, 60):
        result += attention(layer, 64, heads=8, groups=8, head=8)
    for layer in range(60, 108):
        result += experts(layer, 64, experts_a_layer, 16, gated=False)
        where = f"decoder.layers.{layer}.mlp."
        result += [
            (where + "router.expert_bias", "TopKRouter", (experts_a_layer,), None),
            (where + "shared_experts.linear_fc1.weight", COLUMN, (64, 64), 0),
            (where + "shared_experts.linear_fc2.weight", ROW, (64, 64), 1),
        ]
    return result
