"""Configurations are checked where they are made; reports are read from JSON."""

import json
import subprocess
import sys

import pytest
from dcr_training import RefitConfig, RefitReport

GOOD = {"DCR_RELAY": "tcp://127.0.0.1:5551", "DCR_RECORD": "/tmp/record"}


def test_environment():
    config = RefitConfig.from_environment(
        {**GOOD, "DCR_GATES": "http://a:1, https://b:2,", "DCR_RECEIVERS": "4", "DCR_TIMEOUT_S": "12.5"}
    )
    assert config.relay == "tcp://127.0.0.1:5551" and config.record == "/tmp/record"
    assert config.gates == ["http://a:1", "https://b:2"]
    assert (config.receivers, config.timeout_s, config.application) == (4, 12.5, "asynchronous")
    assert RefitConfig.from_environment(GOOD).gates == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"DCR_RELAY": ""}, "DCR_RELAY is not set"),
        ({"DCR_RECORD": ""}, "DCR_RECORD is not set"),
        ({"DCR_RELAY": "127.0.0.1:1"}, "tcp://HOST:PORT"),
        ({"DCR_GATES": "localhost:8000"}, "'localhost:8000' is not an http"),
        ({"DCR_RECEIVERS": "two"}, "DCR_RECEIVERS='two' is not a number"),
        ({"DCR_RECEIVERS": "0"}, "at least 1"),
        ({"DCR_APPLICATION": "eager"}, "'eager' is none of"),
        ({"DCR_TIMEOUT_S": "-1"}, "`timeout_s` is -1.0"),
    ],
)
def test_bad_environment(change, told):
    with pytest.raises(ValueError, match="refit configuration: ") as error:
        RefitConfig.from_environment({**GOOD, **change})
    assert told in str(error.value) and "\n" not in str(error.value)


def test_mapping():
    assert RefitConfig.from_mapping({"record": "r", "receivers": 2}).receivers == 2
    with pytest.raises(ValueError, match=r"`recievers` not known; known are .*receivers"):
        RefitConfig.from_mapping({"record": "r", "recievers": 2})
    with pytest.raises(ValueError, match="`record` is missing"):
        RefitConfig.from_mapping({})
    with pytest.raises(ValueError, match="must be a list of URLs"):
        RefitConfig.from_mapping({"record": "r", "gates": "http://a:1"})


REPORT = {
    "attempt": "ab" * 16,
    "mode": "mixed",
    "application": "asynchronous",
    "committed": {"version": 3, "baseline": "cd" * 16},
    "receivers": ["receiver/a/0", "receiver/a/1"],
    "totals": {"payloads": 2, "payload_bytes": 1500, "changed": 250, "elements": 10000, "bytes": 20000},
    "tensors": 7,
    "stages": {"peers": 0.5, "gate_closed": 1.5, "gate_closing": 1.25, "staged": 0.0, "gate_opened": 2.0},
    "from_the_future": [1],
}


def test_report():
    report = RefitReport.from_json(json.dumps(REPORT))
    assert (report.version, report.mode, report.changed, report.checkpoint_bytes) == (3, "mixed", 250, 20000)
    assert (report.changed_share, report.payload_share, report.seconds) == (0.025, 0.075, 2.0)
    assert list(report.stages) == ["peers", "gate_closing", "gate_closed", "gate_opened"]
    assert sum(report.stage_seconds.values()) == report.seconds
    assert report.raw["from_the_future"] == [1]
    assert json.loads(json.dumps(report.as_dict()))["stage_seconds"]["gate_opened"] == 0.5


@pytest.mark.parametrize("text", ["", "[]", "null", '{"attempt": "a"}', '{"committed": 3}', "x" * 1000])
def test_not_a_report(text):
    with pytest.raises(ValueError, match="not a report of a refit") as error:
        RefitReport.from_json(text)
    assert len(str(error.value)) < 400


def test_reports_and_configurations_do_not_need_torch():
    program = "import dcr_training.report, dcr_training.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("receivers", "2"),
        ("receivers", True),
        ("chunk_bytes", 1.5),
        ("threads", None),
        ("window_bytes", 0),
        ("window_bytes", "1"),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("source_grace_s", None),
        ("connect_timeout_s", "60"),
    ],
)
def test_values_of_a_wrong_kind_are_named(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}"):
        RefitConfig.from_mapping({"record": "r", name: value})
