"""What the training ranks agree on before the first refit: which tasks are affine, and who owns what.

Everything here is computed from what all ranks have told each other, so every rank comes to the same plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from dcr_training import native
from dcr_training.tasks import ConversionTask

Meta = tuple[tuple[int, ...], str]
"""Shape and dtype of a canonical tensor, the dtype by its torch name."""


@dataclass(frozen=True)
class Told:
    """What one rank tells the others about one conversion task."""

    name: str
    names: tuple[str, ...]
    shard: str = ""
    """Empty where the rank does not hold the parameter."""
    nbytes: int = 0
    memory: int = 0
    """Address of the parameter: tasks of one rank with the same address share a source tensor."""
    reason: str = ""
    blocks: tuple = ()
    """Of the index map: (name, canonical shape, dtype, offset, extent)."""


def told(task: ConversionTask | None) -> Told | None:
    """This rank's account of a task."""
    if task is None:
        return None
    if task.read is None:
        return Told(task.name, task.names)
    tensor = task.read()
    blocks = (
        ()
        if task.projection is None
        else tuple(
            (name, tuple(shape), dtype, tuple(offset), tuple(extent))
            for name, shape, dtype, offset, extent in task.projection.blocks
        )
    )
    nbytes = tensor.numel() * tensor.element_size()
    return Told(task.name, task.names, task.shard, nbytes, tensor.data_ptr(), task.reason, blocks)


@dataclass
class Plan:
    """Affine and residual tasks by index, and owners by shard and by canonical name.

    `accounts` is what every rank told, by rank and then by task index. Raises `ValueError` where ranks disagree.
    """

    accounts: Sequence[Sequence[Told | None]]
    residual: dict[int, str] = field(default_factory=dict)
    """Why each residual task is residual, by index."""
    names: list[set[str]] = field(default_factory=list)
    """Canonical tensors that each task converts to, on any rank."""
    dependencies_known: bool = True
    """Whether it is known what each task converts to; otherwise any change selects every residual task."""
    shard_owner: dict[str, int] = field(default_factory=dict)
    """The rank that compares each shard of an affine task, or looks at each shard of a residual one."""
    canonical_owner: dict[str, int] = field(default_factory=dict)
    """The rank that holds a residual tensor's baseline, or sends an affine one in a dense refit."""

    def __post_init__(self) -> None:
        counts = [len(account) for account in self.accounts]
        if len(set(counts)) > 1:
            raise ValueError(f"the training ranks have {counts} conversion tasks; all must have the same")
        self.names = [set() for _ in range(counts[0])]
        for index, row in self._rows():
            for _, each in row:
                self.names[index].update(each.names)
            holders = [each for _, each in row if each.shard]
            reasons = [each.reason for each in holders if each.reason]
            if not holders:
                reasons = ["no training rank holds its parameter"]
            if reasons:
                self.residual[index] = reasons[0]
        self._close()

    @property
    def count(self) -> int:
        """Number of conversion tasks."""
        return len(self.names)

    def demote(self, reasons: Mapping[int, str]) -> None:
        """Make more tasks residual."""
        for index, reason in reasons.items():
            self.residual.setdefault(index, reason)
        self._close()

    def produced(self, index: int, name: str) -> None:
        """A conversion of this task has given this canonical tensor."""
        if name not in self.names[index]:
            self.names[index].add(name)
            self.demote({index: f"its conversion also gives `{name}`"})

    def unexplained(self, catalog: Iterable[str]) -> bool:
        """Whether there are canonical tensors of which no task is known to convert to them."""
        known = set().union(*self.names)
        return any(name not in known for name in catalog)

    def is_residual(self, name: str) -> bool:
        """Whether a canonical tensor is of the residual baseline: no affine task converts to it."""
        return name not in self._affine_names

    def select(self, flags: Sequence[bool]) -> set[int]:
        """The tasks to convert when the flagged ones have changed: all that share a canonical tensor with them."""
        flagged = {index for index in self.residual if flags[index]}
        if not flagged:
            return set()
        if not self.dependencies_known:
            return set(self.residual)
        by_name: dict[str, list[int]] = {}
        for index in self.residual:
            for name in self.names[index]:
                by_name.setdefault(name, []).append(index)
        selected, ahead = set(flagged), list(flagged)
        while ahead:
            for name in self.names[ahead.pop()]:
                new = [index for index in by_name[name] if index not in selected]
                selected.update(new)
                ahead.extend(new)
        return selected

    def selected_names(self, selected: Iterable[int], catalog: Mapping[str, Meta]) -> set[str]:
        """The required tensor set: the canonical tensors that the selected tasks convert to."""
        if not self.dependencies_known:
            return {name for name in catalog if self.is_residual(name)} if selected else set()
        return {name for index in selected for name in self.names[index] if name in catalog}

    def assign(self, catalog: Mapping[str, Meta], sizes: Mapping[str, int], ranks: int) -> None:
        """Decide who owns what. `sizes` are the bytes of each canonical tensor.

        Affine shards and the residual baseline are balanced together, as they share the owners' memory; so are
        fingerprints, and the tensors of dense refits, each for themselves.
        """
        everybody = list(range(ranks))
        shards: dict[str, tuple[int, list[int]]] = {}
        flags: dict[str, tuple[int, list[int]]] = {}
        for index, row in self._rows():
            for rank, each in row:
                if each.shard:
                    group = flags if index in self.residual else shards
                    group.setdefault(each.shard, (each.nbytes, []))[1].append(rank)
        residual = {name: (sizes[name], everybody) for name in catalog if self.is_residual(name)}
        dense = {name: (sizes[name], everybody) for name in catalog if name not in residual}
        for group in ({**shards, **residual}, flags, dense):
            shares = [(name, nbytes, holders) for name, (nbytes, holders) in group.items()]
            owners = native.load().assign_owners(shares, ranks)
            for (name, _, _), owner in zip(shares, owners, strict=True):
                (self.canonical_owner if name in catalog else self.shard_owner)[name] = owner

    def wrong_shapes(self, catalog: Mapping[str, Meta]) -> dict[int, str]:
        """Affine tasks whose index map does not lead into the canonical tensors that there are.

        Padding, stacking and transposition show here: the Bridge converts to another shape than the map does.
        """
        reasons = {}
        for index, row in self._rows():
            for _, each in row:
                for name, shape, *_ in each.blocks:
                    if index in self.residual or index in reasons:
                        break
                    if name not in catalog:
                        reasons[index] = f"`{name}` is not among the converted tensors"
                    elif catalog[name][0] != shape:
                        reasons[index] = f"`{name}` is {list(catalog[name][0])}, not the shards' {list(shape)}"
        return reasons

    def uncovered(self, catalog: Mapping[str, Meta]) -> str | None:
        """What is wrong with the cover of canonical tensors: each element of each must come from one place."""
        # Copies on several ranks are one place: the same block in the account of the same task.
        covered: dict[str, dict[Place, int]] = {}
        for index, row in self._rows():
            if index not in self.residual:
                for rank, each in row:
                    for number, (name, _, _, offset, extent) in enumerate(each.blocks):
                        covered.setdefault(name, {}).setdefault((offset, extent, index, number), rank)
        for name, (shape, _) in catalog.items():
            if self.is_residual(name):
                continue
            places = covered.get(name, {})
            overlap = _overlap([place for place in places if prod(place[1])])
            if overlap:
                one, other = (
                    f"`{self._task_name(place[2])}` on training rank {places[place]} "
                    f"(at {list(place[0])}, {list(place[1])} elements)"
                    for place in overlap
                )
                return f"tensor `{name}`: the blocks of {one} and of {other} overlap; each element must come from one"
            elements = sum(prod(extent) for _, extent, *_ in places)
            if elements != prod(shape):
                ranks = sorted({rank for rank in range(len(self.accounts)) if self._holds(rank, name)})
                return (
                    f"tensor `{name}`: its shards cover {elements} of {prod(shape)} elements; "
                    f"they are held by training ranks {ranks}, the others have none of it"
                )
        return None

    def _task_name(self, index: int) -> str:
        return next(account[index].name for account in self.accounts if account[index] is not None)

    def _holds(self, rank: int, name: str) -> bool:
        return any(each and each.shard and name in each.names for each in self.accounts[rank])

    def _rows(self) -> Iterable[tuple[int, list[tuple[int, Told]]]]:
        """For each task index, the ranks that know of it with what they told."""
        for index, row in enumerate(zip(*self.accounts, strict=True)):
            yield index, [(rank, each) for rank, each in enumerate(row) if each is not None]

    def _close(self) -> None:
        """What shares a canonical tensor or a source tensor with a residual task is residual as well."""
        groups: dict[object, set[int]] = {}
        for index, names in enumerate(self.names):
            for name in names:
                groups.setdefault(name, set()).add(index)
        for index, row in self._rows():
            for rank, each in row:
                if each.memory and each.nbytes:
                    groups.setdefault((rank, each.memory), set()).add(index)
        shared = {what: group for what, group in groups.items() if len(group) > 1}
        for what, group in shared.items():
            if isinstance(what, str):
                for index in group:
                    self.residual.setdefault(index, f"several tasks convert to `{what}`")
        changed = True
        while changed:
            changed = False
            for group in shared.values():
                missing = [index for index in group if index not in self.residual]
                if missing and len(missing) < len(group):
                    changed = True
                    for index in missing:
                        self.residual[index] = "its source tensor also feeds a residual conversion"
        affine = (names for index, names in enumerate(self.names) if index not in self.residual)
        self._affine_names = {name for names in affine for name in names}


Place = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""Where elements of a canonical tensor come from: offset and extent of a block, its task, and which of the task's."""


def _overlap(places: Sequence[Place]) -> tuple[Place, Place] | None:
    """Two blocks of one tensor that overlap, none of them empty; None where there are none."""
    ordered = sorted(places)
    same = next(((one, other) for one, other in pairwise(ordered) if one[0] == other[0]), None)
    if same:
        return same
    extents = {extent for _, extent, *_ in ordered}
    # Blocks of one size on its grid, as tensor parallelism cuts them, need not be compared with each other.
    if len(extents) == 1 and all(
        at % size == 0 for offset, extent, *_ in ordered for at, size in zip(offset, extent, strict=True)
    ):
        return None
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            sides = zip(one[0], one[1], other[0], other[1], strict=True)
            if all(a < b + more and b < a + size for a, size, b, more in sides):
                return one, other
    return None
