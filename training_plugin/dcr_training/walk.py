"""Iterations of one training rank: of its source, in step with the other ranks, and of its own shards alone."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from dcr_training.config import RefitConfig
from dcr_training.errors import RefitError
from dcr_training.prefetch import Chunk, End, Prefetch
from dcr_training.ranks import Failure, Ranks, failure_of, told

SLICE_S = 0.25
"""Waits are cut into slices, so that Ctrl-C and other ranks' news get through."""

Consume = Callable[[Chunk], Failure | None]
Reads = Iterable[tuple[str, Callable[[], torch.Tensor]]]
"""Names of local shards, and what reads each."""


class Walks:
    """The iterations of one rank. `fail` ends the running attempt for a reason, so that other ranks hear of it."""

    def __init__(self, ranks: Ranks, config: RefitConfig, fail: Callable[[str], None]) -> None:
        self.waited_s = 0.0
        """Seconds that this rank has waited for its source."""
        self._ranks = ranks
        self._config = config
        self._fail = fail
        self._count = 0

    def together(
        self,
        source: Callable[[], Iterable[Any]],
        wanted: Callable[[str], bool],
        consume: Consume,
        *,
        first: Callable[[], Failure | None] | None = None,
        failure: Failure | None = None,
    ) -> Failure | None:
        """Iterate a source to its end, on this rank as on all others, even when `consume` has failed.

        `first` is done beside the beginning of the iteration.
        """
        self._count += 1
        stream = Prefetch(_begun(source), wanted, self._config.chunk_bytes)
        if first is not None and failure is None:
            failure = self._guarded(first)
        return self._consume(stream, consume, f"walk-{self._count}", failure)

    def alone(self, reads: Reads, consume: Consume) -> Failure | None:
        """Read local shards in chunks of host memory: the next is copied while `consume` works on the last."""
        return self._consume(Prefetch(_read(reads), lambda _: True, self._config.chunk_bytes), consume, None, None)

    def _consume(
        self, stream: Prefetch, consume: Consume, topic: str | None, failure: Failure | None
    ) -> Failure | None:
        """Take all chunks; with a topic, ranks walk together and hear of each other's failures."""
        count, give_up_at = 0, None
        began = time.monotonic()
        try:
            while True:
                item = stream.next(SLICE_S)
                if item is None:
                    news = self._ranks.heard(topic) if topic and give_up_at is None else None
                    if news:
                        give_up_at = time.monotonic() + self._config.source_grace_s
                    if give_up_at is not None and time.monotonic() > give_up_at:
                        hangs = Failure(self._ranks.rank, "its source hangs", kind="abandoned", count=count)
                        return failure or hangs
                    continue
                self.waited_s += time.monotonic() - began if topic else 0.0
                if give_up_at is not None:
                    give_up_at = time.monotonic() + self._config.source_grace_s
                if isinstance(item, End):
                    return failure if item.error is None else self._ended(item, topic)
                count = item.count
                if failure is None:
                    failure = self._guarded(consume, item)
                    if failure is not None:
                        self._fail(failure.reason)
                began = time.monotonic()
        finally:
            stream.drop()

    def _guarded(self, call: Callable[..., Failure | None], *chunk: Chunk) -> Failure | None:
        """What a consumer raises is this rank's failure: the other ranks wait for it in collectives that follow."""
        try:
            return call(*chunk)
        except Exception as error:
            names = [name for each in chunk for name in each.names]
            if len(names) < 2:
                return failure_of(self._ranks.rank, error, tensor=names[0] if names else None)
            reason = f"tensors `{names[0]}` to `{names[-1]}`: {told(error)}"
            return Failure(self._ranks.rank, reason, getattr(error, "tensor", None))

    def _ended(self, end: End, topic: str | None) -> Failure:
        """The failure of an iteration that has raised."""
        failure = failure_of(self._ranks.rank, end.error, tensor=end.tensor)
        if topic and not end.complete:
            # The source was left in the middle: other ranks may wait for this one in its collectives.
            reason = f"the weight source failed after {end.count} tensors: {failure.reason}"
            failure = replace(failure, reason=reason, kind="source", count=end.count)
            self._ranks.announce(topic, f"training rank {failure.rank}: {reason}")
        self._fail(failure.reason)
        return failure


def _begun(source: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Begins the iteration where it is iterated, so that what this raises is the source's failure."""
    yield from source()


def _read(reads: Reads) -> Iterator[tuple[str, torch.Tensor]]:
    for name, read in reads:
        try:
            tensor = read()
        except Exception as error:
            reason = f"tensor `{name}`: its shard can't be read: {told(error)}"
            raise RefitError(reason, tensor=name) from error
        yield name, tensor
