"""Which memory a soak counts: what is another process's, or a mapped file, is no leak of the server's."""

from __future__ import annotations

import mmap
import os
import tempfile

import pytest

from benchmark import soak

APPS = [["GPU-a", "11", "300"], ["GPU-a", "12", "40"], ["GPU-b", "12", "200"], ["GPU-b", "99", "7000"]]
GPUS = [["GPU-a", "340"], ["GPU-b", "7200"]]


def memory(monkeypatch, own: dict[int, float], apps: list[list[str]]) -> dict[str, int]:
    monkeypatch.setattr(soak, "processes", lambda server: own)
    monkeypatch.setattr(soak, "nvidia_smi", lambda query: apps if "compute-apps" in query else GPUS)
    return soak.gpu_memory_mib(server=None)


def test_the_server_s_own_processes_are_counted_where_the_driver_tells_them_apart(monkeypatch) -> None:
    found = memory(monkeypatch, {11: 1.0, 12: 1.0}, APPS)
    assert found == {"GPU-a (own processes)": 340, "GPU-b (own processes)": 200}


@pytest.mark.parametrize("apps", [[], [["GPU-a", "[N/A]", "[N/A]"]], [["GPU-b", "99", "7000"]]])
def test_where_it_does_not_all_of_each_gpu_is(monkeypatch, apps) -> None:
    assert memory(monkeypatch, {11: 1.0}, apps) == {"GPU-a": 340, "GPU-b": 7200}


def test_readings_of_different_things_are_not_subtracted() -> None:
    assert soak.growth_mib({"a": 3, "b": 4}, {"b": 6, "a": 3}) == [0, 2]
    with pytest.raises(ValueError, match="first read of .*own.*then of"):
        soak.growth_mib({"a (own processes)": 3}, {"a": 3})


def test_host_memory_leaves_out_mapped_files():
    """A server's start had mapped 12 GB of libraries, which were gone at the end: the growth was minus 12 GB."""
    before = soak.own_memory_mib(os.getpid())
    kept = bytearray(os.urandom(1 << 20) * 64)
    with tempfile.TemporaryFile() as file:
        file.write(kept)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[:: mmap.PAGESIZE]) >= 0  # every page was read
            assert 60 < soak.own_memory_mib(os.getpid()) - before < 80


def test_a_process_that_has_ended_counts_nothing():
    assert soak.own_memory_mib(2**22 + 1) == 0.0
