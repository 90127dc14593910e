"""Every test of the ring runs in both modes of the loop."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, params=[False, True], ids=["sync", "overlap"])
def overlap(request, monkeypatch):
    """The mode, set on all worlds of the test."""
    from world import World

    monkeypatch.setattr(World, "overlap", request.param)
    return request.param
