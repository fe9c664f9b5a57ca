"""Tests of device memory: skipped, with a message, where there is no GPU."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no GPU: torch.cuda is not available on this machine")
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(skip)
