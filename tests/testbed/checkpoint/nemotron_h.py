"""Nemotron-H checkpoints: Mamba-2, attention, plain MLP and mixture-of-experts layers in one model."""

from collections.abc import Iterator
from pathlib import Path

import torch

from testbed.checkpoint.files import COMMON, PAD, random_tensor, write_checkpoint

MAMBA, MLP, ATTENTION, EXPERTS = "M-*E"
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def make_nemotron_h(
    directory: str | Path,
    seed: int = 0,
    *,
    pattern: str = "M-*M",
    vocab: int = 128,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    mamba_heads: int = 4,
    mamba_head_dim: int = 16,
    groups: int = 2,
    state: int = 8,
    conv_kernel: int = 4,
    experts: int = 4,
    experts_per_token: int = 2,
    moe_intermediate: int = 32,
) -> Path:
    """Write a Nemotron-H checkpoint into `directory` (made if missing) and return that path.

    `pattern` has a character for each layer: "M" Mamba-2, "-" MLP, "*" attention, "E" mixture of experts with
    one shared expert. Untied embeddings; BF16, but the routers' `e_score_correction_bias` is FP32, as Megatron
    trains it. The same arguments give the same bits.
    """
    if unknown := set(pattern) - {MAMBA, MLP, ATTENTION, EXPERTS}:
        raise ValueError(f"no kind of layer is called {', '.join(sorted(unknown))}")
    if heads % kv_heads or mamba_heads % groups:
        raise ValueError("heads must be divisible by key-value heads, and Mamba heads by groups")
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **COMMON,
        "chunk_size": 16,
        "conv_kernel": conv_kernel,
        "expand": 2,
        "head_dim": head_dim,
        "hidden_dropout": 0.0,
        "hidden_size": hidden,
        "hybrid_override_pattern": pattern,
        "intermediate_size": intermediate,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": mamba_head_dim,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": mamba_heads,
        "mamba_proj_bias": False,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_groups": groups,
        "num_attention_heads": heads,
        "num_hidden_layers": len(pattern),
        "num_key_value_heads": kv_heads,
        "pad_token_id": PAD,
        "residual_in_fp32": False,
        "ssm_state_size": state,
        "tie_word_embeddings": False,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": vocab,
    }
    if EXPERTS in pattern:
        config |= {
            "moe_intermediate_size": moe_intermediate,
            "moe_shared_expert_intermediate_size": 2 * moe_intermediate,
            "n_group": 1,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": experts_per_token,
            "routed_scaling_factor": 2.5,
            "topk_group": 1,
        }

    def make_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = random_tensor(seed, name, shape)
        return tensor.float() if name.endswith("e_score_correction_bias") else tensor

    return write_checkpoint(directory, config, _shapes(config), make_tensor)


def _shapes(config: dict) -> Shapes:
    """Names and shapes as Hugging Face's Nemotron-H checkpoints have them."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    kinds = {MAMBA: _mamba, MLP: _mlp, ATTENTION: _attention, EXPERTS: _experts}
    yield "backbone.embeddings.weight", (vocab, hidden)
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        yield f"backbone.layers.{layer}.norm.weight", (hidden,)
        yield from kinds[kind](f"backbone.layers.{layer}.mixer", config)
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _mamba(prefix: str, config: dict) -> Shapes:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner, states = heads * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    for name in ("A_log", "D", "dt_bias"):
        yield f"{prefix}.{name}", (heads,)
    convolved = inner + 2 * states  # x, B, C
    yield f"{prefix}.conv1d.weight", (convolved, 1, config["conv_kernel"])
    yield f"{prefix}.conv1d.bias", (convolved,)
    yield f"{prefix}.in_proj.weight", (inner + convolved + heads, hidden)  # z, x, B, C, dt
    yield f"{prefix}.norm.weight", (inner,)
    yield f"{prefix}.out_proj.weight", (hidden, inner)


def _mlp(prefix: str, config: dict) -> Shapes:
    yield from _two_layers(prefix, config["hidden_size"], config["intermediate_size"])


def _attention(prefix: str, config: dict) -> Shapes:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield f"{prefix}.q_proj.weight", (queries, hidden)
    yield f"{prefix}.k_proj.weight", (keys, hidden)
    yield f"{prefix}.v_proj.weight", (keys, hidden)
    yield f"{prefix}.o_proj.weight", (hidden, queries)


def _experts(prefix: str, config: dict) -> Shapes:
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    yield f"{prefix}.gate.weight", (experts, hidden)
    yield f"{prefix}.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _two_layers(f"{prefix}.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield from _two_layers(f"{prefix}.shared_experts", hidden, config["moe_shared_expert_intermediate_size"])


def _two_layers(prefix: str, hidden: int, intermediate: int) -> Shapes:
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)
