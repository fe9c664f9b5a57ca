"""Keeping the layout that the native loader writes, on vLLM's CPU backend.

After loading, the CPU backend repacks weights for its kernels: dense weights may be replaced by packed copies, expert
weights are transposed block by block in place. The loader's view of a parameter is then no longer what is stored,
and an XOR through the loader would report success and give wrong bits. For engines whose weight-transfer backend is
dcr, dense layers therefore use torch's own linear, and experts are packed when they are used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

KEPT = "_dcr_loader_layout"
"""Set on modules whose parameters keep the loader's layout by one of the replacements below."""


def keep_loader_layout() -> None:
    """Replaces the repacking of vLLM's CPU backend. Engines of other backends see the original; safe to call again."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if getattr(utils.dispatch_cpu_unquantized_gemm, KEPT, False):
        return
    # Callers import the function when they use it, so replacing it in its module reaches them.
    utils.dispatch_cpu_unquantized_gemm = _linear_in_place_of(utils.dispatch_cpu_unquantized_gemm)
    experts = cpu_moe.CPUUnquantizedExperts
    experts.process_weights_after_loading = _experts_left_as_loaded(experts.process_weights_after_loading)
    experts.apply = _experts_packed_when_used(experts.apply)


def layout_is_kept(model: torch.nn.Module) -> str | None:
    """None when every parameter is stored as the loader wrote it; else one line about the first that may not be."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "dcr can prove the resident layout on vLLM's CPU backend only so far; this worker runs on another device"
    for name, module in model.named_modules():
        weights = dict(module.named_parameters(recurse=False))
        for parameter, tensor in weights.items():
            if tensor.numel() == 0:
                return f"parameter {name}.{parameter} is empty: the CPU backend replaced it by a packed copy"
        repacked = hasattr(module, "cpu_linear") or "w13_weight" in weights
        if repacked and not getattr(module, KEPT, False):
            return f"module {name} may keep its weights in a packed layout: it was loaded without dcr's plugin"
    return None


def _is_dcr() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = getattr(config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == "dcr"


def _linear_in_place_of(original: Any) -> Any:
    @functools.wraps(original)
    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not _is_dcr():
            return original(layer, remove_weight)
        layer.cpu_linear = torch.nn.functional.linear
        setattr(layer, KEPT, True)
        return None

    setattr(dispatch, KEPT, True)
    return dispatch


def _experts_left_as_loaded(original: Any) -> Any:
    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        if not _is_dcr():
            return original(self, layer)
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

    return process_weights_after_loading


def _experts_packed_when_used(original: Any) -> Any:
    from vllm._custom_ops import cpu_prepack_moe_weight

    @functools.wraps(original)
    def apply(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(self, KEPT, False):
            # The same kernel on the same packed values; the resident weights stay untouched. `clone`, because the
            # packing works in place where it can.
            w1 = cpu_prepack_moe_weight(w1.clone(), self.isa)
            w2 = cpu_prepack_moe_weight(w2.clone(), self.isa)
        return original(self, output, hidden_states, w1, w2, *args, **kwargs)

    return apply
