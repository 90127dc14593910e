"""Whose GPU memory a soak counts: another process on the GPU is no leak of the server's, and none of its proof."""

from __future__ import annotations

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
