"""Megatron Bridge as a source: local shards of affine tasks, and the Bridge's own conversion for the rest."""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from dcr_training.sources import Distributed
from dcr_training.tasks import ConversionTask, Surroundings, describe

EXPORT_HOOK = "maybe_modify_converted_hf_weight"


class MegatronBridgeSource(Distributed):
    """Canonical tensors of a Megatron model, through Megatron Bridge.

    `bridge` is the model's `AutoBridge`; `model` the list of modules that Megatron trains (or one of them).
    With `direct_projection` (the default), owners compare their local shards of affine conversion tasks in place
    and only residual tasks are converted; without, every tensor is converted in full in every refit.
    `project_vocabulary` also projects embeddings and heads that are neither tied nor padded.
    """

    def __init__(
        self, bridge: Any, model: Any, *, direct_projection: bool = True, project_vocabulary: bool = True
    ) -> None:
        self._bridge = bridge
        self._model = list(model) if isinstance(model, (list, tuple)) else [model]
        # Bridges that do not tell their tasks are converted in full.
        self.direct_projection = direct_projection and hasattr(bridge, "get_conversion_tasks")
        self._project_vocabulary = project_vocabulary
        self._tasks: list[Any] = []

    @property
    def overwrite_only(self) -> bool:
        """Converted tensors are always overwritten (mode F of the paper's section 8.3)."""
        return not self.direct_projection

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.refresh()
        yield from self._bridge.export_hf_weights(self._model, cpu=False, show_progress=False)

    def refresh(self) -> None:
        """Bring parameters up to date; all ranks call it before shards are read."""
        for chunk in self._model:
            # With overlapped gathering, optimizer.step() leaves parameters stale until the next forward.
            settings = getattr(chunk, "ddp_config", None)
            if getattr(settings, "overlap_param_gather", False):
                chunk.start_param_sync(force_sync=True)

    def tasks(self) -> list[ConversionTask | None]:
        """The conversion tasks, in the same order on all ranks; all ranks call it. None for what is never exported."""
        self._tasks = list(self._bridge.get_conversion_tasks(self._model))
        surroundings = Surroundings(
            self._has_export_hook(), self._is_tied(), self._vocabulary(), self._project_vocabulary
        )
        return [None if task is None else describe(task, surroundings) for task in self._tasks]

    @property
    def dependencies_known(self) -> bool:
        """Whether it is known which canonical tensors each task converts to."""
        return not self._has_export_hook()

    def adapters(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters that the Bridge merges into others on export: any change concerns every adapted task."""
        found = []
        for number, chunk in enumerate(self._model):
            named = chunk.named_parameters() if isinstance(chunk, torch.nn.Module) else ()
            found += [(f"{number}.{name}", weight) for name, weight in named if ".adapter." in name]
        return found

    def convert(self, selected: Collection[int] | None) -> Iterator[tuple[int | None, str, torch.Tensor]]:
        """The Bridge's conversion of the tasks with these indices (None: of all), the same on all ranks.

        Yields the task's index, where it can be told, the canonical name, and the full tensor.
        """
        indices = range(len(self._tasks)) if selected is None else sorted(selected)
        tasks = _Watched((index, self._tasks[index]) for index in indices if self._tasks[index] is not None)
        if not len(tasks):
            return
        exported = self._bridge.export_hf_weights(self._model, cpu=False, show_progress=False, conversion_tasks=tasks)
        for name, tensor in exported:
            yield tasks.current, name, tensor

    def metadata(self) -> dict[str, Any]:
        """The model's class, and Megatron's parallel sizes."""
        from megatron.core import parallel_state

        return {
            "source": "megatron-bridge",
            "model": type(self._module()).__name__,
            "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
            "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
        }

    def _module(self) -> Any:
        module = self._model[0]
        while hasattr(module, "module"):
            module = module.module
        return module

    def _has_export_hook(self) -> bool:
        from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

        impl = type(self._bridge._model_bridge)
        return getattr(impl, EXPORT_HOOK, None) is not getattr(MegatronModelBridge, EXPORT_HOOK, None)

    def _vocabulary(self) -> int | None:
        config = getattr(getattr(self._bridge, "hf_pretrained", None), "config", None)
        return getattr(getattr(config, "text_config", config), "vocab_size", None)

    def _is_tied(self) -> bool:
        module = self._module()
        config = getattr(module, "config", None)
        own = bool(getattr(module, "share_embeddings_and_output_weights", False))
        return bool(getattr(config, "share_embeddings_and_output_weights", own)) or own


class _Watched(list):
    """Tasks that know which of them is being converted: the Bridge takes one, yields its tensors, takes the next."""

    def __init__(self, tasks: Iterator[tuple[int, Any]]) -> None:
        pairs = list(tasks)
        super().__init__(task for _, task in pairs)
        self._indices = [index for index, _ in pairs]
        self._at: int | None = None
        self._yielded = False

    def __iter__(self) -> Iterator[Any]:
        for at, task in enumerate(super().__iter__()):
            self._at = at
            yield task

    @property
    def current(self) -> int | None:
        """The index of the task whose tensor was just yielded; None where the Bridge has read ahead."""
        first, self._yielded = not self._yielded, True
        if self._at is None or (first and len(self) > 1 and self._at == len(self) - 1):
            self._at = None
            return None
        return self._indices[self._at]
