"""How many threads compare and encode on one training rank."""

import os
import socket
from collections.abc import Mapping, Sequence

from dcr_training.ranks import Ranks

Place = tuple[str, frozenset[int]]
"""A rank's host, and the cores that it may use."""


def share_of_cores(ranks: Ranks) -> int:
    """This rank's share of the cores that it may use, at least 1; all ranks must call it."""
    place = socket.gethostname(), frozenset(os.sched_getaffinity(0))
    return share(ranks.rank, ranks.gather(place), os.environ)


def share(rank: int, places: Sequence[Place], environ: Mapping[str, str]) -> int:
    """A rank's cores, divided by the ranks on its host: `LOCAL_WORLD_SIZE` where a launcher has set it.

    Ranks that a launcher has bound to other cores than this one's take none of them, and don't count.
    """
    host, cores = places[rank]
    local = [other for name, other in places if name == host]
    told = environ.get("LOCAL_WORLD_SIZE", "")
    count = int(told) if told.isascii() and told.isdigit() else len(local)
    apart = sum(cores.isdisjoint(other) for other in local)
    return max(1, len(cores) // max(1, count - apart))
