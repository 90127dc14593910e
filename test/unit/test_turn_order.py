"""Contract 14: who communicates when depends on the stage's number alone."""

import pytest

from sglang_pp_spec.core.ring import Operation, turn_operations

PIPELINES = [(num_stages, stage) for num_stages in (2, 3, 4, 5, 8) for stage in range(num_stages)]
FIRST = (Operation.APPLY_FRAME, Operation.TAKE_REQUESTS, Operation.SCHEDULE)


@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
def test_a_frame_is_applied_before_requests_are_taken_and_the_slot_is_scheduled(num_stages, stage):
    """The end of a request that a stage decides while applying reaches all stages before any schedules it."""
    assert turn_operations(stage, num_stages)[:3] == FIRST


@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
def test_each_end_of_each_link_has_its_operation(num_stages, stage):
    operations = turn_operations(stage, num_stages)
    assert len(set(operations)) == len(operations)
    assert (Operation.RECEIVE_PROXY in operations) is (stage > 0)
    assert (Operation.SEND_PROXY in operations) is (stage < num_stages - 1)
    assert (Operation.POST_FRAME in operations) is (stage < num_stages - 1)
    assert (Operation.SEND_FRAME in operations) is (stage == num_stages - 1)
    assert Operation.LAUNCH in operations


@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
def test_nothing_is_awaited_between_launch_and_sending_on(num_stages, stage):
    operations = turn_operations(stage, num_stages)
    sent = Operation.SEND_FRAME if stage == num_stages - 1 else Operation.SEND_PROXY
    assert operations.index(sent) == operations.index(Operation.LAUNCH) + 1


@pytest.mark.parametrize(("num_stages", "stage"), [(num, stage) for num, stage in PIPELINES if stage < num - 1])
def test_hidden_states_are_sent_before_the_frame_they_lead_to_is_awaited(num_stages, stage):
    operations = turn_operations(stage, num_stages)
    assert operations.index(Operation.SEND_PROXY) < operations.index(Operation.POST_FRAME)


@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), (2, 2), (2, -1), (0, 0)])
def test_no_pipeline_no_order(num_stages, stage):
    with pytest.raises(ValueError, match="no stage"):
        turn_operations(stage, num_stages)
