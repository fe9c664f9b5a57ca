"""A tiny random Qwen3-MoE checkpoint with its tokenizer, made without any download.

The files are written by hand, not through transformers: trainer (transformers 4) and vLLM (transformers 5)
keep experts differently in memory, but both read this layout, and it is the same bits in either environment.

    python -m testbed.checkpoint DIR
"""

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(len(SPECIAL_TOKENS))


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
    """Write the checkpoint into `directory` (made if missing) and return that path.

    Untied embeddings, BF16, every layer a mixture of experts. The same arguments give the same bits.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads: not divisible")
    if not 1 <= experts_per_token <= experts:
        raise ValueError(f"a token cannot use {experts_per_token} of {experts} experts")
    words = _words(vocab)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "decoder_sparse_step": 1,
        "eos_token_id": EOS,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 2 * moe_intermediate,
        "max_position_embeddings": 512,
        "mlp_only_layers": [],
        "moe_intermediate_size": moe_intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    _write_json(directory / "config.json", config)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    _write_json(directory / "generation_config.json", generation)
    _write_tokenizer(directory, words)
    tensors = {name: _random_tensor(seed, name, shape) for name, shape in _shapes(config)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as Hugging Face's Qwen3-MoE checkpoints have them."""
    vocab, hidden, head_dim = config["vocab_size"], config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    moe_intermediate = config["moe_intermediate_size"]
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
        yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (moe_intermediate, hidden)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (moe_intermediate, hidden)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, moe_intermediate)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _random_tensor(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """BF16 noise that depends on seed and name alone; norms lie near 1, weights have σ of 0.02 to 0.06."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(key >> 1))
    if "norm" in name:
        return (1.0 + 0.1 * noise).to(torch.bfloat16)
    return ((0.02 + 0.04 * (key % 1000) / 1000) * noise).to(torch.bfloat16)


def _words(vocab: int) -> list[str]:
    """The vocabulary: special tokens, then words of two, three, ... syllables that can be read aloud."""
    if vocab <= len(SPECIAL_TOKENS):
        raise ValueError(f"a vocabulary of {vocab} has no room beside {len(SPECIAL_TOKENS)} special tokens")
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    spoken = itertools.chain.from_iterable(itertools.product(syllables, repeat=n) for n in itertools.count(2))
    words = map("".join, spoken)
    return [*SPECIAL_TOKENS, *itertools.islice(words, vocab - len(SPECIAL_TOKENS))]


def _write_tokenizer(directory: Path, words: list[str]) -> None:
    special = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL_TOKENS)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": SPECIAL_TOKENS[UNK],
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "pad_token": SPECIAL_TOKENS[PAD],
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "unk_token": SPECIAL_TOKENS[UNK],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Qwen3-MoE checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    directory = make_qwen3_moe(arguments.directory, seed=arguments.seed, layers=arguments.layers)
    size = (directory / "model.safetensors").stat().st_size
    print(f"{directory}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
