"""Qwen3 checkpoints: dense, and with every layer a mixture of experts."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from testbed.checkpoint.files import COMMON, random_tensor, write_checkpoint


def make_qwen3(
    directory: str | Path,
    seed: int = 0,
    *,
    tied: bool = False,
    vocab: int = 512,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 256,
) -> Path:
    """Write a dense Qwen3 checkpoint into `directory` (made if missing) and return that path.

    BF16. With `tied` embeddings there is no `lm_head.weight`. The same arguments give the same bits.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": intermediate,
        "max_window_layers": layers,
        **_config(vocab=vocab, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        "tie_word_embeddings": tied,
    }
    return _write(directory, config, seed)


def make_qwen3_moe(
    directory: str | Path,
    seed: int = 0,
    *,
    vocab: int = 512,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    experts: int = 8,
    experts_per_token: int = 2,
    moe_intermediate: int = 64,
) -> Path:
    """Write a Qwen3-MoE checkpoint into `directory` (made if missing) and return that path.

    Untied embeddings, BF16, every layer a mixture of experts. The same arguments give the same bits.
    """
    if not 1 <= experts_per_token <= experts:
        raise ValueError(f"a token cannot use {experts_per_token} of {experts} experts")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "intermediate_size": 2 * moe_intermediate,
        "mlp_only_layers": [],
        "moe_intermediate_size": moe_intermediate,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        **_config(vocab=vocab, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        "tie_word_embeddings": False,
    }
    return _write(directory, config, seed)


def _config(*, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict:
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads: not divisible")
    return {
        **COMMON,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "max_position_embeddings": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }


def _write(directory: str | Path, config: dict, seed: int) -> Path:
    return write_checkpoint(directory, config, _shapes(config), partial(random_tensor, seed))


def _shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as Hugging Face's Qwen3 checkpoints have them."""
    vocab, hidden, head_dim = config["vocab_size"], config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if "num_experts" not in config:
            yield from _gated_mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _gated_mlp(f"{prefix}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _gated_mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)
