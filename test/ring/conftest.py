"""Every test of the ring runs in every mode of the loop."""

import sys
from pathlib import Path

import pytest

from sglang_pp_spec.core.ring import Overlap

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, params=Overlap, ids=lambda overlap: overlap.name.lower())
def overlap(request, monkeypatch):
    """The mode, set on all worlds of the test."""
    from world import World

    monkeypatch.setattr(World, "overlap", request.param)
    return request.param
