"""Which memory a soak counts: what is another process's, or a mapped file, is no leak of the server's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


HOLDS_64_MIB_AND_MAPS_64_MORE = """
import mmap, sys
SIZE = 64 << 20
held = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
print("started", flush=True)
sys.stdin.readline()
for page in range(0, SIZE, mmap.PAGESIZE):
    held[page] = 1
print("held", flush=True)
sys.stdin.readline()
sum(mapped[:: mmap.PAGESIZE])
print("read", flush=True)
sys.stdin.readline()
"""


def test_host_memory_leaves_out_mapped_files():
    """A server's start had mapped 12 GB of libraries, which were gone at the end: the growth was minus 12 GB.

    The memory is another process's: one that has run thousands of tests has 64 MiB to give without growing.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    command = [sys.executable, "-c", HOLDS_64_MIB_AND_MAPS_64_MORE, library]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    seen = []
    with process:
        for said in ("started\n", "held\n", "read\n"):
            assert process.stdout.readline() == said
            status = Path(f"/proc/{process.pid}/status").read_text()
            whole = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024
            seen.append((soak.own_memory_mib(process.pid), whole))
            process.stdin.write("\n")
            process.stdin.flush()
    (own_start, all_start), (own_held, all_held), (own_read, all_read) = seen
    assert own_held - own_start == pytest.approx(64, abs=2) and all_held - all_start == pytest.approx(64, abs=2)
    assert own_read - own_held == pytest.approx(0, abs=2) and all_read - all_held == pytest.approx(64, abs=2)


def test_a_process_that_has_ended_counts_nothing():
    assert soak.own_memory_mib(2**22 + 1) == 0.0
