"""The virtual-time model of the loop: limits that follow by hand, and a measured point."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.check_simulation import check, check_rounds, tolerance
from benchmark.simulate import Hang, Pipeline, simulate
from sglang_pp_spec.core import ring
from sglang_pp_spec.core.ring import Overlap

RESULTS = Path(__file__).parents[2] / "benchmark" / "results"
TWO_GPUS = RESULTS / "gpu_round_2gpu_tp1_round_large_overlap.json"
MEASURED = [*sorted(RESULTS.glob("schedule-*.json")), TWO_GPUS]


def test_equal_stages_with_all_slots_busy_are_at_the_floor_but_for_the_first_and_last_step():
    """Without host time and hops a stage never waits once the pipeline is full."""
    outcome = simulate(Pipeline(busy=(0.2,) * 4, slots=4, rounds=50))
    assert outcome.cycle == pytest.approx(4 * 0.2)
    assert outcome.wall == pytest.approx(outcome.floor)


def test_one_request_alone_takes_the_sum_of_its_stages_each_round():
    outcome = simulate(Pipeline(busy=(0.1, 0.2, 0.3), slots=1, rounds=10))
    assert outcome.cycle == pytest.approx(0.6)
    assert outcome.wall == pytest.approx(6.0)


def test_the_slowest_stage_with_its_draft_sets_the_cycle():
    outcome = simulate(Pipeline(busy=(0.1, 0.1, 0.15), slots=3, rounds=40))
    assert outcome.cycle == pytest.approx(3 * 0.15)
    assert max(outcome.utilisation) == outcome.utilisation[-1] > 0.95


def test_fewer_slots_than_stages_leave_stages_idle():
    outcome = simulate(Pipeline(busy=(0.1,) * 4, slots=2, rounds=40))
    assert outcome.cycle == pytest.approx(4 * 0.1)
    assert max(outcome.utilisation) < 0.55


def test_hops_lengthen_the_round_of_a_single_request_by_one_hop_per_stage():
    """Each stage sends once a round: proxies between neighbours, and the frame back to the first."""
    outcome = simulate(Pipeline(busy=(0.1,) * 3, slots=1, rounds=10, hop=0.01))
    assert outcome.cycle == pytest.approx(3 * 0.1 + 3 * 0.01)


@pytest.mark.timeout(60)
def test_sixty_four_stages_go_through():
    outcome = simulate(Pipeline(busy=(0.01,) * 64, slots=64, rounds=10))
    assert outcome.cycle == pytest.approx(0.64)


def test_a_schedule_that_receives_before_its_peer_sends_is_reported_as_a_hang(monkeypatch):
    """Stage 0 would wait for hidden states that nobody sends it."""
    operations = ring.turn_operations

    def wrong(stage, num_stages, **mode):
        return (ring.Operation.RECEIVE_PROXY, *operations(stage, num_stages, **mode))

    monkeypatch.setattr("benchmark.simulate.turn_operations", wrong)
    with pytest.raises(Hang, match="stage 0 waits for"):
        simulate(Pipeline(busy=(0.1, 0.1)))


def alone(**parts):
    return Pipeline(busy=(0.002, 0.002), slots=1, rounds=50, host=0.001, account=0.0005, **parts)


def test_with_overlap_a_device_never_waits_for_a_host_that_is_faster_than_the_round():
    assert simulate(alone(overlap=Overlap.ON, device=True)).cycle == pytest.approx(0.004)


def test_without_overlap_the_host_of_one_stage_stands_between_two_rounds():
    """The other stages prepare at the same time, while they wait for hidden states."""
    assert simulate(alone(device=True)).cycle == pytest.approx(0.004 + 0.0015)


def test_a_host_that_is_slower_than_the_round_sets_the_pace_even_with_overlap():
    slow = Pipeline(busy=(0.002, 0.002), slots=1, rounds=50, host=0.006, account=0.001, device=True)
    slow = replace(slow, overlap=Overlap.ON)
    assert simulate(slow).cycle == pytest.approx(0.007)


def test_where_the_forward_runs_on_the_host_overlap_hides_accounting_alone():
    """As on the CPU engine: a stage accounts while the others work."""
    assert simulate(alone()).cycle == pytest.approx(0.004 + 0.0015)
    assert simulate(alone(overlap=Overlap.ON)).cycle < simulate(alone()).cycle


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_the_model_is_within_its_tolerance_of_what_was_measured(path):
    measured = json.loads(path.read_text())
    for name, ratio in check(measured).items():
        assert abs(ratio - 1) <= tolerance(measured), f"{name}: simulated is {ratio:.2f} of measured"


def test_a_result_without_that_point_is_refused_by_its_name():
    with pytest.raises(ValueError, match="no arm ours_sync at batch size 1"):
        check_rounds(json.loads((RESULTS / "gpu_round_2gpu_tp1_round_large.json").read_text()))


def test_the_point_that_the_host_s_work_is_read_off_is_no_prediction():
    """It would agree whatever the model said."""
    points = check_rounds(json.loads(TWO_GPUS.read_text()))
    assert "ours_sync 1" not in points and {"ours 1", "ours_sync 32", "ours 64"} <= set(points)
