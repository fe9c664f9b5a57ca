"""The plugin's registration and its weight-transfer engine: nothing raises into vLLM."""

import sys
from types import SimpleNamespace

import pytest
import torch


class FakeThread:
    """In place of the receiver's thread."""

    def __init__(self, model, name, relay=None, *, shards=1) -> None:
        self.name, self.relay, self.shards = name, relay, shards
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def fails(*_args, **_kwargs):
    raise RuntimeError("no\nkey")


@pytest.fixture
def make(monkeypatch):
    """Makes an engine as a worker does; `relay` is DCR_RELAY."""
    from dcr_vllm import engine

    def making(thread=FakeThread, relay: str = "", **parallel: int):
        monkeypatch.setattr(engine, "ReceiverThread", thread)
        monkeypatch.setenv("DCR_RELAY", relay)
        config = SimpleNamespace(parallel_config=SimpleNamespace(**({"rank": 0} | parallel)), model_config=None)
        return engine.DcrWeightTransferEngine(None, config, torch.device("cpu"), torch.nn.Linear(1, 1))

    return making


def test_registering_is_idempotent_and_lazy(caplog):
    from dcr_vllm import register
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers import utils

    register()
    replaced = utils.dispatch_cpu_unquantized_gemm
    register()
    assert utils.dispatch_cpu_unquantized_gemm is replaced
    engine = WeightTransferEngineFactory._registry["dcr"]()
    assert engine.__name__ == "DcrWeightTransferEngine"
    assert [record for record in caplog.records if record.name == "vllm.dcr"] == []


def test_a_vllm_without_weight_transfer_still_starts(monkeypatch, caplog):
    from dcr_vllm import register

    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    register()
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "weight_transfer" in record.getMessage()


def test_the_environment_starts_the_receiver(make):
    engine = make(relay="tcp://127.0.0.1:5551")
    receiver = engine.receiver
    assert receiver.relay is None, "the native receiver reads DCR_RELAY itself"
    engine.init_transfer_engine(engine.parse_init_info({"relay": "tcp://127.0.0.1:9"}))
    assert engine.receiver is receiver
    engine.shutdown()
    engine.shutdown()
    assert receiver.closed == 1


def test_without_it_the_init_call_does(make, caplog):
    engine = make()
    assert engine.receiver is None and "DCR_RELAY" in caplog.text
    engine.init_transfer_engine(engine.parse_init_info({"relay": "tcp://127.0.0.1:5551", "master_port": 1}))
    assert engine.receiver.relay == "tcp://127.0.0.1:5551"


def test_names_are_unique_among_ranks_and_replicas(make):
    engines = [make(rank=rank, data_parallel_rank=replica) for rank in range(2) for replica in range(2)]
    assert len({engine.name for engine in engines}) == 4
    assert all(engine.name.startswith("receiver/") for engine in engines)
    assert make(rank=3).name.endswith("/dp0-rank3")


def test_the_receiver_is_told_among_how_many_ranks_a_tensor_may_be_divided(make):
    engine = make(relay="tcp://127.0.0.1:5551", tensor_parallel_size=4, data_parallel_size=2)
    assert engine.receiver.shards == 8
    assert make(relay="tcp://127.0.0.1:5551").receiver.shards == 1


@pytest.mark.parametrize("relay", ["", "tcp://127.0.0.1:5551"])
def test_a_receiver_that_cannot_be_made_is_one_line_in_the_log(make, caplog, relay):
    engine = make(fails, relay=relay)
    engine.init_transfer_engine(engine.parse_init_info({"relay": "x"}))
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors and all("no key" in line and "\n" not in line for line in errors)
    engine.shutdown()


@pytest.mark.parametrize("nonsense", [None, [], {}, "text", {"relay": 5}, [{"names": 1}]])
def test_calls_with_nonsense_do_nothing(make, nonsense):
    engine = make()
    assert engine.parse_init_info(nonsense).relay is None
    engine.start_weight_update()
    engine.update_weights(nonsense)
    engine.receive_weights(nonsense)
    engine.finish_weight_update()


def test_a_receiver_that_cannot_be_closed_does_not_raise(make, caplog):
    engine = make(relay="tcp://127.0.0.1:5551")
    engine.receiver.close = fails
    engine.shutdown()
    assert "no key" in caplog.text
