"""Keeping the layout that the native loader writes, on vLLM's CPU backend.

After loading, the CPU backend repacks weights for its kernels: dense weights may be replaced by packed copies, expert
weights are transposed block by block in place. The loader's view of a parameter is then no longer what is stored,
and an XOR through the loader would report success and give wrong bits. For engines whose weight-transfer backend is
dcr, dense layers therefore use torch's own linear, and experts and convolutions are packed when they are used.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

logger = logging.getLogger("vllm.dcr")

KEPT = "_dcr_loader_layout"
"""Set on modules whose parameters keep the loader's layout by one of the replacements below."""

PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
"""vLLM's methods whose work after loading, on the CPU, is nothing but what the replacements below leave out."""


def keep_loader_layout() -> None:
    """Replaces the repacking of vLLM's CPU backend. Engines of other backends see the original; safe to call again.

    Where this vLLM lacks what is to be replaced, its repacking stays, and `layout_is_kept` says so.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for replace in (_replace_dense, _replace_experts):
        try:
            replace()
        except (ImportError, AttributeError) as error:
            logger.warning("dcr: this vLLM's CPU backend is not as expected, refits will be refused: %s", error)


def layout_is_kept(model: torch.nn.Module) -> str | None:
    """None when every parameter is stored as the loader wrote it and nothing is derived from it; else one line about
    the first module that may differ.

    A module passes if vLLM does nothing to it after loading, or only what is known to leave it alone. What vLLM
    derives from weights outside of parameters and buffers (as for MLA's absorbed projections) would be stale after
    a refit, and nobody comparing parameters would see it: such modules are refused as well.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "dcr can prove the resident layout on vLLM's CPU backend only so far; this worker runs on another device"
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} processes its weights after loading in a way that dcr does not know"
    for name, module in model.named_modules():
        if (reason := _unlike_loaded(name or "the model itself", module)) is not None:
            return reason
    return None


def _unlike_loaded(name: str, module: torch.nn.Module) -> str | None:
    """One line when a module's parameters may not be what the loader wrote."""
    from vllm.model_executor.layers.attention import Attention, MMEncoderAttention, is_deferred_attention_layer
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.v1.attention.backend import AttentionImplBase

    weights = dict(module.named_parameters(recurse=False))
    for parameter, tensor in weights.items():
        if tensor.numel() == 0:
            return f"parameter {name}.{parameter} is empty: the CPU backend replaced it by a packed copy"
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase) and type(method).__name__ not in PLAIN_METHODS:
        return f"module {name} is processed after loading by {type(method).__name__}, which dcr does not know"
    if is_deferred_attention_layer(module):
        hook = type(module).process_weights_after_loading
        plain = hook is Attention.process_weights_after_loading and _inherits(
            module.impl, AttentionImplBase, "process_weights_after_loading"
        )
        encoder = hook is MMEncoderAttention.process_weights_after_loading and not module.fp8_enabled
        if not (plain or encoder):
            return f"attention {name} ({type(module).__name__}) derives values from its weights, which a refit misses"
    repacked = hasattr(module, "cpu_linear") or "w13_weight" in weights
    if repacked and not getattr(module, KEPT, False):
        return f"module {name} may keep its weights in a packed layout: it was loaded without dcr's plugin"
    return None


def _inherits(instance: Any, base: type, method: str) -> bool:
    """Whether an object has a base class's method as it is."""
    return getattr(type(instance), method, None) is getattr(base, method)


def _is_dcr() -> bool:
    """Whether the engine whose model is being loaded has dcr as its weight-transfer backend."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = getattr(config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == "dcr"


def _replace_dense() -> None:
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if getattr(original, KEPT, False):
        return

    @functools.wraps(original)
    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not _is_dcr():
            return original(layer, remove_weight)
        if layer.weight.ndim == 3:
            _replace_convolutions()
        layer.cpu_linear = torch.nn.functional.linear
        setattr(layer, KEPT, True)
        return None

    setattr(dispatch, KEPT, True)
    # Callers import the function when they use it, so replacing it in its module reaches them.
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _replace_experts() -> None:
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    process, apply = Experts.process_weights_after_loading, Experts.apply
    if getattr(process, KEPT, False):
        return

    @functools.wraps(process)
    def leave_as_loaded(self: Any, layer: torch.nn.Module) -> None:
        if not _is_dcr():
            return process(self, layer)
        size = self.moe_config.intermediate_size_per_partition
        padded = self._padded_intermediate_size(self.moe_config)
        if padded != size:
            raise ValueError(
                f"dcr: this CPU's expert kernels pad an intermediate size of {size} per rank to {padded}, which "
                "changes the layout that the loader writes; choose a tensor-parallel size that needs no padding"
            )
        self._use_zentorch = False
        setattr(self, KEPT, True)
        setattr(layer, KEPT, True)
        return None

    @functools.wraps(apply)
    def pack_and_apply(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(self, KEPT, False):
            # The same kernel on the same packed values; packing writes to new memory, the resident weights stay.
            w1 = cpu_prepack_moe_weight(w1, self.isa)
            w2 = cpu_prepack_moe_weight(w2, self.isa)
        return apply(self, output, hidden_states, w1, w2, *args, **kwargs)

    setattr(leave_as_loaded, KEPT, True)
    Experts.process_weights_after_loading = leave_as_loaded
    Experts.apply = pack_and_apply


def _replace_convolutions() -> None:
    """Gated delta nets ask for a packed causal convolution wherever the CPU has one; packed weights have two
    dimensions, those of the loader three, so other engines' calls pass through."""
    from vllm._custom_ops import causal_conv1d_weight_pack
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def packed_when_used(original: Any) -> Any:
        @functools.wraps(original)
        def convolve(*, weight: torch.Tensor, is_weight_packed: bool, **kwargs: Any) -> torch.Tensor:
            if is_weight_packed and weight.ndim == 3:
                weight = causal_conv1d_weight_pack(weight.reshape(weight.size(0), weight.size(2)).clone())
            return original(weight=weight, is_weight_packed=is_weight_packed, **kwargs)

        setattr(convolve, KEPT, True)
        return convolve

    for name in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"):
        original = getattr(gdn_attention, name)
        if not getattr(original, KEPT, False):
            setattr(gdn_attention, name, packed_when_used(original))
