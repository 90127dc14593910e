"""The CPU engine's gated delta rule and convolution against the textbook, a token or a path at a time."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import conv1d, normalize, silu, softplus

from sglang_pp_spec.cpu_engine import hooks, layers, operators, recurrent

KEY_HEADS, VALUE_HEADS, K_DIM, V_DIM, WIDTH, CHANNELS = 2, 4, 8, 6, 4, 10
PARENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 2, 0]])  # two trees of five nodes; node 0 is the root
FIRST_CHILD = torch.tensor([[1, 3, -1, -1, -1], [1, 2, 3, -1, -1]])
NEXT_SIBLING = torch.tensor([[-1, 2, -1, 4, -1], [-1, 4, -1, -1, -1]])


def path_to(tree: int, node: int) -> list[int]:
    path = [node]
    while path[0] != 0:
        path.insert(0, int(PARENTS[tree, path[0]]))
    return path


def projections(num_tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "q": torch.randn(1, num_tokens, KEY_HEADS, K_DIM),
        "k": torch.randn(1, num_tokens, KEY_HEADS, K_DIM),
        "v": torch.randn(1, num_tokens, VALUE_HEADS, V_DIM),
        "a": torch.randn(num_tokens, VALUE_HEADS),
        "b": torch.randn(num_tokens, VALUE_HEADS),
    }


A_LOG, DT_BIAS = torch.tensor([-2.0, -1.0, 0.0, 0.5]), torch.tensor([0.1, -0.3, 0.0, 1.0])


def textbook(state: torch.Tensor, given: dict[str, torch.Tensor], tokens: list[int]) -> tuple:
    """(state, outputs) head by head, in double precision: decay, replace what the key recalls, ask the query."""
    state = state.double().clone()
    outputs = torch.empty(len(tokens), VALUE_HEADS, V_DIM, dtype=torch.float64)
    for i, token in enumerate(tokens):
        for head in range(VALUE_HEADS):
            key_head = head * KEY_HEADS // VALUE_HEADS
            key = normalize(given["k"][0, token, key_head].double(), dim=0)
            query = normalize(given["q"][0, token, key_head].double(), dim=0) / K_DIM**0.5
            decay = (-A_LOG[head].double().exp() * softplus(given["a"][token, head].double() + DT_BIAS[head])).exp()
            write = torch.sigmoid(given["b"][token, head].double())
            state[head] *= decay
            recalled = state[head] @ key
            state[head] += torch.outer(write * (given["v"][0, token, head].double() - recalled), key)
            outputs[i, head] = state[head] @ query
    return state, outputs


def update(given, states, slots, starts, **more):
    """The operator as SGLang calls it."""
    return operators.delta_rule_update_cpu(
        A_LOG, DT_BIAS, given["q"], given["k"], given["v"], given["a"], given["b"], states, slots, starts,
        True, 1.0, 20.0, **more,
    )  # fmt: skip


def test_requests_go_on_from_their_slots_and_leave_their_states_there():
    given, states = projections(7), torch.randn(4, VALUE_HEADS, V_DIM, K_DIM)
    before = states.clone()
    out = update(given, states, torch.tensor([2, 0]), torch.tensor([0, 3, 7]))
    for slot, tokens in ((2, [0, 1, 2]), (0, [3, 4, 5, 6])):
        state, outputs = textbook(before[slot], given, tokens)
        torch.testing.assert_close(states[slot].double(), state, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(out[0, tokens].double(), outputs, atol=1e-5, rtol=1e-4)
    assert torch.equal(states[[1, 3]], before[[1, 3]])


@pytest.mark.parametrize("tree", [True, False])
def test_a_verify_leaves_the_state_and_writes_the_one_after_every_node(tree):
    given, states = projections(10), torch.randn(3, VALUE_HEADS, V_DIM, K_DIM)
    before, after = states.clone(), torch.full((6, 5, VALUE_HEADS, V_DIM, K_DIM), float("nan"))
    out = update(
        given, states, torch.tensor([1, 2]), torch.tensor([0, 5, 10]),
        disable_state_update=True,
        intermediate_states_buffer=after,
        intermediate_state_indices=torch.tensor([4, 3]),
        retrieve_parent_token=PARENTS if tree else None,
    )  # fmt: skip
    assert torch.equal(states, before)
    for request, (slot, row) in enumerate(((1, 4), (2, 3))):
        for node in range(5):
            path = path_to(request, node) if tree else list(range(node + 1))
            state, outputs = textbook(before[slot], given, [5 * request + step for step in path])
            torch.testing.assert_close(after[row, node].double(), state, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(out[0, 5 * request + node].double(), outputs[-1], atol=1e-5, rtol=1e-4)
    assert after[[0, 1, 2, 5]].isnan().all()


def test_one_decay_a_channel_is_refused():
    given = projections(1)
    with pytest.raises(NotImplementedError, match="one decay a head"):
        update(given, torch.zeros(1, 4, 6, 8), torch.tensor([0]), torch.tensor([0, 1]), is_kda=True)


def convolved(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Outputs of ``inputs`` [channels, tokens] behind ``WIDTH - 1`` earlier ones."""
    return silu(conv1d(inputs[None], weight[:, None], bias, groups=CHANNELS)[0])


@pytest.fixture
def filters() -> SimpleNamespace:
    torch.manual_seed(1)
    return SimpleNamespace(weight=torch.randn(CHANNELS, WIDTH), bias=torch.randn(CHANNELS))


def test_a_prompt_is_convolved_behind_what_its_slot_keeps_or_behind_zeros(filters):
    x, states = torch.randn(CHANNELS, 7), torch.randn(3, CHANNELS, WIDTH - 1)
    before = states.clone()
    out = recurrent.convolve_extend(
        x, filters.weight, filters.bias, "silu", states,
        torch.tensor([True, False]), torch.tensor([2, 0]), torch.tensor([0, 5, 7]),
    )  # fmt: skip
    for slot, start, end, kept in ((2, 0, 5, before[2]), (0, 5, 7, torch.zeros_like(before[0]))):
        inputs = torch.cat((kept, x[:, start:end]), dim=1)
        torch.testing.assert_close(out[:, start:end], convolved(inputs, filters.weight, filters.bias))
        assert torch.equal(states[slot], inputs[:, -(WIDTH - 1) :])
    assert torch.equal(states[1], before[1])


@pytest.mark.parametrize("tree", [True, False])
def test_nodes_are_convolved_behind_their_ancestors_and_the_slot_is_overwritten(filters, tree):
    """As on a GPU: whoever does not take the accepted window back goes on from the last node's."""
    x, states = torch.randn(2, CHANNELS, 5), torch.randn(4, CHANNELS, WIDTH - 1)
    before, windows = states.clone(), torch.full((5, 5, CHANNELS, WIDTH - 1), float("nan"))
    out = recurrent.convolve_nodes(
        x, states, filters.weight, filters.bias, "silu", torch.tensor([3, 1]), windows, torch.tensor([0, 2]),
        PARENTS if tree else None,
    )  # fmt: skip
    for request, (slot, row) in enumerate(((3, 0), (1, 2))):
        for node in range(5):
            path = path_to(request, node) if tree else list(range(node + 1))
            inputs = torch.cat((before[slot], x[request][:, path]), dim=1)
            torch.testing.assert_close(out[request, :, node], convolved(inputs, filters.weight, filters.bias)[:, -1])
            assert torch.equal(windows[row, node], inputs[:, -(WIDTH - 1) :])
        assert torch.equal(states[slot], x[request][:, -(WIDTH - 1) :])
    assert windows[[1, 3, 4]].isnan().all()


def test_parents_follow_from_the_links_of_a_tree():
    assert recurrent.parents_of_nodes(FIRST_CHILD, NEXT_SIBLING).tolist() == PARENTS.tolist()


@pytest.mark.parametrize("scratch_rows", [torch.tensor([5, 2, 0]), None])
def test_the_state_after_the_accepted_node_is_taken_and_none_where_none_was_accepted(scratch_rows):
    kept, per_step = torch.zeros(2, 7, 3), torch.randn(2, 6, 4, 3)
    slots, steps = torch.tensor([6, 1, 4], dtype=torch.int32), torch.tensor([2, -1, 0], dtype=torch.int32)
    hooks.take_steps_in_torch(None, kept, per_step, slots, steps, scratch_rows)
    rows = [0, 1, 2] if scratch_rows is None else scratch_rows.tolist()
    assert torch.equal(kept[:, 6], per_step[:, rows[0], 2]) and torch.equal(kept[:, 4], per_step[:, rows[2], 0])
    assert not kept[:, [0, 1, 2, 3, 5]].any()


def test_projections_are_split_and_queries_normed_beside_their_gates():
    qkvz, ba = torch.randn(3, 2 * KEY_HEADS * K_DIM + 2 * VALUE_HEADS * V_DIM), torch.randn(3, 2 * VALUE_HEADS)
    qkv, z, b, a = layers.split_projections(qkvz, ba, KEY_HEADS, VALUE_HEADS, K_DIM, V_DIM)
    assert torch.equal(torch.cat((qkv, z.flatten(1)), dim=1), qkvz) and torch.equal(torch.cat((b, a), dim=1), ba)
    q_gate, k, weight = torch.randn(3, 2 * 2 * K_DIM), torch.randn(3, K_DIM), torch.randn(K_DIM)
    q, k_normed, gate = layers.qk_norm_with_gate(q_gate, k, weight, weight, 0.0, K_DIM, 2)
    pairs = q_gate.view(3, 2, 2, K_DIM)
    assert torch.equal(gate, pairs[:, :, 1].reshape(-1, K_DIM))
    expected = normalize(pairs[:, :, 0].reshape(-1, K_DIM)) * K_DIM**0.5 * (1 + weight)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(k_normed, normalize(k) * K_DIM**0.5 * (1 + weight))


def test_gates_multiply_in_place_and_behind_a_norm():
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    gated = x.clone()
    layers.sigmoid_mul(gated, gate.view(3, 2, 4))
    torch.testing.assert_close(gated, x * gate.sigmoid())
    normed = layers.rmsnorm_gated(x, torch.full((8,), 2.0), gate, 0.0)
    torch.testing.assert_close(normed, normalize(x) * 8**0.5 * 2 * silu(gate))
    norm = SimpleNamespace(norm_before_gate=True, group_size=None, activation="swish", weight=torch.ones(8), eps=0.0)
    called = hooks.norm_and_gate_in_torch(lambda *_: "the host's", norm, x, gate)
    torch.testing.assert_close(called, normalize(x) * 8**0.5 * silu(gate))
    norm.norm_before_gate = False
    assert hooks.norm_and_gate_in_torch(lambda *_: "the host's", norm, x, gate) == "the host's"
