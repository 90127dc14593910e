"""The benchmark of the contract's own cost still fits the code it measures; its figures are not judged here."""

from benchmark.frame_cost import report


def test_every_part_of_a_frames_cost_is_measured():
    """It once called the ledger in an order that the ledger had begun to refuse."""
    result = report(rows=4, repeats=50)
    assert set(result["us"]) == {"identify", "launch_and_settle", "begin_frame", "check_frame"}
    assert all(us > 0 for us in result["us"].values())
