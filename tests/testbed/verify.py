"""A vLLM worker extension that compares the resident model with a dense load, bit for bit.

The reference is a second, fresh model that vLLM's own loader fills from a checkpoint, in the same worker and with the
same parallel groups. No code of dcr takes part in it, except that the CPU layout rule applies to both models.
Nothing here raises: vLLM's executor loses step with its ranks when a worker does.
"""

import contextlib
import copy
import gc
import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch


class VerifyExtension:
    """For `--worker-extension-cls testbed.verify.VerifyExtension`. Answers are JSON; `error` is None or one line."""

    def dcr_verify(self, checkpoint: str) -> dict[str, Any]:
        """Compares every parameter and buffer with a dense load of `checkpoint`.

        Of this rank: `tensors`, `elements` and `bytes` compared, and the names that are `differing`: in shape, dtype
        or a stored bit, or there on one side only.
        """
        answer = {"rank": getattr(self, "rank", None), "tensors": 0, "elements": 0, "bytes": 0, "differing": []}
        try:
            answer |= compare(self.model_runner.get_model(), dense_load(self.vllm_config, checkpoint))
        except Exception as error:
            return answer | {"error": one_line(error)}
        finally:
            # Layers refer to each other in circles.
            gc.collect()
        return answer | {"error": None}

    def dcr_digests(self) -> dict[str, Any]:
        """A digest of every parameter and buffer by name."""
        try:
            return {name: digest(tensor) for name, tensor in named_storage(self.model_runner.get_model())}
        except Exception as error:
            return {"error": one_line(error)}

    def dcr_flip(self, name: str) -> dict[str, Any]:
        """Flips the lowest bit of a parameter's first byte: shows that a comparison would see it."""
        try:
            tensor = dict(named_storage(self.model_runner.get_model()))[name]
            # A view of the first element reaches the memory itself, whatever the strides.
            first = tensor.detach()[(0,) * tensor.ndim]
            first.reshape(1).view(torch.uint8)[0] ^= 1
            return {"error": None}
        except Exception as error:
            return {"error": one_line(error)}


def dense_load(vllm_config: Any, checkpoint: str) -> torch.nn.Module:
    """A fresh model of a worker's configuration, filled from another checkpoint by vLLM's own loader."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    if not (Path(checkpoint) / "config.json").is_file():
        # The loader would take the path for the name of a repository to download.
        raise ValueError(f"{checkpoint} is not a folder with a checkpoint")
    config = copy.copy(vllm_config)
    # What layers register while they are made must not reach the served model's registries.
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.compilation_config.enabled_custom_ops = Counter()
    config.compilation_config.disabled_custom_ops = Counter()
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.model = checkpoint
    if hasattr(config.model_config, "model_weights"):
        config.model_config.model_weights = ""
    with set_current_vllm_config(config), own_rotary_tables():
        return get_model(vllm_config=config, model_config=config.model_config)


@contextlib.contextmanager
def own_rotary_tables() -> Iterator[None]:
    """vLLM shares rotary embeddings between models: without this their buffers would be compared with themselves."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    kept = dict(_ROPE_DICT)
    _ROPE_DICT.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(kept)


def compare(resident: torch.nn.Module, reference: torch.nn.Module) -> dict[str, Any]:
    """Names, shapes, dtypes and stored bytes of all parameters and buffers.

    Raises ValueError where both models have the same memory, which would compare as equal whatever it holds.
    """
    mine, theirs = dict(named_storage(resident)), dict(named_storage(reference))
    differing = sorted(mine.keys() ^ theirs.keys())
    for name in mine.keys() & theirs.keys():
        a, b = mine[name], theirs[name]
        if a.numel() and a.data_ptr() == b.data_ptr():
            raise ValueError(f"{name} is the same memory in the served model and in the reference")
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(raw(a), raw(b)):
            differing.append(name)
    return {
        "tensors": len(mine),
        "elements": sum(tensor.numel() for tensor in mine.values()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in mine.values()),
        "differing": sorted(differing),
    }


def named_storage(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter and buffer."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The stored bytes; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """A digest of shape, dtype and stored bytes."""
    state = hashlib.blake2b(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), digest_size=16)
    state.update(raw(tensor).cpu().numpy().tobytes())
    return state.hexdigest()


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
