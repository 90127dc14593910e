"""Contract 14: who communicates when depends on the stage's number alone."""

import pytest

from sglang_pp_spec.core.ring import Operation, Overlap, turn_operations

PIPELINES = [(num_stages, stage) for num_stages in (2, 3, 4, 5, 8) for stage in range(num_stages)]
FRAME = (Operation.READ_FRAME, Operation.ADOPT_FRAME, Operation.ACCOUNT_FRAME)
ALWAYS = (Operation.TAKE_REQUESTS, Operation.SCHEDULE)
every_mode = pytest.mark.parametrize("overlap", Overlap, ids=lambda overlap: overlap.name.lower())


@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
def test_without_overlap_a_frame_is_done_with_before_the_slot_is_scheduled(num_stages, stage):
    assert turn_operations(stage, num_stages)[:5] == (*FRAME, *ALWAYS)


@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
def test_with_overlap_a_frame_is_read_after_everything_the_turn_launches_and_sends(num_stages, stage):
    operations = turn_operations(stage, num_stages, overlap=Overlap.ON)
    assert operations[:3] == (Operation.ADOPT_FRAME, *ALWAYS)
    assert operations[-2:] == (Operation.READ_FRAME, Operation.ACCOUNT_FRAME)


@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
def test_where_launches_need_host_lengths_a_frame_is_read_first_and_accounted_for_last(num_stages, stage):
    operations = turn_operations(stage, num_stages, overlap=Overlap.ACCOUNTING)
    assert operations[:4] == (Operation.READ_FRAME, Operation.ADOPT_FRAME, *ALWAYS)
    assert operations[-1] is Operation.ACCOUNT_FRAME


@every_mode
@pytest.mark.parametrize("num_stages", [2, 3, 4, 5, 8])
def test_between_two_schedulings_all_stages_do_the_same(num_stages, overlap):
    """Adopting, accounting and taking requests decide what is scheduled: their order is equal on every stage."""
    decide = {Operation.ADOPT_FRAME, Operation.ACCOUNT_FRAME, *ALWAYS}
    orders = {
        tuple(o for o in turn_operations(stage, num_stages, overlap=overlap) if o in decide)
        for stage in range(num_stages)
    }
    assert len(orders) == 1


@every_mode
@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
def test_each_end_of_each_link_has_its_operation(num_stages, stage, overlap):
    operations = turn_operations(stage, num_stages, overlap=overlap)
    assert len(set(operations)) == len(operations)
    assert (Operation.RECEIVE_PROXY in operations) is (stage > 0)
    assert (Operation.SEND_PROXY in operations) is (stage < num_stages - 1)
    assert (Operation.POST_FRAME in operations) is (stage < num_stages - 1)
    assert (Operation.SEND_FRAME in operations) is (stage == num_stages - 1)
    assert Operation.LAUNCH in operations


@every_mode
@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
def test_nothing_is_awaited_between_launch_and_sending_on(num_stages, stage, overlap):
    operations = turn_operations(stage, num_stages, overlap=overlap)
    sent = Operation.SEND_FRAME if stage == num_stages - 1 else Operation.SEND_PROXY
    assert operations.index(sent) == operations.index(Operation.LAUNCH) + 1


@every_mode
@pytest.mark.parametrize(("num_stages", "stage"), [(num, stage) for num, stage in PIPELINES if stage < num - 1])
def test_hidden_states_are_sent_before_the_frame_they_lead_to_is_awaited(num_stages, stage, overlap):
    operations = turn_operations(stage, num_stages, overlap=overlap)
    assert operations.index(Operation.SEND_PROXY) < operations.index(Operation.POST_FRAME)


@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), (2, 2), (2, -1), (0, 0)])
def test_no_pipeline_no_order(num_stages, stage):
    with pytest.raises(ValueError, match="no stage"):
        turn_operations(stage, num_stages)
