"""What several tests of the training side use."""

import shutil
import subprocess
import time

import pytest
from team import Team


@pytest.fixture(scope="module")
def team():
    """Two training ranks, for all tests of a module."""
    ranks = Team(2)
    yield ranks
    ranks.close()


@pytest.fixture
def relay(tmp_path, monkeypatch):
    """The address of a running relay, without a run key."""
    monkeypatch.setenv("DCR_INSECURE_LOOPBACK", "1")
    program = shutil.which("dcr")
    assert program, "the program dcr is not on PATH"
    address = tmp_path / "relay.address"
    listen = ["--listen=tcp://127.0.0.1:0", "--insecure-loopback", f"--address-file={address}"]
    process = subprocess.Popen([program, "relay", *listen])
    try:
        deadline = time.monotonic() + 20.0
        while not address.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield address.read_text().strip()
    finally:
        process.terminate()
        process.wait(10.0)
