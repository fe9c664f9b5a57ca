"""Cores are divided among the training ranks of a host."""

import pytest
from dcr_training.threads import share

ALL = frozenset(range(16))
LOW, HIGH = frozenset(range(8)), frozenset(range(8, 16))


@pytest.mark.parametrize(
    ("rank", "places", "local_world_size", "threads"),
    [
        (0, [("a", ALL)], "", 16),
        (1, [("a", ALL), ("a", ALL), ("a", ALL), ("b", ALL)], "", 5),
        (3, [("a", ALL), ("a", ALL), ("a", ALL), ("b", ALL)], "", 16),
        (0, [("a", LOW)], "2", 4),
        (0, [("a", ALL), ("a", ALL)], "8", 2),
        (0, [("a", frozenset({3}))] * 4, "", 1),
        (1, [("a", LOW), ("a", HIGH)], "", 8),
        (1, [("a", LOW), ("a", HIGH)], "2", 8),
        (0, [("a", LOW), ("a", LOW), ("a", HIGH), ("a", HIGH)], "4", 4),
        (0, [("a", ALL), ("a", ALL)], "0", 16),
        (0, [("a", ALL), ("a", ALL)], "two", 8),
    ],
)
def test_the_share_of_a_rank(rank, places, local_world_size, threads):
    assert share(rank, places, {"LOCAL_WORLD_SIZE": local_world_size}) == threads
