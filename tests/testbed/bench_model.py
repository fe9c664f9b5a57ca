"""The model of `make bench`: a random Qwen3-MoE of about 230 MB on the CPU, tensor-parallel over all ranks.

dcr bench construct --model testbed.bench_model:build
"""

import os
import tempfile
from pathlib import Path
from typing import Any

LARGE = {"hidden": 512, "layers": 8, "experts": 16, "moe_intermediate": 512, "vocab": 8192, "heads": 8, "head_dim": 64}

TINY = {"hidden": 64, "layers": 1, "experts": 4, "moe_intermediate": 32, "vocab": 128, "heads": 4, "head_dim": 16}


def build() -> tuple[Any, list[Any]]:
    """The Bridge and its model, on each rank."""
    return _build(LARGE)


def build_tiny() -> tuple[Any, list[Any]]:
    """A model that is large enough to see that the measurement works."""
    return _build(TINY)


def _build(shape: dict[str, int]) -> tuple[Any, list[Any]]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch.distributed as dist

    import testbed.megatron_cpu  # noqa: F401 (makes megatron.bridge importable)
    from testbed.checkpoint import make_qwen3_moe
    from testbed.megatron_cpu import model as megatron

    megatron.initialize(int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        if dist.get_rank() == 0:
            make_qwen3_moe(Path(folder[0]), **shape)
        dist.barrier()
        built = megatron.build(folder[0])
        dist.barrier()
    return built
