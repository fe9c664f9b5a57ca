"""Importing Megatron Bridge where Transformer Engine is not installed."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

ENGINE = "transformer_engine"


class _StandIn(types.ModuleType):
    """A module whose every public name is an empty `torch.nn.Module` class: good enough to be subclassed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        made = type(name, (torch.nn.Module,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


def import_megatron() -> None:
    """Import megatron-core and then `megatron.bridge`; does nothing where Transformer Engine is installed."""
    if importlib.util.find_spec(ENGINE) is not None:
        return
    # megatron-core compiles its fused functions when they are defined. None is used here, and the compiler's
    # import alone would be a quarter of the time that it takes to start.
    compiler, torch.compile = torch.compile, _not_compiled
    try:
        _import_with_stand_ins()
    finally:
        torch.compile = compiler


def _not_compiled(function: Callable | None = None, **_: object) -> Callable:
    return _not_compiled if function is None else function


def _import_with_stand_ins() -> None:
    # megatron-core looks for the engine in dozens of modules and must not see the stand-in in any of them.
    _import_core_modules_that_look_for_the_engine()
    engine, pytorch = _StandIn(ENGINE), _StandIn(f"{ENGINE}.pytorch")
    engine.pytorch = pytorch
    pytorch.ops = _StandIn(f"{ENGINE}.pytorch.ops")
    stand_ins = {module.__name__: module for module in (engine, pytorch)}
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("megatron.bridge")
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _import_core_modules_that_look_for_the_engine() -> None:
    core = importlib.import_module("megatron.core")
    root = Path(core.__path__[0])
    for path in sorted(root.rglob("*.py")):
        if ENGINE not in path.read_text(encoding="utf-8"):
            continue
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(("megatron.core", *parts)).removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except ImportError:
            # It needs something else that is absent as well; nothing that is used here can import it either.
            continue
