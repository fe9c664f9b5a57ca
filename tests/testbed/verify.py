"""A vLLM worker extension that compares the resident model with a dense load, bit for bit.

The reference is a second, fresh model that vLLM's own loader fills from a checkpoint, in the same worker and with the
same parallel groups. No code of dcr takes part in it, except that the CPU layout rule applies to both models.
Nothing here raises: vLLM's executor loses step with its ranks when a worker does.
"""

import copy
import hashlib
from itertools import chain
from typing import Any

import torch


class VerifyExtension:
    """For `--worker-extension-cls testbed.verify.VerifyExtension`."""

    def dcr_verify(self, checkpoint: str) -> dict[str, Any]:
        """Compares every parameter and buffer with a dense load of `checkpoint`."""
        try:
            return compare(self.model_runner.get_model(), dense_load(self, checkpoint)) | {"rank": self.rank}
        except Exception as error:
            return {"rank": getattr(self, "rank", None), "error": f"{type(error).__name__}: {error}"[:500]}

    def dcr_digests(self) -> dict[str, Any]:
        """A digest of every parameter and buffer by name."""
        try:
            return {name: digest(tensor) for name, tensor in named_storage(self.model_runner.get_model())}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}

    def dcr_flip(self, name: str) -> dict[str, Any]:
        """Flips the lowest bit of a parameter's first byte: shows that a comparison would see it."""
        try:
            tensor = dict(named_storage(self.model_runner.get_model()))[name]
            raw(tensor)[0] ^= 1
            return {"error": None}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}


def dense_load(worker: Any, checkpoint: str) -> torch.nn.Module:
    """A fresh model of the worker's configuration, filled from another checkpoint by vLLM's own loader."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = copy.copy(worker.vllm_config)
    # Layers register themselves by name: the second model needs a registry of its own.
    config.compilation_config = copy.copy(worker.vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.model_config = copy.copy(worker.vllm_config.model_config)
    config.model_config.model = checkpoint
    if hasattr(config.model_config, "model_weights"):
        config.model_config.model_weights = ""
    with set_current_vllm_config(config):
        return get_model(vllm_config=config, model_config=config.model_config)


def compare(resident: torch.nn.Module, reference: torch.nn.Module) -> dict[str, Any]:
    """Names, shapes, dtypes and stored bytes of all parameters and buffers."""
    mine, theirs = dict(named_storage(resident)), dict(named_storage(reference))
    differing = sorted(mine.keys() ^ theirs.keys())
    for name in mine.keys() & theirs.keys():
        a, b = mine[name], theirs[name]
        same = a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))
        if not same:
            differing.append(name)
    return {
        "tensors": len(mine),
        "elements": sum(tensor.numel() for tensor in mine.values()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in mine.values()),
        "differing": sorted(differing),
        "error": None,
    }


def named_storage(model: torch.nn.Module):
    """(name, tensor) of every parameter and buffer."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The stored bytes; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """A digest of shape, dtype and stored bytes."""
    state = hashlib.blake2b(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), digest_size=16)
    state.update(raw(tensor).numpy().tobytes())
    return state.hexdigest()
