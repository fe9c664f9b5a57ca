"""Delta construction on one training rank (section 4): the source baseline, and the changed set of a refit.

Ranks move through the same stages. In each, what goes wrong on one rank is kept as its `Failure`, and every rank
still takes part in the collectives that others wait in.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dcr_training import native
from dcr_training.accounts import account_of, catalog_difference, difference, disagreement, nbytes_of, without
from dcr_training.config import RefitConfig
from dcr_training.parts import Part, assemble, described
from dcr_training.plan import Meta, Plan, Told
from dcr_training.prefetch import Chunk
from dcr_training.ranks import Failure, Ranks, attempt, failure_of, first_of
from dcr_training.sources import WeightSource
from dcr_training.tasks import ADAPTER, ConversionTask
from dcr_training.walk import Consume, Walks


class Construction:
    """The owner of one training rank, fed from its source.

    `owner` is a `dcr._native.Owner`. A source that tells conversion tasks (`tasks`, `convert`) is projected
    directly as far as its tasks are affine; any other source is compared as whole canonical tensors.
    """

    def __init__(self, source: WeightSource, config: RefitConfig, ranks: Ranks, owner: Any) -> None:
        self.source: Any = source
        self.config = config
        self.ranks = ranks
        self.owner = owner
        self.plan: Plan | None = None
        """None for a source without conversion tasks."""
        self.catalog: dict[str, Meta] = {}
        """Canonical tensors of the whole model: shape and dtype."""
        self.totals: dict[str, Any] = {}
        """What the last stream of this rank held, and the seconds of its stages."""
        self._walks = Walks(ranks, config, owner.fail)
        self._tasks: list[ConversionTask | None] = []
        self._canonical_owner: dict[str, int] = {}
        self._order: list[tuple[str, Meta]] = []

    # The baseline. Each stage is called on all ranks, which agree on failures after it.

    def baseline_stages(self) -> list[Callable[[], Failure | None]]:
        """The stages of taking the present tensors as the source baseline, in order."""
        return [
            self._tell_tasks,
            self._walk_catalog,
            self._agree_on_catalog,
            self._prove_projections,
            self._assign,
            self._track,
            self._walk_residual,
        ]

    def _tell_tasks(self) -> Failure | None:
        accounts: list[Told | None] | None = None
        known = True

        def tell() -> None:
            nonlocal accounts, known
            if getattr(self.source, "direct_projection", False):
                self.source.refresh()
                self._tasks = self.source.tasks()
                known = bool(self.source.dependencies_known)
                accounts = [account_of(task) for task in self._tasks]

        failure = self._agreed(self._attempt(tell))
        if failure is not None:
            return failure
        everybody = self.ranks.gather(accounts)
        known_to_all = all(self.ranks.gather(known))
        if all(each is None for each in everybody):
            return None
        if None in everybody:
            return self._failure(f"training ranks {without(everybody)} have no conversion tasks, others do")
        try:
            self.plan = Plan(everybody)
        except ValueError as error:
            return self._failure(str(error))
        self.plan.dependencies_known = known_to_all
        return None

    def _walk_catalog(self) -> Failure | None:
        """Learn all canonical tensors, from one full conversion."""
        self._produced: list[tuple[int | None, str]] = []
        self._differences: dict[int, str] = {}
        by_name: dict[str, list[tuple[int, ConversionTask]]] = {}
        odd: dict[str, str] = {}  # told once the source has ended: other ranks wait in its collectives
        if self.plan is not None:
            for index, task in enumerate(self._tasks):
                if task is not None and task.projection is not None and index not in self.plan.residual:
                    for name in task.names:
                        by_name.setdefault(name, []).append((index, task))

        def learn(source: Iterable[Any]) -> Iterable[Any]:
            for item in source:
                if isinstance(item, Part):
                    name, meta = item.name, (tuple(item.shape), str(item.tensor.dtype))
                    if self.catalog.setdefault(name, meta) != meta:
                        odd.setdefault(name, f"tensor `{name}`: its parts belong to {self.catalog[name]} and to {meta}")
                    self._whole = False
                else:
                    name, tensor = item[-2:]
                    self._order.append((name, (tuple(tensor.shape), str(tensor.dtype))))
                    if self.plan is not None:
                        self._produced.append((item[0], name))
                yield item

        def compare(index: int, task: ConversionTask, name: str, tensor: torch.Tensor) -> None:
            reason = difference(task, name, tensor)
            if reason:
                self._differences.setdefault(index, reason)

        def prove(chunk: Chunk) -> Failure | None:
            # The index map was derived from metadata: the Bridge's own conversion of the same shards must agree.
            for name, tensor in chunk.tensors:
                for index, task in by_name[name]:
                    failure = self._attempt(compare, index, task, name, tensor, tensor=task.name)
                    if failure is not None:
                        return failure
            return None

        self._whole = True
        failure = self._walks.together(lambda: learn(self._source(None)), by_name.__contains__, prove)
        if failure is None and odd:
            name, reason = next(iter(odd.items()))
            failure = self._failure(reason, tensor=name)
        return failure

    def _agree_on_catalog(self) -> Failure | None:
        """A tensor that only some ranks yield could be missed by its owner, and would be in no refit."""
        if len(set(self.ranks.gather(_digest(self._order)))) > 1:
            catalogs = self.ranks.gather(self._order)
            for rank, catalog in enumerate(catalogs):
                if catalog != catalogs[0]:
                    return self._failure(catalog_difference(rank, catalog, catalogs[0]))
        self.catalog.update(self._order)
        if len(dict(self._order)) < len(self._order):
            return self._failure("the weight source yields a tensor name twice")
        if not all(self.ranks.gather(self._whole)):
            for rank, catalog in enumerate(self.ranks.gather(self.catalog)):
                for name, meta in catalog.items():
                    if self.catalog.setdefault(name, meta) != meta:
                        mine = self.catalog[name]
                        return self._failure(f"tensor `{name}` is {meta} on training rank {rank} and {mine} here")
        self._order = []
        return None if self.catalog else self._failure("the weight source yields no tensors")

    def _prove_projections(self) -> Failure | None:
        """Tasks whose conversion is not what their index map says become residual, on all ranks."""
        if self.plan is None:
            return None
        produced = self._produced
        if len(set(self.ranks.gather(_digest(produced)))) > 1:
            # All ranks must come to the same plan, also where the Bridge reads ahead on some.
            produced = [pair for each in self.ranks.gather(produced) for pair in each]
        for index, name in produced:
            if index is None:
                self.plan.dependencies_known = False
            else:
                self.plan.produced(index, name)
        if self.plan.unexplained(self.catalog):
            self.plan.dependencies_known = False
        self.plan.demote(self.plan.wrong_shapes(self.catalog))
        for differences in self.ranks.gather(self._differences):
            self.plan.demote(differences)
        reason = self.plan.uncovered(self.catalog)
        return None if reason is None else self._failure(reason)

    def _assign(self) -> Failure | None:
        sizes = {name: nbytes_of(*meta) for name, meta in self.catalog.items()}
        if self.plan is not None:
            self.plan.assign(self.catalog, sizes, self.ranks.size)
            self._canonical_owner = self.plan.canonical_owner
            return None
        shares = [(name, nbytes, list(range(self.ranks.size))) for name, nbytes in sizes.items()]
        owners = native.load().assign_owners(shares, self.ranks.size)
        self._canonical_owner = {name: owner for (name, _, _), owner in zip(shares, owners, strict=True)}
        return None

    def _track(self) -> Failure | None:
        """Take the local shards of affine tasks, and the fingerprints of residual ones, as committed."""
        return self._alone(self._track_owned)

    def _track_owned(self) -> Failure | None:
        owned = {name: (task, residual) for name, task, residual in self._owned_tasks()}

        def track(chunk: Chunk) -> Failure | None:
            for name, host in chunk.tensors:
                task, residual = owned[name]
                call = self.owner.track_flag if residual else self.owner.track
                more = () if residual else ("shard", task.projection)
                failure = self._attempt(call, described(name, host), *more, tensor=name)
                if failure is not None:
                    return failure
            return None

        return self._walks.alone(((name, task.read) for name, (task, _) in owned.items()), track)

    def _walk_residual(self) -> Failure | None:
        """Take the residual tensors, or all of a source without tasks, as committed."""
        overwrite = self.plan is not None or getattr(self.source, "overwrite_only", False)
        role = "residual" if overwrite else "canonical"

        def track(chunk: Chunk) -> Failure | None:
            for name, tensor in chunk.tensors:
                failure = self._attempt(self.owner.track, described(name, tensor), role, tensor=name)
                if failure is not None:
                    return failure
            return None

        return self._walk_canonical(None if self.plan is None else set(self.plan.residual), self._owns_baseline, track)

    # A refit.

    def stream(self, mode: str) -> Failure | None:
        """Compare everything with the baseline and stream what changed, in an attempt that is prepared."""
        self._walks.waited_s, self.totals = 0.0, {}
        refresh = getattr(self.source, "refresh", None)
        failure = None if refresh is None else self._attempt(refresh)
        if self.config.check_replicas:
            differ = self.check_replicas()
            failure = failure or differ
        flags: list[bool] = []
        if self.plan is not None:
            flags = [False] * self.plan.count
            failure = failure or self._alone(lambda: self._flag(flags))
        failure = self._agreed(failure)
        if failure is not None:
            # No rank converts: a source that has failed on one would wait for it on the others.
            self.owner.fail(failure.reason)
            return failure
        selected, required = None, []
        if self.plan is not None:
            selected = self.plan.select(self.ranks.any(flags))
            names = self.plan.selected_names(selected, self.catalog)
            required = [name for name in names if self._owns_baseline(name)]
        wanted = self._owns_baseline
        if mode == "dense":
            required = [name for name in self.catalog if self._owns_canonical(name)]
            selected, wanted = None, self._owns_canonical
        failure = self._walk_canonical(selected, wanted, self._offer_canonical, first=self._offer_shards)
        if failure is not None:
            return failure

        def end() -> None:
            self.totals = {**self.owner.end_stream(required), "convert_s": self._walks.waited_s}

        return self._attempt(end)

    def _flag(self, flags: list[bool]) -> Failure | None:
        """Set this rank's change flags, by task index: whether a residual shard that it looks at has changed."""
        plan = self.plan
        owned = {name: task for name, task, residual in self._owned_tasks() if residual}
        indices = {id(task): index for index, task in enumerate(self._tasks)}

        def look(chunk: Chunk) -> None:
            found = self.owner.flags([described(name, tensor) for name, tensor in chunk.tensors])
            for (name, _), changed in zip(chunk.tensors, found, strict=True):
                index = indices.get(id(owned[name]))
                if index is not None:
                    flags[index] = changed
                elif changed:
                    flags[:] = [each or plan.residual.get(at) == ADAPTER for at, each in enumerate(flags)]

        def consume(chunk: Chunk) -> Failure | None:
            return self._attempt(look, chunk, otherwise="follows")

        return self._walks.alone(((name, task.read) for name, task in owned.items()), consume)

    def _offer_shards(self) -> Failure | None:
        """Compare the owned shards of affine tasks in place."""
        if self.plan is None:
            return None
        shards = [(name, task.read) for name, task, residual in self._owned_tasks() if not residual]
        return self._walks.alone(shards, self._offer)

    def _offer(self, chunk: Chunk) -> Failure | None:
        """Compare tensors of the baseline."""
        tensors = [described(name, tensor) for name, tensor in chunk.tensors]
        return self._attempt(self.owner.offer, tensors, otherwise="follows") if tensors else None

    def _offer_canonical(self, chunk: Chunk) -> Failure | None:
        """Compare residual tensors, and send affine ones whole: those come here in a dense refit only."""
        dense = [described(name, tensor) for name, tensor in chunk.tensors if self._is_affine(name)]
        failure = self._attempt(self.owner.offer_dense, dense, otherwise="follows") if dense else None
        residual = [pair for pair in chunk.tensors if not self._is_affine(pair[0])]
        return failure or self._offer(Chunk(tensors=residual))

    def check_replicas(self) -> Failure | None:
        """Compare fingerprints of all copies of each shard, or of each canonical tensor of a source without tasks."""
        mine: dict[str, bytes] = {}
        held = {task.name: task for task in self._tasks if task is not None and task.read is not None}

        def look(tensors: list[tuple[str, torch.Tensor]]) -> None:
            found = native.load().fingerprints([described(name, tensor) for name, tensor in tensors])
            shards = [held[name].shard if name in held else name for name, _ in tensors]
            mine.update(zip(shards, found, strict=True))

        def look_at_chunk(chunk: Chunk) -> Failure | None:
            return self._attempt(look, chunk.tensors)

        if self.plan is None:
            failure = self._walks.together(lambda: self.source, lambda _: True, look_at_chunk)
        else:
            failure = self._walks.alone([(name, task.read) for name, task in held.items()], look_at_chunk)
        everybody = self.ranks.gather(mine)
        differing = disagreement(everybody)
        if failure is not None or differing is None:
            return failure
        shard, one, other = differing
        name = {task.shard: task.name for task in self._tasks if task is not None}.get(shard, shard)
        reason = f"tensor `{name}`: training ranks {one} and {other} hold copies that differ in their bits"
        return self._failure(reason, tensor=name)

    # Walking the source.

    def _walk_canonical(
        self,
        selected: set[int] | None,
        wanted: Callable[[str], bool],
        consume: Consume,
        first: Callable[[], Failure | None] | None = None,
    ) -> Failure | None:
        """Walk the canonical tensors of these tasks (None: all), and assemble those that come in parts.

        `first` is done beside the beginning of the conversion.
        """
        parts: list[Part] = []

        def collect(chunk: Chunk) -> Failure | None:
            parts.extend(part.with_tensor(part.tensor.clone()) for part in chunk.parts)
            return consume(chunk)

        failure = self._walks.together(lambda: self._source(selected), wanted, collect, first=first)
        if self.plan is not None or not any(self.ranks.gather(bool(parts))):
            return failure
        unknown = next((part.name for part in parts if part.name not in self._canonical_owner), None)
        if failure is None and unknown:
            failure = self._failure(f"tensor `{unknown}` was not there before", tensor=unknown)
        # A rank that has failed has not collected all of its parts.
        failure = self._agreed(failure)
        if failure is not None:
            return failure
        try:
            tensors = assemble(parts, self._canonical_owner, self.ranks)
        except Exception as error:
            if getattr(error, "fatal", False):
                raise
            return self._failed(error)
        return self._alone(lambda: consume(Chunk(tensors=[pair for pair in tensors if wanted(pair[0])])))

    def _source(self, selected: set[int] | None) -> Iterable[Any]:
        """The canonical tensors of these tasks (None: of all, or of a source without tasks)."""
        return self.source if self.plan is None else self.source.convert(selected)

    # What this rank owns.

    def _owned_tasks(self) -> list[tuple[str, ConversionTask, bool]]:
        """The tasks whose local shard this rank compares or looks at: name in the baseline, task, whether residual."""
        if self.plan is None:
            return []
        owned = []
        for index, task in enumerate(self._tasks):
            if task is not None and task.read is not None and self.plan.shard_owner.get(task.shard) == self.ranks.rank:
                owned.append((task.name, task, index in self.plan.residual))
        if ADAPTER in self.plan.residual.values():
            for name, weight in self.source.adapters():
                owned.append((name, ConversionTask(name, (), lambda weight=weight: weight), True))
        return owned

    def _owns_canonical(self, name: str) -> bool:
        # One that was not there before is everybody's: comparing it says so.
        return self._canonical_owner.get(name, self.ranks.rank) == self.ranks.rank

    def _owns_baseline(self, name: str) -> bool:
        """Whether the committed bits of a canonical tensor are held here."""
        return self._owns_canonical(name) and not self._is_affine(name)

    def _is_affine(self, name: str) -> bool:
        """Whether the baseline holds a canonical tensor as shards."""
        return self.plan is not None and name in self.catalog and not self.plan.is_residual(name)

    # Failures.

    def _agreed(self, mine: Failure | None) -> Failure | None:
        """All ranks' agreement on a step that may have failed on some: None where it has on none of them."""
        failures = self.ranks.failures(mine)
        if mine is not None or not failures:
            return mine
        first = first_of(failures)
        return self._failure(f"training rank {first.rank}: {first.reason}", kind="follows")

    def _alone(self, work: Callable[[], Failure | None]) -> Failure | None:
        """Work without collectives; what it raises is this rank's failure."""
        try:
            return work()
        except Exception as error:
            return self._failed(error)

    def _attempt(self, call: Callable[..., Any], *arguments: Any, **about: str | None) -> Failure | None:
        return attempt(self.ranks.rank, call, *arguments, **about)

    def _failed(self, error: Exception) -> Failure:
        return failure_of(self.ranks.rank, error, tensor=getattr(error, "tensor", None))

    def _failure(self, reason: str, **more: Any) -> Failure:
        return Failure(self.ranks.rank, reason, **more)


def _digest(told: list) -> bytes:
    """What is compared in place of a long list: names and shapes, the same where it is."""
    return hashlib.blake2b(repr(told).encode()).digest()
