"""Prewarm: a dry run of the native loader that tells what may be sent for each canonical tensor (table A.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from dcr import _native
from torch.utils._python_dispatch import TorchDispatchMode

from dcr_vllm.coverage import Coverage
from dcr_vllm.storage import ResidentStorage

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Torch's dtypes by their safetensors names."""

COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class CanonicalTensor:
    """A tensor of the catalog. `dtype` is its safetensors name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass
class Prewarmed:
    """What prewarm found: class ("xor", "overwrite", "skip", "unsupported") and reason by canonical name.

    `incomplete` is one line about a parameter that the whole catalog leaves out, or None.
    """

    classes: dict[str, tuple[str, str]] = field(default_factory=dict)
    largest: int = 0
    incomplete: str | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, class, reason), as the native receiver takes it."""
        return [(name, kind, reason) for name, (kind, reason) in self.classes.items()]


class DryRunMode(TorchDispatchMode):
    """Records every write into resident storage and performs none of them.

    Everything else runs as usual, so the loader sees ordinary tensors.
    """

    def __init__(self, storage: ResidentStorage, scratch: torch.Tensor) -> None:
        super().__init__()
        self.storage = storage
        self.scratch = scratch.untyped_storage()._cdata
        self.copies: list[tuple] = []
        self.writes: list[tuple[str, str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = [tensor for tensor in written_tensors(func, args, kwargs) if self._resident(tensor)]
        if not written:
            return func(*args, **kwargs)
        for tensor in written:
            if func is COPY:
                self._copy(tensor, args[1])
            else:
                name = self._resident(tensor).name
                self.writes.append((str(func), name, tensor.data_ptr(), span(tensor)))
        return written[0]

    def _resident(self, tensor: torch.Tensor):
        if tensor.device.type == "meta" or not tensor.numel():
            return None
        return self.storage.find(tensor.data_ptr())

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        shares = src.untyped_storage()._cdata == self.scratch
        offset = src.storage_offset() * src.element_size() if shares else None
        # The hook sees a broadcast input as torch's copy does: expanded.
        expanded = src.expand_as(dst)
        self.copies.append(
            (
                self._resident(dst).name,
                dst.data_ptr(),
                str(dst.dtype),
                list(dst.shape),
                list(dst.stride()),
                offset,
                str(src.dtype),
                list(expanded.shape),
                list(expanded.stride()),
            )
        )


def written_tensors(func, args, kwargs) -> list[torch.Tensor]:
    """The tensors that an operator's schema says it writes to."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
    return found


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last that a view covers."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def prewarm(
    model: torch.nn.Module, storage: ResidentStorage, catalog: Iterable[CanonicalTensor], shards: int = 1
) -> Prewarmed:
    """Runs the loader over every tensor of the catalog without writing, and classifies their paths.

    A loader that raises makes its tensor "unsupported", with the loader's own words; so does one that cannot take
    all of it among `shards` ranks.
    """
    found = Prewarmed()
    coverage = Coverage(shards)
    runs, refused = [], {}
    for tensor in catalog:
        if tensor.dtype not in DTYPES:
            refused[tensor.name] = f"dtype {tensor.dtype} is not known to torch here"
            continue
        found.largest = max(found.largest, tensor.nbytes)
        found.classes[tensor.name] = ("skip", "")
        run = dry_run(model, storage, tensor)
        if isinstance(run, str):
            refused[tensor.name] = run
            continue
        runs.append(run)
        _, _, _, copies, writes, _ = run
        if reason := coverage.add(tensor.shape, copies, writes):
            refused[tensor.name] = reason
    for name, kind, reason in _native.classify(runs):
        found.classes[name] = (kind, reason)
    for name, reason in refused.items():
        found.classes[name] = ("unsupported", reason)
    if moved := storage.moved(model):
        raise RuntimeError(moved)
    found.incomplete = coverage.incomplete(model)
    return found


def dry_run(model: torch.nn.Module, storage: ResidentStorage, tensor: CanonicalTensor) -> tuple | str:
    """One tensor's record for `classify`, or the loader's complaint in one line."""
    # Meta tensors cost no memory; a loader that looks at values needs real ones.
    complaint = ""
    for device in ("meta", "cpu"):
        scratch = torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype], device=device)
        mode = DryRunMode(storage, scratch)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(mode)
                loaded = model.load_weights([(tensor.name, scratch)])
        except Exception as error:
            complaint = f"the native loader refuses it with shape {list(tensor.shape)}: {one_line(error)}"
            continue
        reported = bool(loaded)
        shape = list(tensor.shape)
        return (tensor.name, shape, tensor.dtype, mode.copies, mode.writes, reported)
    return complaint


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
