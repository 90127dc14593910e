"""What becomes of a step's rows whose requests have ended, where others asked for logprobs."""

from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.host.commit import with_others_over
from sglang_pp_spec.host.extras import _prompt_tokens_of


class Snapshot(SimpleNamespace):
    def copy(self):
        return Snapshot(**vars(self))


def test_rows_keep_their_places_and_requests_that_live_on_elsewhere_are_not_touched() -> None:
    """Rows were left out, and the logprobs of those behind them were read at the wrong places."""
    reqs = [SimpleNamespace(rid=name, finished_reason=None, finished_output=None) for name in "abc"]
    snapshot = Snapshot(reqs=reqs)
    rows = with_others_over(snapshot, [0, 2]).reqs
    assert [row.rid for row in rows] == ["a", "b", "c"]
    assert rows[0] is reqs[0] and rows[2] is reqs[2]
    assert rows[1].finished_reason is not None and rows[1].finished_output and rows[1].inflight_middle_chunks == 0
    assert reqs[1].finished_reason is None and snapshot.reqs is reqs


@pytest.mark.parametrize(
    ("owned", "expected"), [([0, 1, 2], [10, 20, 21, 30]), ([0, 2], [10, 30]), ([1], [20, 21]), ([], [])]
)
def test_a_prompt_s_logprobs_are_left_out_with_its_row(owned, expected) -> None:
    """SGLang reads them one after the other and does not step over those of a row it passes over."""
    counter = SimpleNamespace(calculate_num_input_logprobs=lambda req, length, start: length - start)
    scheduler = SimpleNamespace(batch_result_processor=SimpleNamespace(logprob_result_processor=counter))
    result = SimpleNamespace(extend_input_len_per_req=[4, 5, 1], extend_logprob_start_len_per_req=[3, 3, 0])
    of_owned = _prompt_tokens_of(scheduler, ["a", "b", "c"], result, owned)
    assert torch.tensor([10, 20, 21, 30])[of_owned].tolist() == expected
