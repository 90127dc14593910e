"""Contract 24: (algorithm, placement, stages, stage) -> build, skip, or refuse with the reason."""

from itertools import product

import pytest

from sglang_pp_spec.core.placement import SUPPORTED_ALGORITHMS, Action, Placement, decide

SUPPORTED = [*SUPPORTED_ALGORITHMS, *(name.lower() for name in SUPPORTED_ALGORITHMS)]
UNSUPPORTED = ["STANDALONE", "NGRAM", "LOOKAHEAD", "DFLASH", ""]
PIPELINES = [(num_stages, stage) for num_stages in (1, 2, 3, 4, 8) for stage in range(num_stages)]


@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
@pytest.mark.parametrize("algorithm", SUPPORTED)
def test_a_local_drafter_is_built_on_the_last_stage_and_nowhere_else(algorithm, num_stages, stage):
    decision = decide(algorithm, Placement.LAST_STAGE_LOCAL, num_stages, stage)
    assert decision.action is (Action.BUILD if stage == num_stages - 1 else Action.SKIP)
    assert decision.reason


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_exactly_one_stage_builds(num_stages):
    actions = [decide("EAGLE", Placement.LAST_STAGE_LOCAL, num_stages, stage).action for stage in range(num_stages)]
    assert actions == [Action.SKIP] * (num_stages - 1) + [Action.BUILD]


@pytest.mark.parametrize(("num_stages", "stage"), PIPELINES)
@pytest.mark.parametrize(
    ("algorithm", "placement"),
    [
        *product(UNSUPPORTED, Placement),
        *product(SUPPORTED, [Placement.PARTITIONED, Placement.MODEL_FREE]),
    ],
)
def test_everything_else_is_refused_on_every_stage_alike(algorithm, placement, num_stages, stage):
    """Alike: a stage that refuses alone leaves the others waiting for it."""
    decision = decide(algorithm, placement, num_stages, stage)
    assert decision.action is Action.REFUSE
    named = algorithm.upper() if placement is Placement.LAST_STAGE_LOCAL else placement.value
    assert named in decision.reason and "support" in decision.reason


@pytest.mark.parametrize(("num_stages", "stage"), [(2, 2), (2, -1), (0, 0)])
def test_a_stage_outside_the_pipeline_is_an_error(num_stages, stage):
    with pytest.raises(ValueError, match="no stage"):
        decide("EAGLE", Placement.LAST_STAGE_LOCAL, num_stages, stage)
