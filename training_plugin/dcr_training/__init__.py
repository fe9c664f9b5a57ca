"""dcr for trainers: the sources of canonical tensors and the client that refits rollout servers with them.

    from dcr_training import MegatronBridgeSource, RefitClient, RefitConfig

    client = RefitClient(MegatronBridgeSource(bridge, model), RefitConfig.from_environment())
    client.initialize()              # on every training rank, once
    optimizer.step()
    report = client.refit()          # on every training rank, after every step

Megatron Bridge's own training loop takes `dcr_training.megatron.RefitCallback` instead.
"""

import importlib

_WHERE = {
    "MegatronBridgeSource": "bridge",
    "Part": "parts",
    "RefitClient": "client",
    "RefitConfig": "config",
    "RefitError": "errors",
    "RefitReport": "report",
    "StateDictSource": "sources",
    "WeightSource": "sources",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    # Programs that only read reports or write configurations need not import torch.
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
