"""One training rank of `dcr bench construct --model MODULE:FUNCTION`: direct projection against full conversion.

Modes are the paper's (section 8.3): X projects and sends XOR where it can, P projects and sends overwrites only,
F converts every tensor in full and sends overwrites only. Nothing is sent anywhere: payloads are built and dropped.

`seconds` are those of the slowest rank; `convert_s`, `compare_s`, `encode_s` and `blocked_s` are sums over the ranks,
as bytes and counts are, and stages run beside each other: they do not add up to `seconds`.
"""

import argparse
import hashlib
import importlib
import json
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist

from dcr_training.bridge import MegatronBridgeSource
from dcr_training.client import RefitClient
from dcr_training.config import RefitConfig

MODES = {
    "X": ("direct projection, XOR and overwrites", "mixed"),
    "P": ("direct projection, overwrites only", "overwrite"),
    "F": ("full conversion, overwrites only", "overwrite"),
}

NOTE = "seconds: of the slowest rank; convert_s, compare_s, encode_s, blocked_s: sums over the ranks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="MODULE:FUNCTION that returns (bridge, model) on each rank")
    parser.add_argument("--share", type=float, default=0.01, help="of elements that change between two refits")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    module, _, function = arguments.model.partition(":")
    if not function:
        parser.error(f"{arguments.model!r} is not of the form MODULE:FUNCTION")
    bridge, model = getattr(importlib.import_module(module), function)()
    result = measure(bridge, model, arguments.share, arguments.rounds)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"model": arguments.model, **result}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def measure(bridge: Any, model: Any, share: float, rounds: int) -> dict[str, Any]:
    """Medians of each mode over the rounds; all ranks call it, and get the same."""
    config = RefitConfig(record="unused")
    clients = {
        True: RefitClient(MegatronBridgeSource(bridge, model), config),
        False: RefitClient(MegatronBridgeSource(bridge, model, direct_projection=False), config),
    }
    for client in clients.values():
        client.take_baseline()
    shards = MegatronBridgeSource(bridge, model).tasks()
    seen: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        for modes in (("X", "F"), ("P", None)):
            change(shards, share, f"{number}/{modes}")
            for direct, mode in zip((True, False), modes, strict=True):
                # The other client follows too, so that each is one step behind.
                totals = clients[direct].rehearse(MODES[mode or "F"][1], commit=True)
                if mode and number:  # the first round warms up
                    seen[mode].append(totals)
    for client in clients.values():
        client.close()
    return summary(seen, rounds)


def summary(seen: dict[str, list[dict[str, Any]]], rounds: int) -> dict[str, Any]:
    """What is printed."""
    modes = []
    for mode, totals in seen.items():
        middle = {name: statistics.median(each[name] for each in totals) for name in totals[0]}
        modes.append({"mode": mode, "what": MODES[mode][0], **middle})
    seconds = {each["mode"]: each["seconds"] for each in modes}
    payload = {each["mode"]: each["payload_bytes"] for each in modes}
    return {
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "rounds": rounds,
        "note": NOTE,
        "checkpoint_bytes": modes[0]["bytes"],
        "changed_share": modes[0]["changed"] / modes[0]["elements"],
        "full_over_projected": seconds["F"] / seconds["P"],
        "full_over_mixed": seconds["F"] / seconds["X"],
        "xor_saves": 1.0 - payload["X"] / payload["P"],
        "modes": modes,
    }


@torch.no_grad()
def change(shards: list[Any], share: float, salt: str) -> None:
    """Move this share of each parameter's elements by about a hundredth, the same on all ranks that hold a copy."""
    for task in shards:
        if task is None or task.read is None:
            continue
        digest = hashlib.blake2b(f"{salt}/{task.shard}".encode(), digest_size=7).digest()
        weight = task.read()
        generator = torch.Generator(device=weight.device).manual_seed(int.from_bytes(digest, "big"))
        flat = weight.data.view(-1)
        count = max(1, round(share * flat.numel()))
        where = torch.randint(flat.numel(), (count,), generator=generator, device=weight.device)
        noise = torch.randn(count, generator=generator, device=weight.device)
        flat[where] = (flat[where].float() * (1.0 + 0.01 * noise)).to(flat.dtype)


if __name__ == "__main__":
    sys.exit(main())
