"""Every rank ends a refit alike, wherever one of them fails, and none hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from dcr_training import RefitClient, RefitConfig, RefitError, StateDictSource, native
from fake_native import FakeNative
from team import Team

NAMES = [f"tensor.{letter}" for letter in "abcdefgh"]


class CollectiveSource(StateDictSource):
    """Eight tensors, a collective for each; `wrong` is what goes wrong: (rank or None, after how many)."""

    def __init__(self, rank, wrong=None, names=None, group=None):
        super().__init__(self._tensors)
        self.wrong = wrong
        self.names = list(names or NAMES)
        self.yielded = 0
        self._at = rank
        self._group = group

    def _tensors(self):
        self.yielded = 0
        for number, name in enumerate(self.names):
            if self.wrong and self.wrong[0] in (None, self._at) and number == self.wrong[1]:
                if self.wrong[2:] == ("die",):
                    os._exit(7)
                raise KeyError("no such layer")
            tensor = torch.full((4,), float(number), dtype=torch.bfloat16)
            dist.all_reduce(tensor, group=self._group)
            self.yielded += 1
            yield name, tensor


def make_client(rank, key, script=None, **source):
    """A client on the fake native part, with its source."""
    fake = FakeNative(rank, dist.get_world_size(), key, script or {})
    native.load = lambda: fake
    made = CollectiveSource(rank, group=dist.new_group(backend="gloo"), **source)
    config = RefitConfig(record="record", timeout_s=30.0, source_grace_s=1.0)
    return RefitClient(made, config), fake, made


def told(error):
    return {
        "text": str(error),
        "rank": error.rank,
        "tensor": error.tensor,
        "weights": error.weights,
        "fatal": error.fatal,
    }


def refit_or_error(client, mode="auto"):
    began = time.monotonic()
    try:
        report = client.refit(mode)
    except RefitError as error:
        result = told(error)
    else:
        result = {"version": report.version, "raw": report.raw}
    assert time.monotonic() - began < 20.0
    return result


def two_refits(rank, key):
    client, fake, source = make_client(rank, key)
    with client:
        first = client.refit()
        offered = list(fake.offered)
        fake.heal()
        second = client.refit("mixed")
        assert fake.offered == offered and source.yielded == len(NAMES)
    assert fake.closed == (2 if rank == 0 else 1)
    return offered, first.version, second.as_dict()


def test_owners_share_the_tensors_and_all_ranks_get_the_report(team):
    results = team.run(two_refits, "good")
    offered, versions, reports = zip(*results, strict=True)
    assert sorted(offered[0] + offered[1]) == NAMES and offered[0] and offered[1]
    assert versions == (1, 1)
    assert reports[0] == reports[1]
    assert reports[0]["version"] == 2
    assert reports[0]["changed_share"] == 0.1
    assert reports[0]["stage_seconds"] == pytest.approx({"peers": 0.1, "streamed": 0.2, "gate_opened": 0.2})
    assert reports[0]["raw"]["something_new"] is True


def fail_then_recover(rank, key, script, wrong):
    client, fake, source = make_client(rank, key, script)
    client.initialize()
    source.wrong = wrong
    failed = refit_or_error(client)
    streamed = source.yielded
    fake.heal()
    source.wrong = None
    after = refit_or_error(client)
    client.close()
    return failed, streamed, after


# What goes wrong, also in the source; the start of the error, its rank, and how many tensors ranks saw.
FAILURES = {
    "the record cannot be read": ({"start": "no record"}, None, "no record", 0, 8),
    "no receivers": ({"peers": "waited for receivers"}, None, "waited for receivers", None, 8),
    "owner 0 rejects": ({"prepare@0": "stale baseline"}, None, "owner/0: stale baseline", None, 8),
    "owner 1 rejects": ({"prepare@1": "stale baseline"}, None, "owner/1: stale baseline", None, 8),
    "offer on rank 0": ({"offer@0": "other shape"}, None, "owner/0: tensor `tensor.", 0, 8),
    "offer on rank 1": ({"offer@1": "other shape"}, None, "owner/1: tensor `tensor.", 1, 8),
    "offers on both": ({"offer": "other shape"}, None, "owner/", 0, 8),
    "end of stream on rank 1": (
        {"end_stream@1": "relay is gone"},
        None,
        "training rank 1: relay is gone",
        1,
        8,
    ),
    "a receiver wrote": ({"commit": "receiver/a/0 wrote half"}, None, "receiver/a/0 wrote half", None, 8),
    "source on all ranks": ({}, (None, 3), "owner/", 0, 3),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_the_same_on_all_ranks_and_the_next_refit_works(team, case):
    script, wrong, start, rank, yielded = FAILURES[case]
    (one, seen_one, after_one), (two, seen_two, after_two) = team.run(fail_then_recover, case, script, wrong)
    assert one == two
    assert one["text"].startswith(start), one["text"]
    assert "\n" not in one["text"]
    if case == "offers on both":
        # Whichever is heard first: rank, tensor and text are of the same one.
        rank = int(one["text"].removeprefix("owner/")[0])
    assert one["rank"] == rank
    assert not one["fatal"]
    assert one["weights"] == ("unusable" if "wrote" in case else "untouched")
    if "offer" in case:
        assert one["tensor"] in NAMES and one["tensor"] in one["text"]
    assert (seen_one, seen_two) == (yielded, yielded)
    assert after_one == after_two
    assert "version" in after_one, after_one


def fail_alone(rank, key, wrong):
    client, _, source = make_client(rank, key)
    client.initialize()
    source.wrong = wrong
    failed = refit_or_error(client)
    again = refit_or_error(client)
    return failed, again


@pytest.mark.parametrize("alone", [0, 1])
def test_a_source_that_fails_on_one_rank_leaves_no_rank_in_its_collective(team, alone):
    (one, again_one), (two, again_two) = team.run(fail_alone, f"alone-{alone}", (alone, 3))
    assert one == two
    reason = f"owner/{alone}: the weight source failed after 3 tensors: KeyError: 'no such layer'"
    assert one["text"].startswith(reason), one["text"]
    assert one["rank"] == alone and one["fatal"]
    assert again_one == again_two
    assert "closed" in again_one["text"]


def fail_initialize(rank, key, script, source):
    client, fake, _ = make_client(rank, key, script, **source.get(rank, {}))
    try:
        client.initialize()
    except RefitError as error:
        return told(error), fake.closed
    return None, fake.closed


OTHER = [*NAMES[:5], "tensor.other", *NAMES[6:]]
STARTS = {
    "no native part": ({"construct@1": "cannot be imported"}, {}, "training rank 1: cannot be imported"),
    "track": ({"track@1": "dtype complex64"}, {}, "training rank 1: tensor `tensor."),
    "register": ({"register@1": "no relay at tcp://x:1"}, {}, "training rank 1: no relay at tcp://x:1"),
    "coordinator": ({"coordinator": "record is a folder"}, {}, "training rank 0: record is a folder"),
    "names differ": ({}, {1: {"names": OTHER}}, "training rank 0: the weight source yields ('tensor.other'"),
    "twice": (
        {},
        {n: {"names": [*NAMES, NAMES[0]]} for n in (0, 1)},
        "training rank 0: the weight source yi",
    ),
}


@pytest.mark.parametrize("case", STARTS)
def test_initialize_fails_alike(team, case):
    script, source, start = STARTS[case]
    (one, closed_one), (two, closed_two) = team.run(fail_initialize, case, script, source)
    assert one == two and one is not None
    assert one["text"].startswith(start), one["text"]
    assert not one["fatal"]
    if "construct@1" not in script:
        assert closed_one and closed_two


def wrong_modes(rank, key):
    client, _, _ = make_client(rank, key)
    with client:
        first = refit_or_error(client, ("dense", "mixed")[rank])
        second = refit_or_error(client, "sparse")
        third = refit_or_error(client, "dense")
    return first, second, third


def test_modes_must_be_known_and_the_same(team):
    one, two = team.run(wrong_modes, "modes")
    assert one == two
    assert "['dense', 'mixed']" in one[0]["text"]
    assert "sparse" in one[1]["text"]
    assert one[2]["version"] == 1


def die_alone(rank, key):
    client, _, source = make_client(rank, key)
    client.initialize()
    source.wrong = (1, 3, "die")
    return refit_or_error(client)


def test_a_rank_that_dies_ends_the_others():
    ranks = Team(2)
    try:
        survivor, dead = ranks.run(die_alone, "dead")
        assert dead is None
        assert survivor["fatal"]
        assert "rank" in survivor["text"] and "\n" not in survivor["text"]
    finally:
        ranks.close()
