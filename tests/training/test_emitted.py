"""The changed set that training ranks emit, on real models: exactly what differs, once, in the right encoding.

References are two exports by the Bridge, and tensors assembled by hand from all ranks' shards.
"""

import itertools
import json

import pytest
import torch
from emitted import assembled_by_hand, run_refits
from testbed.checkpoint import make_nemotron_h, make_qwen3, make_qwen3_moe

SMALL = {"layers": 2, "vocab": 128, "hidden": 64, "head_dim": 16}
ONE, TP2, EP2, PP2 = {}, {"tensor_parallel": 2}, {"expert_parallel": 2}, {"pipeline_parallel": 2}
ETP1 = TP2 | EP2 | {"expert_tensor_parallel": 1}
PADDED = 128


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "dense": make_qwen3(folder / "dense", intermediate=96, **SMALL),
        "tied": make_qwen3(folder / "tied", tied=True, intermediate=96, **SMALL),
        "experts": make_qwen3_moe(folder / "experts", experts=4, moe_intermediate=32, **SMALL),
        "squeezed": make_qwen3_moe(folder / "squeezed", experts=4, moe_intermediate=1, **SMALL),
        "hybrid": make_nemotron_h(folder / "hybrid", pattern="M*E-"),
        "padded": make_qwen3(folder / "padded", intermediate=96, **SMALL | {"vocab": 130}),
    }


RESIDUAL = {
    "dense": {"QKVMapping"},
    "tied": {"QKVMapping", "tied embedding"},
    "experts": {"QKVMapping"},
    "hybrid": {"QKVMapping", "MambaInProjMapping", "MambaConv1dMapping", "a buffer, not a parameter"},
    "padded": {"QKVMapping", "vocabulary padding"},
}


def check_emitted(old, new, items, residual, mode):
    """Every element that differs is named once, and old bits with the entries are the new bits."""
    named = {name: torch.zeros(len(bits), dtype=torch.int64) for name, bits in new.items()}
    result = {name: bits.clone() for name, bits in old.items()}
    for name, encoding, positions, values in items:
        wanted = "overwrite" if mode == "overwrite" or name in residual else "xor"
        assert encoding == wanted, name
        named[name][positions] += 1
        result[name][positions] = result[name][positions] ^ values if encoding == "xor" else values
    for name, bits in new.items():
        differs = (old[name] != bits).any(dim=1)
        assert torch.equal(named[name] == 1, differs) and int(named[name].max()) <= 1, name
        assert torch.equal(result[name], bits), name


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *itertools.product(["dense", "tied"], [ONE, TP2, PP2]),
        *itertools.product(["experts"], [ONE, TP2, EP2, PP2, ETP1]),
        *itertools.product(["hybrid"], [ONE, TP2, EP2]),
        ("squeezed", EP2),
        ("padded", TP2),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "dp2",
)
def test_the_emitted_set_is_the_difference(team, checkpoints, model, layout):
    checkpoint = checkpoints[model]
    padded = PADDED if model == "padded" else None
    one, two = team.run(run_refits, str(checkpoint), layout, padded, {})
    residual, sizes = one["residual"], {name: bits.numel() for name, bits in one["exports"][0].items()}
    if model in RESIDUAL:
        assert set(one["reasons"]) == RESIDUAL[model]
    assert residual == two["residual"] and one["totals"] == two["totals"]
    start, middle, end = one["exports"]
    emitted = [[*mine, *other] for mine, other in zip(one["items"], two["items"], strict=True)]
    check_emitted(start, middle, emitted[0], residual, "mixed")
    check_emitted(middle, end, emitted[1], residual, "overwrite")
    check_emitted(middle, end, emitted[2], residual, "mixed")
    assert emitted[3] == [], "nothing has changed since the commit"
    assert sorted(name for name, *_ in emitted[4]) == sorted(end)
    for name, encoding, positions, values in emitted[4]:
        assert encoding == "dense"
        assert torch.equal(positions, torch.arange(len(end[name])))
        assert torch.equal(values, end[name]), name
    if model in ("dense", "tied", "experts", "padded"):
        config = json.loads((checkpoint / "config.json").read_text())
        for number, export in enumerate(one["exports"]):
            by_hand = assembled_by_hand([one["shards"][number], two["shards"][number]], config, layout)
            assert by_hand.keys() == export.keys()
            assert all(torch.equal(by_hand[name], export[name]) for name in export)
    total = sum(sizes.values())
    assert one["baseline_bytes"] + two["baseline_bytes"] <= 1.05 * total
    assert one["totals"][0]["bytes"] == total
    assert sum(len(positions) for _, _, positions, _ in emitted[0]) == one["totals"][0]["changed"]
    assert min(one["payloads"][0] + two["payloads"][0], 3) == 3, "many buckets occur"


def test_residual_tensors_are_converted_only_when_flagged(team, checkpoints):
    one, _ = team.run(run_refits, str(checkpoints["dense"]), TP2, None, {})
    converted = [totals["residual_tensors"] for totals in one["totals"]]
    # Of q, k and v in two layers; the last mixed refit finds no flag set, the dense one converts everything.
    assert converted[3] == 0 and converted[4] == 6
    assert all(count in (0, 3, 6) for count in converted)


def test_a_file_backed_baseline_emits_the_same(team, checkpoints, tmp_path):
    arguments = (str(checkpoints["experts"]), TP2, None)
    memory = team.run(run_refits, *arguments, {})
    files = team.run(run_refits, *arguments, {"baseline_folder": str(tmp_path), "threads": 1})
    for one, other in zip(memory, files, strict=True):
        assert one["totals"][0]["changed"] == other["totals"][0]["changed"]
        for mine, same in zip(itertools.chain(*one["items"]), itertools.chain(*other["items"]), strict=True):
            assert mine[:2] == same[:2] and torch.equal(mine[2], same[2]) and torch.equal(mine[3], same[3])
    assert list(tmp_path.iterdir()) == []
