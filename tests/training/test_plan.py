"""What ranks agree on from their accounts of conversion tasks, and what of it is refused."""

import pytest
import torch
from dcr_training.plan import Plan, Told, told
from dcr_training.tasks import ConversionTask

ROWS = {"w": ((4, 6), "torch.bfloat16")}


def shard(task, name, *blocks, shape=(4, 6)):
    """An affine account: blocks of (offset, extent), each of the canonical tensor `name`."""
    made = tuple((name, shape, "torch.bfloat16", offset, extent) for offset, extent in blocks)
    return Told(task, (name,), f"{task}:{blocks}", 8, blocks=made)


def test_tasks_that_are_not_held():
    assert told(None) is None
    there = told(ConversionTask("a", ("x", "y"), None))
    assert there == Told("a", ("x", "y")) and there.shard == ""
    held = told(ConversionTask("a", ("x",), lambda: torch.zeros(3, dtype=torch.bfloat16), None, "why", "a#0"))
    assert (held.shard, held.nbytes, held.reason, held.blocks) == ("a#0", 6, "why", ())
    plan = Plan([[None, there], [None, there]])
    assert plan.residual == {0: "no training rank holds its parameter", 1: "no training rank holds its parameter"}
    with pytest.raises(ValueError, match=r"have \[1, 2\] conversion tasks; all must have the same"):
        Plan([[there], [there, there]])


def test_wrong_shapes():
    rows = shard("a", "w", ((0, 0), (4, 6)))
    gone = shard("b", "v", ((0, 0), (4, 6)))
    plan = Plan([[rows, gone, shard("c", "u", ((0, 0), (4, 6)))]])
    catalog = {"w": ((6, 4), "torch.bfloat16"), "u": ((4, 6), "torch.bfloat16")}
    assert plan.wrong_shapes(catalog) == {
        0: "`w` is [6, 4], not the shards' [4, 6]",
        1: "`v` is not among the converted tensors",
    }
    plan.demote({0: "known", 1: "known"})
    assert plan.wrong_shapes(catalog) == {}


def test_unexplained_tensors():
    plan = Plan([[shard("a", "w", ((0, 0), (4, 6)))]])
    assert not plan.unexplained(["w"]) and plan.unexplained(["w", "v"])
    plan.produced(0, "v")
    assert not plan.unexplained(["w", "v"])
    assert plan.residual == {0: "its conversion also gives `v`"}


def test_copies_and_shards_cover():
    halves = [shard("a", "w", ((0, 3 * part), (4, 3))) for part in (0, 0, 1, 1)]
    assert Plan([[half] for half in halves]).uncovered(ROWS) is None
    uneven = [shard("a", "w", ((0, 0), (3, 6))), shard("a", "w", ((3, 0), (1, 6))), shard("a", "w", ((4, 0), (0, 6)))]
    assert Plan([[each] for each in uneven]).uncovered(ROWS) is None
    scalar = shard("a", "s", ((), ()), shape=())
    assert Plan([[scalar], [scalar]]).uncovered({"s": ((), "torch.bfloat16")}) is None


def test_a_gap_is_told():
    plan = Plan([[shard("a", "w", ((0, 0), (2, 6)))], [None]])
    says = "its shards cover 12 of 24 elements; they are held by training ranks [0], the others have none of it"
    assert plan.uncovered(ROWS) == f"tensor `w`: {says}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((0, 0), (4, 6)), ((0, 0), (2, 6))),
        (((0, 0), (3, 6)), ((2, 0), (2, 6))),
        (((0, 0), (3, 6)), ((1, 0), (3, 6))),
        # As many elements as the tensor has, but some twice.
        (((0, 0), (2, 6)), ((1, 0), (2, 6))),
    ],
)
def test_an_overlap_is_told(one, other):
    reason = Plan([[shard("a", "w", one)], [shard("a", "w", other)]]).uncovered(ROWS)
    assert reason.startswith("tensor `w`: the blocks of ") and "overlap" in reason
    for rank, (offset, extent) in enumerate((one, other)):
        assert f"`a` on training rank {rank} (at {list(offset)}, {list(extent)} elements)" in reason


def test_the_same_block_of_two_tasks_is_told():
    halves = [((0, 0), (2, 6)), ((2, 0), (2, 6))]
    plan = Plan([[shard("a", "w", *halves), shard("b", "w", halves[1])]])
    assert set(plan.residual.values()) == {"several tasks convert to `w`"}
    # Were they not residual for what they name, their blocks would still tell.
    first, second = shard("a", "w", *halves), shard("b", "w", halves[1])
    plan = Plan([[first, Told("b", ("v",), "b:", 8, blocks=second.blocks)]])
    reason = plan.uncovered(ROWS)
    assert "`a` on training rank 0" in reason and "`b` on training rank 0" in reason and "overlap" in reason


def test_one_block_twice_in_a_task_is_told():
    plan = Plan([[shard("a", "w", ((0, 0), (4, 6)), ((0, 0), (4, 6)))]])
    assert "overlap" in plan.uncovered(ROWS)
