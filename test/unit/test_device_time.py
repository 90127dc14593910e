"""Busy time of a GPU from a profiler trace."""

import gzip
import json

import pytest

from benchmark.device_time import busy_ms, is_complete, read_trace


def kernel(start_us, length_us, cat="kernel"):
    return {"cat": cat, "ts": start_us, "dur": length_us}


@pytest.mark.parametrize(
    ("events", "expected_ms"),
    [
        ([], 0.0),
        ([kernel(0, 1000), kernel(2000, 500)], 1.5),
        ([kernel(0, 1000), kernel(500, 1000)], 1.5),
        ([kernel(0, 3000), kernel(500, 1000)], 3.0),
        ([kernel(2000, 500), kernel(0, 1000, "gpu_memcpy")], 1.5),
        ([kernel(0, 1000), kernel(0, 9000, "cpu_op"), {"ph": "M"}], 1.0),
    ],
)
def test_streams_that_run_at_once_count_once_and_the_host_counts_not_at_all(events, expected_ms):
    assert busy_ms(events) == pytest.approx(expected_ms)


def test_a_trace_that_is_still_written_is_not_read(tmp_path):
    path = tmp_path / "a.trace.json.gz"
    whole = gzip.compress(json.dumps({"traceEvents": [kernel(0, 7)]}).encode())
    path.write_bytes(whole[: len(whole) // 2])
    assert not is_complete(path)
    path.write_bytes(whole)
    assert is_complete(path) and read_trace(path) == [kernel(0, 7)]
