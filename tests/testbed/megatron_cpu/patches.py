"""What must change in torch, megatron-core 0.16.1 and Megatron Bridge 0.3.1 to train without a GPU."""

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Torch functions that are asked for `device="cuda"` use the CPU.

    megatron-core's optimizers also tell precisions apart by names such as "torch.cuda.BFloat16Tensor", so
    `tensor.type()` answers with that spelling.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def apply() -> None:
    """Apply all patches; does nothing where CUDA is available."""
    if torch.cuda.is_available():
        return
    _cuda_is_the_cpu()
    _no_cuda_random_state()
    _scatter_contiguous_chunks()
    _router_without_engine()


def _cuda_is_the_cpu() -> None:
    torch.cuda.current_device = lambda: CPU
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    # Entered for good: megatron-core asks for "cuda" in forward passes and optimizers alike.
    CudaMeansCpu().__enter__()


def _no_cuda_random_state() -> None:
    """Dropout asks the tracker for a CUDA generator; dropout is 0 here, and there is none."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    @contextlib.contextmanager
    def fork(_self: object, *_: object, **__: object) -> Iterator[None]:
        yield

    CudaRNGStatesTracker.fork = fork


def _scatter_contiguous_chunks() -> None:
    """The Bridge scatters chunks along dimension 1 as they are: views that are not contiguous.

    gloo sends the bytes that follow the view's start instead, and row-parallel weights load wrong in silence.
    """
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    original = MegatronParamMapping.scatter_to_tp_ranks

    def scatter_to_tp_ranks(self, splits, *args, **kwargs):
        contiguous = splits and [split.contiguous() for split in splits]
        return original(self, contiguous, *args, **kwargs)

    MegatronParamMapping.scatter_to_tp_ranks = scatter_to_tp_ranks


def _router_without_engine() -> None:
    """The router's gating function names `te_general_gemm` although it is imported only with the engine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
