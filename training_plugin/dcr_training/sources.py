"""Sources of canonical tensors: names and layouts of a Hugging Face checkpoint, from a model in training.

A source is iterated once when a client starts and once in every refit, on all training ranks at the same
time: it may use collectives. Each iteration yields the same names in the same order on every rank; a rank's
owner takes the tensors that it owns and drops the others. It runs in a thread beside the caller's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class WeightSource(Protocol):
    """What a `RefitClient` needs from a training loop."""

    @property
    def rank(self) -> int:
        """This process among the training ranks."""
        ...

    @property
    def world_size(self) -> int:
        """Number of training ranks: all must take part in every iteration."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Canonical names and full tensors, on any device."""
        ...

    def metadata(self) -> dict[str, Any]:
        """What this source is, for logs."""
        ...


class _Distributed:
    """Rank and size of torch's default process group; a single process without one."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class MegatronBridgeSource(_Distributed):
    """Canonical tensors of a Megatron model, through Megatron Bridge's whole export.

    `bridge` is the model's `AutoBridge`; `model` the list of modules that Megatron trains (or one of them).
    """

    def __init__(self, bridge: Any, model: Any) -> None:
        self._bridge = bridge
        self._model = list(model) if isinstance(model, (list, tuple)) else [model]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for chunk in self._model:
            # With overlapped gathering, optimizer.step() leaves parameters stale until the next forward.
            settings = getattr(chunk, "ddp_config", None)
            if getattr(settings, "overlap_param_gather", False):
                chunk.start_param_sync(force_sync=True)
        yield from self._bridge.export_hf_weights(self._model, cpu=True, show_progress=False)

    def metadata(self) -> dict[str, Any]:
        """The model's class, and Megatron's parallel sizes."""
        from megatron.core import parallel_state

        module = self._model[0]
        while hasattr(module, "module"):
            module = module.module
        return {
            "source": "megatron-bridge",
            "model": type(module).__name__,
            "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
            "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
        }


Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class StateDictSource(_Distributed):
    """Canonical tensors of a training loop without Megatron.

    `weights` is a module whose state dict has canonical names, or a callable that returns them in an iterable
    of (name, tensor) or a mapping. It is called in every iteration, on all ranks. Tensors that are sharded as
    `DTensor` (FSDP2) are gathered, which is a collective.
    """

    def __init__(self, weights: torch.nn.Module | Callable[[], Weights]) -> None:
        if isinstance(weights, torch.nn.Module):
            self._weights: Callable[[], Weights] = weights.state_dict
        elif callable(weights):
            self._weights = weights
        else:
            kind = type(weights).__name__
            raise TypeError(f"a state-dict source takes a module, or a callable that returns tensors; not {kind}")
        self._name = type(weights).__name__

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = self._weights()
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def metadata(self) -> dict[str, Any]:
        """The class of what was given."""
        return {"source": "state-dict", "model": self._name}
