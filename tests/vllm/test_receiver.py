"""The receiver's thread against a stand-in for the native receiver and a model of two tensors: nothing raises, every
task is answered, every problem is one line."""

import threading

import pytest
import torch
from dcr import _native
from dcr_vllm import receiver
from dcr_vllm.receiver import ReceiverThread
from fake_receiver import FakeReceiver

BF16 = torch.bfloat16
CATALOG = [("a", [4, 3], "BF16"), ("b", [5], "BF16")]


class Model(torch.nn.Module):
    """Loads as vLLM's models do; `trouble` is called before each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4, 3, dtype=BF16), requires_grad=False)
        self.b = torch.nn.Parameter(torch.zeros(5, dtype=BF16), requires_grad=False)
        self.trouble = lambda name: None

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            self.trouble(name)
            parameter = dict(self.named_parameters())[name]
            assert parameter.shape == tensor.shape, f"{name} has shape\n{tuple(tensor.shape)}"
            parameter.data.copy_(tensor)
            loaded.add(name)
        return loaded


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The layout is a question of vLLM's models; see test_loader_layout.py. Retries come at once."""
    monkeypatch.setattr(receiver, "layout_is_kept", lambda model: None)
    monkeypatch.setattr(receiver, "POLL_S", 0.01)


@pytest.fixture
def start():
    """Starts threads that are closed after the test, and must then have ended."""
    threads = []

    def starting(native, model=None):
        threads.append(ReceiverThread(model or Model(), "receiver/test", receiver=native))
        return threads[-1]

    yield starting
    for thread in threads:
        thread.close()
        assert not thread._thread.is_alive()


def item(name: str, shape: list[int], value: float):
    old, new = torch.zeros(shape, dtype=BF16), torch.full(shape, value, dtype=BF16)
    return _native.make_item(name, shape, "BF16", old.data_ptr(), new.data_ptr(), new.numel() * 2, "xor")


def test_a_refit(start):
    native, model = FakeReceiver(), Model()
    native.give("prewarm", catalog=CATALOG)
    native.give("apply", items=[item("a", [4, 3], 1.0)])
    native.give("apply", items=[item("b", [5], 2.0)])
    native.give("finish")
    start(native, model)
    assert native.answers(4) == [
        ("prewarmed", [("a", "xor", ""), ("b", "xor", "")], None),
        ("applied", 1, None),
        ("applied", 1, None),
        ("finished", None),
    ]
    assert (model.a == 1).all() and (model.b == 2).all()


def test_tasks_before_prewarm_are_answered_with_the_reason(start):
    native = FakeReceiver()
    native.give("apply", items=[item("b", [5], 2.0)])
    native.give("finish")
    start(native)
    applied, finished = native.answers(2)
    assert applied == ("applied", 1, "this receiver has not been prewarmed")
    assert finished == ("finished", "this receiver has not been prewarmed")


def test_a_catalog_that_does_not_fit_is_refused_and_a_fitting_one_then_taken(start):
    native, model = FakeReceiver(), Model()
    native.give("prewarm", catalog=CATALOG[1:])
    native.give("prewarm", catalog=[*CATALOG[1:], ("a", [4, 2], "BF16"), ("c", [1], "BF16"), ("d", [1], "F4")])
    native.give("prewarm", catalog=CATALOG)
    start(native, model)
    missing, refused, taken = native.answers(3)
    assert missing[1] == [] and "fill nothing of parameter a" in missing[2]
    # The reason of the refused tensor comes before what it leaves out.
    classes = {name: (kind, reason) for name, kind, reason in refused[1]}
    assert refused[2] is None and classes["b"] == ("xor", "")
    for name, words in {"a": "[4, 2]", "c": "'c'", "d": "F4"}.items():
        kind, reason = classes[name]
        assert kind == "unsupported" and words in reason and "\n" not in reason
    assert taken[2] is None
    assert not model.a.any() and not model.b.any()


def test_a_packed_layout_refuses_everything(start, monkeypatch):
    monkeypatch.setattr(receiver, "layout_is_kept", lambda model: "module a is packed")
    native = FakeReceiver()
    native.give("prewarm", catalog=CATALOG)
    start(native)
    assert native.answers(1) == [("prewarmed", [], "module a is packed")]


def test_a_loader_that_raises_fails_the_attempt_and_the_next_one_works(start):
    native, model = FakeReceiver(), Model()
    native.give("prewarm", catalog=CATALOG)
    start(native, model)
    native.answers(1)

    def raising(name):
        raise KeyError("no\nroom")

    model.trouble = raising
    native.give("apply", items=[item("a", [4, 3], 1.0)])
    ((_, _, error),) = native.answers(1)
    assert "room" in error and "\n" not in error
    model.trouble = lambda name: None
    native.give("apply", attempt="second", items=[item("a", [4, 3], 1.0)])
    assert native.answers(1) == [("applied", 1, None)]
    assert (model.a == 1).all()


def test_a_parameter_that_is_replaced_is_named(start):
    native, model = FakeReceiver(), Model()
    native.give("prewarm", catalog=CATALOG)
    start(native, model)
    native.answers(1)
    model.b.data = model.b.data.clone()
    native.give("finish")
    native.give("apply", items=[item("b", [5], 2.0)])
    finished, applied = native.answers(2)
    assert "resident tensor b" in finished[1] and "resident tensor b" in applied[2]
    assert not model.b.any()


@pytest.mark.parametrize("broken", ["next_task", "prewarmed", "applied"])
def test_a_native_receiver_that_raises_is_told_and_the_thread_goes_on(start, broken):
    # Telling it fails as well.
    native = FakeReceiver(broken, "report_failure")
    native.give("prewarm", catalog=CATALOG)
    native.give("apply", items=[item("b", [5], 2.0)])
    native.give("finish")
    start(native)
    kinds = {}
    for kind, *rest in native.answers(4 if broken == "next_task" else 3):
        kinds[kind] = rest
    assert kinds["failure"] == [f"{broken} is broken"]
    assert kinds["finished"] == [None]


def test_the_loader_runs_without_gradients_on_a_thread_of_its_own(start):
    native, model, seen = FakeReceiver(), Model(), []
    model.trouble = lambda name: seen.append((threading.current_thread().name, torch.is_grad_enabled()))
    native.give("prewarm", catalog=CATALOG)
    native.give("apply", items=[item("b", [5], 2.0)])
    start(native, model)
    native.answers(2)
    assert set(seen) == {("dcr-receiver", False)}
