"""Busy time of a GPU from a profiler trace."""

import gzip
import json
from pathlib import Path

import pytest

from benchmark.device_time import busy_ms, excerpt, rank_of, read_trace, round_floor_ms, shared, spans_of


def kernel(start_us, length_us, cat="kernel", name="gemm"):
    return {"cat": cat, "ts": start_us, "dur": length_us, "name": name}


@pytest.mark.parametrize(
    ("events", "expected_ms"),
    [
        ([], 0.0),
        ([kernel(0, 1000), kernel(2000, 500)], 1.5),
        ([kernel(0, 1000), kernel(500, 1000)], 1.5),
        ([kernel(0, 3000), kernel(500, 1000)], 3.0),
        ([kernel(2000, 500), kernel(0, 1000, "gpu_memcpy")], 1.5),
        ([kernel(0, 1000), kernel(0, 9000, "cpu_op"), {"ph": "M"}], 1.0),
        ([kernel(0, 1000), kernel(0, 9000, name="ncclDevKernel_SendRecv")], 1.0),
    ],
)
def test_streams_that_run_at_once_count_once_and_the_host_counts_not_at_all(events, expected_ms):
    assert busy_ms(spans_of(events)) == pytest.approx(expected_ms)


def test_what_two_stages_of_one_device_ran_at_once_counts_once():
    """Where processes take turns on a device, an interrupted kernel lasts as long as both: 79 ms of a round of 44."""
    first, second = spans_of([kernel(0, 10_000), kernel(20_000, 1_000)]), spans_of([kernel(5_000, 10_000)])
    assert busy_ms(shared([first, second])) == pytest.approx(16.0)


def test_an_excerpt_is_the_middle_of_what_all_stages_recorded_on_one_clock():
    first, second = spans_of([kernel(0, 10_000), kernel(90_000, 10_000)]), spans_of([kernel(45_000, 60_000)])
    assert excerpt([first, second], 10.0) == [[], [(-22.5, 37.5)]]
    assert excerpt([first, second], 60.0) == [[(47.5, 57.5)], [(2.5, 62.5)]]


def test_a_trace_that_is_still_written_is_not_read(tmp_path):
    path = tmp_path / "a.trace.json.gz"
    whole = gzip.compress(json.dumps({"traceEvents": [kernel(0, 7)]}).encode())
    path.write_bytes(whole[: len(whole) // 2])
    assert read_trace(path) is None
    path.write_bytes(whole)
    assert read_trace(path) == [kernel(0, 7)]


def test_traces_are_ordered_by_stage_and_then_by_rank():
    names = ["7-TP-1-PP-0", "7-TP-0-PP-1", "7-TP-1-PP-1", "7-TP-0-PP-0", "7-TP-0"]
    ranks = [rank_of(Path(f"/tmp/PP-9/{name}.trace.json.gz")) for name in names]
    assert ranks == [(0, 1), (1, 0), (1, 1), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("per_gpu", "tp", "busy_slots", "expected_ms"),
    [
        ([6.0, 8.0], 1, 1, 14.0),  # one slot: its stages work in turn
        ([12.0, 16.0], 1, 2, 16.0),  # two slots: the slower stage works all the time
        ([4.0, 4.0, 20.0, 4.0], 1, 4, 20.0),
        ([10.0, 10.0, 10.0, 10.0], 1, 2, 20.0),  # too few slots to keep four stages busy
        ([6.0, 7.0], 2, 1, 7.0),  # one stage of two GPUs
        ([6.0, 7.0, 9.0, 8.0], 2, 1, 16.0),
    ],
)
def test_no_round_is_shorter_than_its_slowest_stage_nor_than_one_slot_s_way(per_gpu, tp, busy_slots, expected_ms):
    assert round_floor_ms(per_gpu, tp, busy_slots) == expected_ms
