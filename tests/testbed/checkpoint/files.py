"""The files of a Hugging Face checkpoint: configuration, tokenizer, and random BF16 tensors.

They are written by hand, not through transformers: trainer (transformers 4) and vLLM (transformers 5)
keep experts differently in memory, but both read this layout, and it is the same bits in either environment.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(len(SPECIAL_TOKENS))

# What every configuration here has.
COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def write_checkpoint(
    directory: str | Path,
    config: dict,
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    make_tensor: Callable[[str, tuple[int, ...]], torch.Tensor],
) -> Path:
    """Write a checkpoint into `directory` (made if missing) and return that path.

    `shapes` are the tensors' names and shapes as Hugging Face has them, and `make_tensor` makes one of them.
    """
    words = _words(config["vocab_size"])
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    _write_json(directory / "generation_config.json", generation)
    _write_tokenizer(directory, words)
    tensors = {name: make_tensor(name, shape) for name, shape in shapes}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def random_tensor(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
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
