"""Intercepting the native loader's final copies: torch's dispatcher through a C++ hook, or a Python dispatch mode.

The C++ hook implements `aten::copy_` for a dispatch key that is otherwise unused, and includes the key in this
thread's dispatch set only while an interceptor is at work: nothing is slower outside, and other threads see nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from dcr import _native
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger("vllm.dcr")

DISPATCH_KEY = "DeferredInit"
COPY = torch.ops.aten.copy_.default
FOREACH_COPY = torch.ops.aten._foreach_copy_.default


class CopyDispatchMode(TorchDispatchMode):
    """The fall-back: hands every `copy_` of this thread to the interceptor. Eight times slower than the C++ hook."""

    def __init__(self, interceptor: _native.Interceptor) -> None:
        super().__init__()
        self.interceptor = interceptor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is COPY and self._handled(args[0], args[1]):
            return args[0]
        if func is FOREACH_COPY:
            # The C++ hook sees the single copies; a mode sees the list.
            for dst, src in zip(args[0], args[1], strict=True):
                if not self._handled(dst, src):
                    dst.copy_(src)
            return None
        return func(*args, **(kwargs or {}))

    def _handled(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        try:
            src = src.expand_as(dst)
        except RuntimeError:
            # Shapes that cannot be broadcast are torch's to complain about.
            return False
        return self.interceptor.on_copy(*_view(dst), *_view(src))


def _view(tensor: torch.Tensor) -> tuple[int, str | None, bool, list[int], list[int]]:
    on_cpu = tensor.device.type == "cpu"
    address = 0 if tensor.device.type == "meta" else tensor.data_ptr()
    # A lazily negated view holds other values than its bits: refused, as is a dtype that dcr does not know.
    dtype = None if tensor.is_neg() else str(tensor.dtype)
    return address, dtype, on_cpu, list(tensor.shape), list(tensor.stride())


@functools.cache
def copy_hook() -> str:
    """ "cpp" or "python": which hook this process uses, decided once. `DCR_COPY_HOOK` forces one.

    Raises RuntimeError when the forced one cannot be used; without it the other is, and a warning says why.
    """
    wanted = os.environ.get("DCR_COPY_HOOK") or None
    if wanted == "python":
        return wanted
    if wanted not in (None, "cpp"):
        raise RuntimeError(f"DCR_COPY_HOOK is {wanted!r}; set it to cpp or python, or unset it")
    reason = _install()
    if reason is None:
        return "cpp"
    if wanted == "cpp":
        raise RuntimeError(f"DCR_COPY_HOOK asks for the C++ copy_ hook, which cannot be used: {reason}")
    logger.warning("dcr: the C++ copy_ hook cannot be used (%s); the slower Python dispatch mode is", reason)
    return "python"


def _install() -> str | None:
    """Installs the C++ hook; None when it is installed, else the reason in one line."""
    try:
        # Key numbers move between releases of torch, so the number is read and never compiled in.
        number = int(torch._C._dispatch_key_parse(DISPATCH_KEY))
        with _INSTALLING:
            if (reason := _native.install_copy_hook(DISPATCH_KEY, number)) is not None:
                return reason
            if not _LIBRARIES:
                _fall_through()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


_INSTALLING = threading.Lock()
_LIBRARIES: list[torch.library.Library] = []


def _fall_through() -> None:
    """All other operators pass the key by. The registration lives as long as the library object."""
    library = torch.library.Library("_", "IMPL", DISPATCH_KEY)
    library.fallback(torch.library.fallthrough_kernel)
    _LIBRARIES.append(library)


@contextmanager
def intercepting(interceptor: _native.Interceptor) -> Iterator[None]:
    """Hands every `copy_` of this thread to the interceptor until the block ends."""
    if copy_hook() == "python":
        with CopyDispatchMode(interceptor):
            yield
        return
    with _native.CopyHookGuard(interceptor):
        yield
