"""What training ranks do in the tests of emitted sets, and references for it that know nothing of dcr."""

import hashlib
from typing import Any

import torch

Bits = dict[str, torch.Tensor]
"""Flat stored bits by name, as bytes of shape [elements, width]."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The stored bits of each element: uint8 of shape [elements, width]."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).reshape(-1, tensor.element_size()).clone()


def perturb(tasks: list[Any], salt: str, share: float = 0.01) -> None:
    """Change about this share of every second parameter, the same on all ranks that hold a copy.

    Signs of zero, NaN payloads and single low bits are among the changes. Whether ranks hold copies is asked of
    Megatron's own mark, not of the code under test.
    """
    for task in tasks:
        if task is None or task.param_weight is None:
            continue
        weight = task.param_weight
        part = task.mapping.tp_rank if getattr(weight, "tensor_model_parallel", False) else 0
        digest = hashlib.blake2b(f"{salt}/{task.global_param_name}/{part}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        if digest[0] % 2:
            continue
        flat = weight.data.view(-1)
        words = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
        picked = torch.rand(flat.numel(), generator=generator) < share
        picked[: min(3, flat.numel())] = True
        words[picked] ^= 1 << int(torch.randint(0, 3, (1,), generator=generator))
        if flat.numel() > 2 and flat.dtype == torch.bfloat16:
            words[0] ^= -0x8000
            words[1] = 0x7FC0 | (digest[1] & 0x3F) | 1


def run_refits(rank: int, checkpoint: str, layout: dict, vocabulary_multiple: int | None, options: dict) -> dict:
    """Two rehearsed refits, the second after two changes, and a dense one; all that they emitted on this rank."""
    import dcr._native as native
    from dcr_training import MegatronBridgeSource, RefitClient, RefitConfig
    from testbed.megatron_cpu import model as megatron

    megatron.initialize_groups(**layout)
    bridge, model = megatron.build(checkpoint, vocabulary_multiple=vocabulary_multiple)
    tasks = bridge.get_conversion_tasks(model)
    source = MegatronBridgeSource(bridge, model)
    sizes = {"chunk_bytes": 5000, "bucket_bytes": 20_000, "check_replicas": True, **options}
    client = RefitClient(source, RefitConfig(record="unused", **sizes))
    result: dict[str, Any] = {"exports": [], "shards": [], "items": [], "totals": [], "payloads": []}

    def snapshot() -> None:
        exported = bridge.export_hf_weights(model, cpu=True, show_progress=False)
        result["exports"].append({name: bits(tensor) for name, tensor in exported})
        held = [task for task in tasks if task is not None and task.param_weight is not None]
        result["shards"].append(
            {task.global_param_name: (task.param_weight.detach().clone(), task.mapping.tp_rank) for task in held}
        )

    def emit(mode: str, commit: bool) -> None:
        result["totals"].append(client.rehearse(mode, commit=commit, keep=True))
        payloads = client.rehearsed()
        decoded = [[told(item) for item in native.decode_payload(payload)] for payload in payloads]
        result["items"].append([item for items in decoded for item in items])
        result["payloads"].append(len(payloads))

    client.take_baseline()
    plan = client.plan
    result["residual"] = {name for index in plan.residual for name in plan.names[index]}
    result["reasons"] = sorted(set(plan.residual.values()))
    snapshot()
    perturb(tasks, "one")
    snapshot()
    emit("mixed", commit=True)
    perturb(tasks, "two")
    perturb(tasks, "three")
    snapshot()
    # Twice: what was found, but not committed, does not count.
    emit("overwrite", commit=False)
    emit("mixed", commit=True)
    emit("mixed", commit=True)
    emit("dense", commit=False)
    result["baseline_bytes"] = client.baseline_bytes
    client.close()
    return result


def told(item: Any) -> tuple[str, str, torch.Tensor, torch.Tensor]:
    """Name, encoding, flat positions, and values as bytes of shape [entries, width]."""
    positions = torch.frombuffer(bytearray(item.positions()), dtype=torch.int64)
    values = torch.frombuffer(bytearray(item.values()), dtype=torch.uint8)
    return item.name, item.encoding, positions, values.reshape(len(positions), -1)


def assembled_by_hand(shards: list[dict[str, tuple[torch.Tensor, int]]], config: dict, layout: dict) -> Bits:
    """Canonical tensors of a Qwen3 or Qwen3-MoE model, from the shards of both ranks, without the Bridge."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    result: Bits = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        result[name] = bits(tensor)

    for name in sorted({name for rank in shards for name in rank}):
        copies = {tp: tensor for rank in shards if name in rank for tensor, tp in [rank[name]]}
        parts = [copies[tp] for tp in sorted(copies)]
        layer = name.split(".")[2] if name.startswith("decoder.layers.") else ""
        prefix = f"model.layers.{layer}."
        if name.endswith("linear_qkv.weight"):
            head = parts[0].shape[0] * len(parts) // (heads + 2 * groups)
            each = torch.cat(parts).reshape(groups, heads // groups + 2, head, -1)
            hidden = each.shape[-1]
            put(prefix + "self_attn.q_proj.weight", each[:, :-2].reshape(-1, hidden))
            put(prefix + "self_attn.k_proj.weight", each[:, -2].reshape(-1, hidden))
            put(prefix + "self_attn.v_proj.weight", each[:, -1].reshape(-1, hidden))
        elif "linear_fc1.weight" in name:
            halves = [part.chunk(2) for part in parts]
            where = prefix + _mlp(name)
            put(where + "gate_proj.weight", torch.cat([gate for gate, _ in halves]))
            put(where + "up_proj.weight", torch.cat([up for _, up in halves]))
        elif "linear_fc2.weight" in name:
            put(prefix + _mlp(name) + "down_proj.weight", torch.cat(parts, dim=1))
        elif name.endswith("linear_proj.weight"):
            put(prefix + "self_attn.o_proj.weight", torch.cat(parts, dim=1))
        elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            put({"e": "model.embed_tokens.weight", "o": "lm_head.weight"}[name[0]], torch.cat(parts))
        else:
            put(_replicated(name, prefix), parts[0])
    return result


def _mlp(name: str) -> str:
    return f"mlp.experts.{name.split('.weight')[1]}." if ".experts." in name else "mlp."


def _replicated(name: str, prefix: str) -> str:
    endings = {
        "linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "q_layernorm.weight": "self_attn.q_norm.weight",
        "k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    if name == "decoder.final_layernorm.weight":
        return "model.norm.weight"
    return next(prefix + canonical for ending, canonical in endings.items() if name.endswith(ending))
