"""Conversion tasks of Megatron Bridge: which ones are affine, and the index map of each (section 4.2, appendix A.1).

A task is decided on by its mapping class and its metadata alone; no model is named here. What is not known for
certain to be affine is residual, and goes through the Bridge's own conversion.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dcr_training import native

ADAPTER = "adapter"
"""Reason of tasks that adapters are merged into on export."""


@dataclass(frozen=True)
class ConversionTask:
    """One conversion task as this rank sees it. Tasks have the same index on all ranks."""

    name: str
    """Global parameter name."""
    names: tuple[str, ...]
    """Canonical tensors that its mapping names."""
    read: Callable[[], torch.Tensor] | None
    """This rank's shard as it is now; None where another rank holds the parameter."""
    projection: Any = None
    """The index map of an affine task, a `dcr._native.Projection`; None for a residual one."""
    reason: str = ""
    """Why it is residual."""
    shard: str = ""
    """Which of the task's shards this rank holds: copies of one shard have the same name on all ranks."""


@dataclass(frozen=True)
class Surroundings:
    """What decides on tasks besides the tasks themselves."""

    export_hook: bool = False
    """The model's bridge postprocesses converted tensors (`maybe_modify_converted_hf_weight`)."""
    tied: bool = False
    """Embedding and output head are one tensor."""
    vocabulary: int | None = None
    """Rows of embedding and head in the checkpoint, where they are known: Megatron may hold more."""
    project_vocabulary: bool = True
    """Project embeddings and heads that are neither tied nor padded; the paper's own integration does not."""


def describe(task: Any, surroundings: Surroundings) -> ConversionTask:
    """This rank's view of one of the Bridge's `WeightConversionTask`s."""
    hf_param = task.mapping.hf_param
    names = (hf_param,) if isinstance(hf_param, str) else tuple(hf_param.values())
    if task.megatron_module is None or task.param_weight is None:
        return ConversionTask(task.global_param_name, names, None)
    projection, reason = None, _residual(task, surroundings)
    if not reason:
        try:
            projection = _projection(task)
        except Residual as why:
            reason = str(why)
    if projection is None:
        shard = f"{task.global_param_name}#{task.mapping.tp_rank}"
    else:
        offsets = ",".join(f"{name}@{'.'.join(map(str, offset))}" for name, _, _, offset, _ in projection.blocks)
        shard = f"{task.global_param_name}:{offsets}"
    return ConversionTask(task.global_param_name, names, reader(task), projection, reason, shard)


def reader(task: Any) -> Callable[[], torch.Tensor]:
    """The task's parameter as the module has it now: training may have put another one in its place."""
    module, leaf, known = task.megatron_module, task.param_name.rsplit(".", 1)[-1], task.param_weight
    moving = getattr(module, leaf, None) is known

    def read() -> torch.Tensor:
        return getattr(module, leaf) if moving else known

    return read


class Residual(Exception):
    """Why a task is not affine."""


def _residual(task: Any, surroundings: Surroundings) -> str:
    """Why a task is residual whatever its mapping class; empty if nothing speaks against an index map."""
    weight, mapping, name = task.param_weight, task.mapping, task.global_param_name
    vocabulary = _is_vocabulary(task)
    padded = vocabulary and surroundings.vocabulary not in (None, weight.shape[0] * mapping.tp_size)
    casts = getattr(task, "weight_dtype", None) is not None or getattr(mapping, "is_grouped_export", False)
    adapter = getattr(mapping, "is_adapter", False) or ".adapter." in name or ".to_wrap." in name
    against = {
        # First: construction looks at the adapters' own parameters where it finds this reason.
        ADAPTER: adapter,
        "the model's bridge has a custom export hook": surroundings.export_hook,
        "the task has a custom export hook": getattr(task, "export_hook", None) is not None,
        "the Bridge casts or groups it on export": casts,
        "a buffer, not a parameter": not isinstance(weight, torch.nn.Parameter),
        f"stored as {type(weight.data).__name__}": type(weight.data) is not torch.Tensor,
        "tied embedding": vocabulary and surroundings.tied,
        "vocabulary padding": padded,
        "vocabulary": vocabulary and not surroundings.project_vocabulary,
    }
    return next((reason for reason, holds in against.items() if holds), "")


def _is_vocabulary(task: Any) -> bool:
    """Whether the parameter is an embedding or a head over the vocabulary."""
    kinds = [kind.__name__ for kind in type(task.megatron_module).__mro__]
    shared = getattr(task.param_weight, "shared_embedding", False)
    # Megatron's own names of the two modules, the same in every model it builds.
    parts = task.global_param_name.split(".")
    return shared or "VocabParallelEmbedding" in kinds or "word_embeddings" in parts or "output_layer" in parts


def _projection(task: Any) -> Any:
    """The index map of a task; `Residual` where its mapping class has none."""
    mapping, weight = task.mapping, task.param_weight
    shape, dtype = list(weight.shape), str(weight.dtype)
    part, parts = mapping.tp_rank, mapping.tp_size
    make = native.load().Projection
    kind = parallelism(task)
    try:
        if kind == "gated":
            return make.gated(mapping.hf_param["gate"], mapping.hf_param["up"], shape, dtype, part, parts)
        if kind == "replicated" or (kind == "row" and len(shape) == 1):
            return make.whole(mapping.hf_param, shape, dtype)
        if len(shape) > 2:
            raise Residual(f"{kind} with {len(shape)} dimensions")
        return make.split(mapping.hf_param, shape, dtype, 0 if kind == "column" else 1, part, parts)
    except ValueError as error:
        raise Residual(str(error)) from error


def parallelism(task: Any) -> str:
    """ "replicated", "column", "row" or "gated"; `Residual` for any other mapping.

    Classes must match exactly: a subclass may rescale or permute what its parent only moves.
    """
    from megatron.bridge.models.conversion import param_mapping

    mapping, kind = task.mapping, type(task.mapping)
    known = {
        "DirectMapping": "replicated",
        "ReplicatedMapping": "replicated",
        "ColumnParallelMapping": "column",
        "RowParallelMapping": "row",
        "GatedMLPMapping": "gated",
    }
    for name, parallel in known.items():
        if kind is getattr(param_mapping, name, None):
            return parallel
    if kind is not getattr(param_mapping, "AutoMapping", None):
        raise Residual(kind.__name__)
    if mapping.permute_dims is not None:
        raise Residual("AutoMapping that permutes dimensions")
    if not isinstance(mapping.hf_param, str):
        raise Residual("AutoMapping to several tensors")
    try:
        parallel = mapping._detect_parallelism_type(task.megatron_module)
    except (AttributeError, ValueError) as error:
        raise Residual(f"AutoMapping of unknown kind ({type(error).__name__})") from error
    if parallel not in ("replicated", "column", "row"):
        raise Residual(f"AutoMapping that is {parallel}")
    return parallel
