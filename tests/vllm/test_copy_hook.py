"""The copy_ hook, in C++ and as a Python dispatch mode, against plain torch on copies of the same memory."""

import os
import resource
import subprocess
import sys
import threading

import pytest
import torch
from dcr import _native
from dcr_vllm import hook

BF16 = torch.bfloat16
# The fixture below puts another in its place.
COPY_HOOK = hook.copy_hook


@pytest.fixture(params=["cpp", "python"], autouse=True)
def kind(request, monkeypatch):
    """Runs every test with each of the two hooks."""
    if request.param == "cpp":
        assert COPY_HOOK() == "cpp", "this torch must support the C++ hook"
    monkeypatch.setattr(hook, "copy_hook", lambda: request.param)
    return request.param


class Bench:
    """Scratch, one item and some resident tensors, as a receiver has them."""

    def __init__(self, *resident: torch.Tensor, shape=(8, 6), encoding="xor") -> None:
        generator = torch.Generator().manual_seed(3)
        self.old = torch.randn(shape, generator=generator).to(BF16)
        self.new = self.old.clone()
        changed = torch.rand(shape, generator=generator) < 0.4
        self.new[changed] = torch.randn(shape, generator=generator).to(BF16)[changed]
        self.new.view(torch.int16).view(-1)[0] ^= -0x8000
        self.changed = bits(self.old) != bits(self.new)
        self.scratch = torch.zeros(self.old.numel() * 2, dtype=torch.uint8)
        self.view = self.scratch.view(BF16).view(shape)
        self.interceptor = _native.Interceptor()
        # Kept alive: memory that torch gave to another tensor meanwhile would still count as resident.
        self.resident = resident
        ranges = [(t.data_ptr(), t.untyped_storage().nbytes(), f"resident{i}") for i, t in enumerate(resident)]
        self.interceptor.set_resident(ranges)
        self.interceptor.set_scratch(self.scratch.data_ptr(), self.scratch.numel())
        old, new = self.old.data_ptr(), self.new.data_ptr()
        self.item = _native.make_item("w", list(shape), "BF16", old, new, self.old.numel() * 2, encoding)

    def run(self, loader) -> _native.Outcome:
        self.interceptor.begin_item(self.item)
        try:
            with torch.no_grad(), hook.intercepting(self.interceptor):
                loader(self.view)
        finally:
            outcome = self.interceptor.end_item()
        return outcome


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "dense"])
@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ((8, 6), lambda t: t),
        ((4, 6), lambda t: t[2:6]),
        ((8, 3), lambda t: t[:, 3:]),
        ((6, 8), lambda t: t.t()),
        ((48,), lambda t: t.reshape(48)),
        ((2, 4, 6), lambda t: t.view(2, 4, 6)),
        ((3, 4), lambda t: t[::2, 1:4].t()),
    ],
    ids=["whole", "rows", "columns", "transposed", "flat", "split", "strided"],
)
def test_a_view_arrives_as_in_a_dense_load(encoding, shape, path):
    resident = torch.zeros(shape, dtype=BF16)
    bench = Bench(resident, encoding=encoding)
    resident.copy_(path(bench.old))
    outcome = bench.run(lambda scratch: resident.copy_(path(scratch)))
    assert outcome.violations == []
    assert (outcome.copies, outcome.written) == (1, ["resident0"])
    assert same(resident, path(bench.new))


def test_a_broadcast_view_is_expanded():
    resident = torch.zeros(5, 6, dtype=BF16)
    bench = Bench(resident)
    resident.copy_(bench.old[3:4])
    assert bench.run(lambda scratch: resident.copy_(scratch[3])).violations == []
    assert same(resident, bench.new[3:4].expand(5, 6))


@pytest.mark.parametrize(
    "write",
    [
        lambda p, s: p.data.copy_(s),
        lambda p, s: p.data.__setitem__(slice(None), s),
        lambda p, s: torch._foreach_copy_([p.data], [s]),
        lambda p, s: p.copy_(s, non_blocking=True),
    ],
    ids=["copy_", "setitem", "foreach", "non_blocking"],
)
def test_every_way_to_copy_is_seen(write):
    parameter = torch.nn.Parameter(torch.zeros(8, 6, dtype=BF16))
    bench = Bench(parameter.data)
    parameter.data.copy_(bench.old)
    assert bench.run(lambda scratch: write(parameter, scratch)).copies == 1
    assert same(parameter.data, bench.new)


def test_inference_mode_is_seen():
    resident = torch.zeros(8, 6, dtype=BF16)
    bench = Bench(resident)
    resident.copy_(bench.old)

    def load(scratch):
        with torch.inference_mode():
            resident.copy_(scratch)

    assert bench.run(load).copies == 1
    assert same(resident, bench.new)


def test_a_parameter_that_widens_to_fp32_takes_overwrites_only():
    resident = torch.zeros(8, 6)
    bench = Bench(resident, encoding="overwrite")
    resident.copy_(bench.old.float())
    assert bench.run(resident.copy_).violations == []
    assert torch.equal(resident.view(torch.int32), bench.new.float().view(torch.int32))
    bench = Bench(resident, encoding="xor")
    before = resident.clone()
    outcome = bench.run(resident.copy_)
    assert outcome.copies == 0 and len(outcome.violations) == 1
    assert bench.interceptor.failure == outcome.violations[0]
    assert torch.equal(resident, before)


@pytest.mark.parametrize(
    "load",
    [
        lambda r, s: r.copy_(s.clone()),
        lambda r, s: r.copy_(s.t().contiguous().t()),
        lambda r, s: r.copy_(torch.ones_like(s)),
        lambda r, s: r.copy_(s.float()),
        lambda r, s: (r.copy_(s), r.copy_(s)),
    ],
    ids=["clone", "contiguous", "elsewhere", "cast", "twice"],
)
def test_what_breaks_the_xor_rule_writes_nothing_wrong(load):
    resident = torch.zeros(8, 6, dtype=BF16)
    bench = Bench(resident)
    resident.copy_(bench.old)
    outcome = bench.run(lambda scratch: load(resident, scratch))
    assert outcome.violations, "a rule of table A.2 is broken"
    assert "resident0" in outcome.violations[0] and "w" in outcome.violations[0]
    # A second copy is refused after a first good one; everything else leaves the old bits.
    assert same(resident, bench.new if outcome.copies else bench.old)


def test_copies_into_other_memory_pass():
    resident, other = torch.zeros(8, 6, dtype=BF16), torch.zeros(8, 6, dtype=BF16)
    bench = Bench(resident)

    def load(scratch):
        other.copy_(torch.full_like(other, 2.0))
        assert same(scratch.clone(), scratch)

    outcome = bench.run(load)
    assert (outcome.copies, outcome.violations) == (0, [])
    assert torch.equal(other, torch.full_like(other, 2.0))


def test_shapes_that_do_not_fit_are_torchs_to_refuse():
    resident = torch.zeros(8, 6, dtype=BF16)
    bench = Bench(resident)
    with pytest.raises(RuntimeError):
        bench.run(lambda scratch: resident.copy_(scratch[:, :5]))
    assert not resident.any()


def test_nothing_is_intercepted_afterwards_nor_on_other_threads():
    resident = torch.zeros(8, 6, dtype=BF16)
    bench = Bench(resident)
    ones = torch.ones_like(resident)
    with pytest.raises(KeyError):
        bench.run(lambda scratch: {}["an error in the loader"])
    resident.copy_(ones)
    assert same(resident, ones)

    seen = []

    def elsewhere():
        resident.zero_()
        resident.copy_(ones)
        seen.append(same(resident, ones))

    def load(_scratch):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    assert bench.run(load).copies == 0
    assert seen == [True]


def test_memory_does_not_grow():
    resident = torch.zeros(8, 6, dtype=BF16)
    bench = Bench(resident, encoding="overwrite")
    other = torch.zeros(64, dtype=BF16)
    source = torch.ones(64, dtype=BF16)

    def load(scratch):
        for _ in range(20_000):
            other.copy_(source)
            resident.copy_(scratch)

    bench.run(load)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        assert bench.run(load).violations == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10, "KiB"


def test_torchs_own_error_arrives(kind):
    bench = Bench(torch.zeros(8, 6, dtype=BF16))
    leaf = torch.zeros(3, requires_grad=True)

    def load(_scratch):
        with pytest.raises(RuntimeError, match="size of tensor a"):
            torch.zeros(3).copy_(torch.ones(2))
        with torch.enable_grad(), pytest.raises(RuntimeError, match="leaf Variable"):
            leaf.copy_(torch.ones(3))

    assert bench.run(load).violations == []


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "dense"])
@pytest.mark.parametrize("negated", ["source", "destination"])
def test_a_lazily_negated_view_is_refused(encoding, negated):
    resident = torch.zeros(8, 6, dtype=BF16)
    bench = Bench(resident, encoding=encoding)
    resident.copy_(bench.old)
    if negated == "source":
        outcome = bench.run(lambda scratch: resident.copy_(torch._neg_view(scratch)))
    else:
        outcome = bench.run(lambda scratch: torch._neg_view(resident).copy_(scratch))
    assert (outcome.copies, len(outcome.violations)) == (0, 1)
    assert same(resident, bench.old)


def test_copies_of_many_kinds_outside_residents_match_plain_torch(kind):
    """Everything that passes through gives what torch gives without a hook."""
    bench = Bench(torch.zeros(8, 6, dtype=BF16))

    def work():
        source = torch.arange(24, dtype=torch.float32).view(4, 6)
        made = [torch.zeros(4, 6, dtype=dtype).copy_(source) for dtype in (BF16, torch.int64, torch.bool)]
        made += [source.t().contiguous(), source.clone(), source.to(torch.float64), source[:, ::2].clone()]
        made += [torch.zeros(2, 4, 6).copy_(source), torch.zeros(()).copy_(source[1, 1])]
        made += [torch.zeros(0, 3).copy_(torch.ones(3)), torch.zeros(2, dtype=torch.cfloat).copy_(source[0, :2])]
        made[0][1:3, ::2] = -1
        return made

    plain, seen = work(), []
    assert bench.run(lambda _scratch: seen.extend(work())).violations == []
    assert len(seen) == len(plain)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(seen, plain, strict=True))


def test_gradients_flow_through_copies_that_pass():
    bench = Bench(torch.zeros(8, 6, dtype=BF16))
    source = torch.ones(3, requires_grad=True)

    def load(_scratch):
        with torch.enable_grad():
            (torch.zeros(3).copy_(source) * 2).sum().backward()

    bench.run(load)
    assert source.grad.tolist() == [2, 2, 2]


only_cpp = pytest.mark.parametrize("kind", ["cpp"], indirect=True)


@only_cpp
def test_one_interceptor_at_a_time_and_the_guard_can_be_used_again(kind):
    interceptor = _native.Interceptor()
    guard = _native.CopyHookGuard(interceptor)
    for _ in range(2):
        with guard:
            for another in (guard, _native.CopyHookGuard(interceptor)):
                with pytest.raises(RuntimeError, match="at work on this thread already"):
                    another.__enter__()


@only_cpp
def test_installing_twice_is_one_installation(kind, caplog):
    for _ in range(2):
        COPY_HOOK.cache_clear()
        assert COPY_HOOK() == "cpp"
    assert caplog.records == []


@only_cpp
@pytest.mark.parametrize("wanted", [None, "cpp"])
def test_a_torch_without_the_symbols(kind, wanted, monkeypatch, caplog):
    """The Python mode steps in and one warning says why; where the C++ hook is asked for, that is an error."""
    monkeypatch.setattr(hook, "_install", lambda: "this torch has no aoti_torch_get_dim")
    monkeypatch.delenv("DCR_COPY_HOOK", raising=False)
    COPY_HOOK.cache_clear()
    try:
        if wanted is None:
            assert [COPY_HOOK(), COPY_HOOK()] == ["python", "python"]
            assert len(caplog.records) == 1 and "aoti_torch_get_dim" in caplog.text
        else:
            monkeypatch.setenv("DCR_COPY_HOOK", wanted)
            with pytest.raises(RuntimeError, match="cannot be used: this torch has no aoti_torch_get_dim"):
                COPY_HOOK()
    finally:
        COPY_HOOK.cache_clear()


@only_cpp
def test_a_hook_that_is_neither_is_named(kind, monkeypatch):
    monkeypatch.setenv("DCR_COPY_HOOK", "pyhton")
    COPY_HOOK.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="'pyhton'; set it to cpp or python"):
            COPY_HOOK()
    finally:
        COPY_HOOK.cache_clear()


@only_cpp
def test_a_process_that_asks_for_the_python_mode_gets_it(kind):
    code = "from dcr_vllm import hook; print(hook.copy_hook(), hook._LIBRARIES)"
    environment = os.environ | {"DCR_COPY_HOOK": "python"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "python []"
