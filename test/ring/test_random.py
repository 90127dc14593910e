"""Everything together: hypothesis draws prompts, limits, grammars, draft luck and events at any turn."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Oracle, mixed
from toy_scheduling import Event
from world import CHAIN, TREE, World, arrive

RIDS = "abcd"
arrivals = st.builds(
    lambda rid, turn, prompt, max_new, grammar, hit: arrive(
        rid, turn, prompt=prompt, max_new=max_new, grammar=grammar, cached=prompt if hit else 0
    ),
    st.sampled_from(RIDS),
    st.integers(0, 20),
    st.integers(1, 13),
    st.integers(1, 7),
    st.booleans(),
    st.booleans(),
)
disturbances = st.one_of(
    st.builds(Event.of, st.integers(1, 30), st.sampled_from(["abort", "retract"]), st.sampled_from(RIDS)),
    st.builds(Event.of, st.integers(1, 30), st.sampled_from(["permute", "pause"])),
)
HAZARDS = {"dropped": 0, "recomposed": 0, "retracted": 0, "aborted": 0, "paused": 0}


def without_overlapping_ids(events):
    """An id is used again only after its request was aborted in the same turn."""
    used, chosen = set(), []
    for event in sorted(events, key=lambda event: event.turn):
        if event.name == "arrive" and event.rid in used:
            chosen.append(Event.of(event.turn, "abort", event.rid))
        if event.name == "arrive":
            used.add(event.rid)
        chosen.append(event)
        if event.name == "pause":
            chosen.append(Event.of(event.turn + 2, "resume"))
    return sorted(chosen, key=lambda event: event.turn)


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    num_stages=st.integers(2, 4),
    depth=st.integers(0, 2),
    shape=st.sampled_from([CHAIN, TREE]),
    luck=st.integers(0, 1000),
    chunk=st.integers(2, 9),
    pool_size=st.sampled_from([50, 400]),
    events=st.lists(arrivals, min_size=1, max_size=5),
    others=st.lists(disturbances, max_size=5),
)
def run_one(num_stages, depth, shape, luck, chunk, pool_size, events, others):
    oracle = Oracle(
        shape.num_steps,
        accept=lambda step, rid: mixed(luck, step, len(rid)) // 5 % (shape.num_steps + 1),
        lost=lambda step, rid: mixed(luck, step) % 7 == 0,
    )
    world = World(
        num_stages,
        without_overlapping_ids([*events, *others]),
        depth=depth,
        shape=shape,
        chunk=chunk,
        pool_size=pool_size,
        max_running=2,
        oracle=oracle,
    )
    world.run().check_end()
    for what in HAZARDS:
        HAZARDS[what] += len(world.happened(what))


def test_any_traffic_ends_with_the_right_tokens_and_nothing_held():
    run_one()
    assert min(HAZARDS.values()) > 10, f"hazards that occurred: {HAZARDS}"
