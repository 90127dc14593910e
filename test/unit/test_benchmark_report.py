"""What benchmarks report about themselves, and how they read recorded spans."""

import json

import pytest

from benchmark import occupancy, report
from benchmark.occupancy import Span
from sglang_pp_spec.core.settings import Settings
from sglang_pp_spec.cpu_engine import delays


def step(stage: int, start: float, end: float, requests: tuple[int, ...], mode: str = "TARGET_VERIFY") -> Span:
    return Span(stage, "forward", mode, requests, start, end)


# Two stages, two slots, perfectly interleaved; the last stage drafts 0.5 s after each forward.
SPANS = [
    span
    for turn in range(6)
    for slot in [(turn % 2,)]
    for span in (
        step(0, 1.5 * turn, 1.5 * turn + 1.0, slot),
        step(1, 1.5 * turn + 1.0, 1.5 * turn + 2.0, slot),
        Span(1, "draft", "TARGET_VERIFY", slot, 1.5 * turn + 2.0, 1.5 * turn + 2.5),
    )
]


def test_the_last_line_of_the_output_is_the_same_object_as_the_file(tmp_path, capsys):
    print("a table")
    report.emit({"a": 1.5, "b": [1]}, str(tmp_path / "new" / "out.json"))
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last_line) == {"a": 1.5, "b": [1]} == json.loads((tmp_path / "new" / "out.json").read_text())


def test_provenance_names_versions_command_variables_commit_and_hardware(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN", "0")
    found = report.provenance(["benchmark/schedule.py", "--pp", "2"])
    assert found["argv"] == ["benchmark/schedule.py", "--pp", "2"]
    assert found["versions"]["python"] and "sglang" in found["versions"]
    assert found["environment"]["NCCL_P2P_DISABLE"] == "1" and "PATH" not in found["environment"]
    assert found["environment"]["SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN"] == "0"
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["memory_gib"] > 0
    assert "commit" in found


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setattr(report, "_git", lambda *_: "")
    assert report.commit() is None


def test_columns_of_a_table_line_up():
    lines = report.table(["arm", "wall"], [["ours", 1.0], ["a longer name", None]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].endswith("1.000") and lines[3].endswith("-")


def test_spans_survive_writing_and_reading(tmp_path):
    occupancy.write_spans(tmp_path, SPANS)
    assert occupancy.read_spans(tmp_path) == sorted(SPANS, key=lambda span: span.start)


def test_spans_outside_the_asked_time_are_left_out(tmp_path):
    occupancy.write_spans(tmp_path, SPANS)
    assert {span.requests for span in occupancy.read_spans(tmp_path, 0.0, 2.0)} == {(0,)}


def test_busy_time_of_the_last_stage_includes_its_draft():
    assert occupancy.busy_per_step(SPANS) == pytest.approx([1.0, 1.5])


def test_utilisation_is_busy_time_over_the_decode_phase():
    window = 1.5 * 5 + 2.5
    assert occupancy.utilisation(SPANS) == pytest.approx([6 * 1.0 / window, 6 * 1.5 / window])


def test_prefill_is_no_part_of_the_decode_phase():
    prefill = step(0, -50.0, -49.0, (0,), mode="EXTEND")
    assert occupancy.utilisation([prefill, *SPANS]) == occupancy.utilisation(SPANS)
    assert occupancy.prefill_busy([prefill, *SPANS], 2) == pytest.approx([1.0, 0.0])


def test_cycle_is_a_round_of_all_slots():
    assert occupancy.cycle_time(SPANS, slots=2) == pytest.approx(3.0)


def test_requests_that_ever_ran_together_share_a_slot():
    """A slot's batch shrinks as requests finish; its first request may be the first to finish."""
    batches = [(1, 2), (5,), (2,), (5, 6), (6,)]
    spans = [step(0, i, i + 1, requests) for i, requests in enumerate(batches)]
    slots = occupancy.slots_of(spans)
    assert [slots[span.requests] for span in spans] == [0, 1, 0, 1, 1]


def test_two_groups_that_meet_later_are_one_slot():
    spans = [step(0, 0, 1, (1,)), step(0, 1, 2, (2,)), step(0, 2, 3, (3,)), step(0, 3, 4, (1, 3))]
    slots = occupancy.slots_of(spans)
    assert slots[(1,)] == slots[(3,)] == slots[(1, 3)] != slots[(2,)]


@pytest.mark.parametrize(
    ("busy", "slots", "expected"),
    [
        ((1.0, 1.0), 2, 10 * 2 * 1.0 + 1.0),
        ((1.0, 1.5), 2, 10 * 2 * 1.5 + 1.0),  # the last stage with its draft is the narrow place
        ((1.0, 1.0, 1.0, 1.0), 2, 10 * 4 * 1.0 + 3.0),  # too few slots: the way through all stages is
        ((1.0, 1.5), 1, 10 * 2.5),
    ],
)
def test_the_floor_follows_from_busy_times(busy, slots, expected):
    assert occupancy.floor_seconds(busy, [0.0] * len(busy), rounds=10, slots=slots) == pytest.approx(expected)


def test_without_delay_and_timeline_no_hook_is_registered():
    """A server that is not measured must run the host's own functions."""

    class Registry:
        def register(self, *_):
            raise AssertionError("registered")

    delays.register(Registry(), Settings(enabled=True, cpu_engine=True))


def test_a_draft_span_belongs_to_the_batch_of_the_forward_before_it(tmp_path):
    recorder = delays.BusyRecorder(str(tmp_path))
    with recorder.span("draft"):
        pass  # before any forward: no stage to write it for
    recorder.enter_forward(1, "TARGET_VERIFY", [3, 4])
    with recorder.span("forward", sleep_ms=5):
        pass
    with recorder.span("draft"):
        pass
    forward, draft = occupancy.read_spans(tmp_path)
    assert (draft.name, draft.stage, draft.mode, draft.requests) == ("draft", 1, "TARGET_VERIFY", (3, 4))
    assert forward.is_step and forward.seconds >= 0.005
