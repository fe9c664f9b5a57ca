"""What one rank can't read or take ends the work on all ranks, with tensor and rank named, and without a trace."""

import torch
from dcr_training import Part, RefitClient, RefitConfig, RefitError, StateDictSource
from emitted import told

NAMES = ("a", "b", "c", "d", "e", "f")


class Shards(StateDictSource):
    """Tensors that are compared as shards; `wrong` names what fails on rank 1: a tensor's read, or a method."""

    direct_projection = True

    def __init__(self, rank):
        self.weights = {name: torch.zeros(6) for name in NAMES}
        super().__init__(lambda: self.weights)
        self.at = rank
        self.wrong = None

    def check(self, what):
        if self.at == 1 and self.wrong == what:
            raise OSError("the device is gone")

    @property
    def dependencies_known(self):
        self.check("dependencies_known")
        return True

    def refresh(self):
        self.check("refresh")
        super().refresh()

    def _task(self, name, tensor):
        task = super()._task(name, tensor)
        whole = task.read

        def read():
            self.check(name)
            return whole()

        # Every second one is residual. All have copies on both ranks.
        residual = NAMES.index(name) % 2
        projection, reason = (None, "for the test") if residual else (task.projection, "")
        return type(task)(name, task.names, read, projection, reason, f"{name}#")


def error_of(call, *arguments, **more):
    try:
        call(*arguments, **more)
    except RefitError as error:
        return {"text": str(error), "rank": error.rank, "tensor": error.tensor, "fatal": error.fatal}
    return None


def emitted(client):
    import dcr._native as native

    client.rehearse(keep=True)
    items = [told(item) for payload in client.rehearsed() for item in native.decode_payload(payload)]
    return [(name, positions.tolist()) for name, _, positions, _ in items]


def spoil_reads(rank):
    """Errors of a rehearsal for each tensor that can't be read, and what is emitted afterwards."""
    source = Shards(rank)
    client = RefitClient(source, RefitConfig(record="unused", chunk_bytes=30))
    client.take_baseline()
    for tensor in source.weights.values():
        tensor[2] = 1.0
    errors = {}
    for what in (*NAMES, "refresh"):
        source.wrong = what
        errors[what] = error_of(client.rehearse)
        errors[f"copies of {what}"] = error_of(client.check_replicas)
    source.wrong = None
    return errors, emitted(client)


def test_reads_that_fail_in_a_refit(team):
    (errors, mine), (others, theirs) = team.run(spoil_reads)
    assert errors == others
    read = 0
    for name in NAMES:
        copies = errors[f"copies of {name}"]
        assert copies["rank"] == 1 and copies["tensor"] == name and "the device is gone" in copies["text"], copies
        if (error := errors[name]) is not None:
            read += 1
            assert error["rank"] == 1 and error["tensor"] == name and not error["fatal"], error
            assert f"training rank 1: tensor `{name}`: " in error["text"] and "\n" not in error["text"], error
    assert errors["refresh"]["rank"] == 1 and errors["copies of refresh"] is None
    assert 0 < read < len(NAMES), "each rank owns some of them, and reads no others"
    assert sorted(mine + theirs) == [(name, [2]) for name in NAMES]


def spoil_before_commit(rank):
    source = Shards(rank)
    client = RefitClient(source, RefitConfig(record="unused", chunk_bytes=30))
    client.take_baseline()
    for tensor in source.weights.values():
        tensor[2] = 1.0
    source.wrong = "refresh"
    error = error_of(client.rehearse, commit=True)
    source.wrong = None
    return error, emitted(client)


def test_no_rank_commits_what_another_could_not_compare(team):
    (error, mine), (_, theirs) = team.run(spoil_before_commit)
    assert error["rank"] == 1
    assert sorted(mine + theirs) == [(name, [2]) for name in NAMES]


def spoil_start(rank, what):
    source = Shards(rank)
    source.wrong = what
    return error_of(RefitClient(source, RefitConfig(record="unused")).take_baseline)


def test_a_start_that_fails_on_one_rank(team):
    for what in ("dependencies_known", "refresh", "a"):
        one, two = team.run(spoil_start, what, timeout_s=60.0)
        assert one == two and one["rank"] == 1 and not one["fatal"], one
        assert one["text"].startswith("training rank 1: ") and "the device is gone" in one["text"], one
        assert what != "a" or one["tensor"] == "a", one


def yield_what_cannot_be_taken(rank):
    """A sparse tensor on rank 1 only, in a source that uses collectives; and a consumer that raises."""
    from torch import distributed as dist

    weights = {name: torch.ones(5) for name in NAMES}

    def stream():
        for name, tensor in weights.items():
            dist.all_reduce(torch.ones(1))
            yield name, tensor
        yield Part("whole", (2, 3), (rank, 0), torch.zeros(1, 3))

    client = RefitClient(StateDictSource(stream), RefitConfig(record="unused", source_grace_s=1.0))
    client.take_baseline()
    owner = client._construction._canonical_owner
    name = next(name for name in NAMES if owner[name] == 1)
    if rank == 1:
        weights[name] = torch.ones(5).to_sparse()
    sparse = error_of(client.rehearse)
    weights[name] = torch.ones(5)
    whole = client._construction._offer_canonical

    def raising(chunk):
        raise MemoryError("no room")

    if rank == 1:
        client._construction._offer_canonical = raising
    consumer = error_of(client.rehearse)
    client._construction._offer_canonical = whole
    return name, sparse, consumer, error_of(client.rehearse), error_of(client.refit)


def test_tensors_that_cannot_be_taken_leave_ranks_in_step(team):
    one, two = team.run(yield_what_cannot_be_taken, timeout_s=60.0)
    assert one == two
    name, sparse, consumer, after, refit = one
    assert sparse["rank"] == 1 and sparse["tensor"] == name and not sparse["fatal"], sparse
    assert consumer["rank"] == 1 and "no room" in consumer["text"] and not consumer["fatal"], consumer
    assert f"`{name}`" in consumer["text"], consumer
    assert after is None
    assert "no relay" in refit["text"], "a client without a connection says so"


def rehearse_differently(rank):
    client = RefitClient(StateDictSource(lambda: {"w": torch.ones(3)}), RefitConfig(record="unused"))
    client.take_baseline()
    return error_of(client.rehearse, ("dense", "mixed")[rank]), error_of(client.rehearse, "mixed")


def test_rehearsals_of_different_modes_are_refused(team):
    one, two = team.run(rehearse_differently)
    assert one == two
    assert "['dense', 'mixed']" in one[0]["text"] and one[1] is None


class ReadsAhead(Shards):
    """On rank 1 it can't be told which task a converted tensor is of."""

    def convert(self, selected):
        for index, name, tensor in super().convert(selected):
            yield index if self.at == 0 else None, name, tensor


def plan_with_reading_ahead(rank):
    client = RefitClient(ReadsAhead(rank), RefitConfig(record="unused"))
    client.take_baseline()
    return client.plan.dependencies_known, sorted(client.plan.residual)


def test_ranks_come_to_one_plan(team):
    # What one rank does not know, none relies on: they would convert different tasks, and wait for each other.
    assert team.run(plan_with_reading_ahead) == [(False, [1, 3, 5])] * 2
