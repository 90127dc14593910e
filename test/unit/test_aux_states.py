"""EAGLE3: what the drafter is fed is what one stage would have fed it, wherever the target's layers are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from torch import Tensor, nn

from sglang_pp_spec.core.errors import PPSpecError
from sglang_pp_spec.host import aux_states
from sglang_pp_spec.host.aux_states import KEY, complete_on_last_stage, joined, of_earlier_stages

NUM_LAYERS, HIDDEN = 6, 4


class Layer(nn.Module):
    """Adds its number + 1; hands its input out as SGLang's layers do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, hidden_states: Tensor, capture_output=None) -> Tensor:
        if capture_output is not None:
            capture_output(hidden_states)
        return hidden_states.add_(self.index + 1)  # in place: what was captured must not be this memory


class ListLayer(Layer):
    """A layer of SGLang's other kind, which takes the list itself."""

    def forward(self, hidden_states: Tensor, captured_last_layer_outputs=None, capture_output=None) -> Tensor:
        if captured_last_layer_outputs is not None:
            captured_last_layer_outputs.append(hidden_states.clone())
        return super().forward(hidden_states)


class SecretiveLayer(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class Stack(nn.Module):
    """The layers [start, end) of six, as a stage holds them."""

    def __init__(self, start: int, end: int, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.start_layer, self.end_layer, self.layers_to_capture = start, end, [1, 3, 5]
        self.layers = nn.ModuleList(kind(i) if start <= i < end else nn.Identity() for i in range(NUM_LAYERS))

    def forward(self, hidden_states: Tensor) -> PPProxyTensors:
        for i in range(self.start_layer, self.end_layer):
            hidden_states = self.layers[i](hidden_states, capture_output=None)
        return PPProxyTensors({"hidden_states": hidden_states})


class Target(nn.Module):
    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.model, self.capture_aux_hidden_states = stack, True


def inputs_of(*layers: int) -> Tensor:
    """What layers have before them if the first one has zeros, [2, len(layers) x HIDDEN]."""
    return torch.cat([torch.full((2, HIDDEN), float(i * (i + 1) // 2)) for i in layers], dim=-1)


def configure(monkeypatch, stack: nn.Module, stage: int, num_stages: int, layers: list[int]) -> Target:
    """The hook as stage ``stage`` runs it; the last stage says ``layers``."""
    group = SimpleNamespace(
        rank_in_group=stage,
        world_size=num_stages,
        is_last_rank=stage == num_stages - 1,
        broadcast_object=lambda mine, src: layers if mine is None else mine,
    )
    monkeypatch.setattr(aux_states, "get_parallel", lambda: SimpleNamespace(pp_size=num_stages, pp_group=group))
    monkeypatch.setattr(aux_states, "get_spec", lambda: SimpleNamespace(speculative_algorithm="EAGLE3"))
    target = Target(stack)
    aux_states.capture_on_every_stage(None, model=target, eagle_use_aux_hidden_state=True)
    return target


@pytest.mark.parametrize("kind", [Layer, ListLayer])
def test_a_stage_hands_out_the_inputs_of_its_own_layers_and_no_others(monkeypatch, kind: type[Layer]) -> None:
    stack = Stack(0, 4, kind)
    configure(monkeypatch, stack, stage=0, num_stages=2, layers=[1, 3, 5])
    out = stack(torch.zeros(2, HIDDEN)).tensors
    assert torch.equal(out[f"{KEY}0"], inputs_of(1, 3))
    assert torch.equal(out["hidden_states"], inputs_of(4))


def test_the_next_forward_does_not_see_what_the_one_before_captured_even_if_it_failed(monkeypatch) -> None:
    stack = Stack(0, 4)
    configure(monkeypatch, stack, stage=0, num_stages=2, layers=[1, 3, 5])
    with pytest.raises(RuntimeError):
        stack(torch.zeros(2, HIDDEN, dtype=torch.bool))
    for _ in range(2):
        assert torch.equal(stack(torch.zeros(2, HIDDEN)).tensors[f"{KEY}0"], inputs_of(1, 3))


def test_a_stage_without_such_a_layer_sends_hidden_states_alone(monkeypatch) -> None:
    stack = Stack(2, 3)
    configure(monkeypatch, stack, stage=1, num_stages=3, layers=[1, 3, 5])
    assert list(stack(torch.zeros(2, HIDDEN)).tensors) == ["hidden_states"]


@pytest.mark.parametrize(("start", "own"), [(3, [3, 5]), (5, [5])])
def test_the_last_stage_expects_the_inputs_of_its_own_layers_alone(monkeypatch, start: int, own: list[int]) -> None:
    """Some of SGLang's targets count what they captured, and fail if a layer of another stage is missing."""
    target = configure(monkeypatch, Stack(start, 6), stage=1, num_stages=2, layers=[])
    assert target.model.layers_to_capture == own
    assert target.capture_aux_hidden_states


def test_a_last_stage_without_such_a_layer_returns_plain_hidden_states(monkeypatch) -> None:
    """SGLang's targets unpack a pair where they were told to capture, whether they did or not."""
    stack = Stack(4, 6)
    stack.layers_to_capture = [1, 2, 3]
    target = configure(monkeypatch, stack, stage=1, num_stages=2, layers=[])
    assert target.capture_aux_hidden_states is False


def test_what_comes_after_the_last_layer_is_the_last_stage_s(monkeypatch) -> None:
    """gpt-oss can capture that, by the number of its layers."""
    stack = Stack(3, 6)
    stack.layers_to_capture = [1, 3, 6]
    assert configure(monkeypatch, stack, stage=1, num_stages=2, layers=[]).model.layers_to_capture == [3, 6]


def test_a_graph_that_was_captured_without_the_states_is_named(monkeypatch) -> None:
    """Such a prefill graph calls the layers' module past its hooks, and its replay runs no layer."""
    stack = Stack(0, 4)
    configure(monkeypatch, stack, stage=0, num_stages=2, layers=[1, 3, 5])
    monkeypatch.setattr(stack, "forward", lambda hidden_states: PPProxyTensors({"hidden_states": hidden_states}))
    with pytest.raises(PPSpecError, match="prefill's CUDA graph"):
        stack(torch.zeros(2, HIDDEN))


@pytest.mark.parametrize("layers", [[1, 3, 7], [-1, 2], []])
def test_a_draft_of_another_target_is_refused_by_the_layers_it_asks_for(monkeypatch, layers: list[int]) -> None:
    with pytest.raises(SystemExit, match="another target"):
        configure(monkeypatch, Stack(0, 4), stage=0, num_stages=2, layers=layers)


def test_a_target_whose_layers_keep_their_input_to_themselves_is_refused(monkeypatch) -> None:
    with pytest.raises(SystemExit, match="SecretiveLayer"):
        configure(monkeypatch, Stack(0, 4, SecretiveLayer), stage=0, num_stages=2, layers=[1])


def test_a_target_that_does_not_say_which_layers_are_captured_is_refused(monkeypatch) -> None:
    with pytest.raises(SystemExit, match="cannot be found"):
        configure(monkeypatch, nn.Linear(1, 1), stage=0, num_stages=2, layers=[1])


def completed(proxy: PPProxyTensors | None, own: Tensor, captures: bool) -> Tensor:
    output = SimpleNamespace(hidden_states=own)
    target = Target(Stack(3, NUM_LAYERS))
    target.model.layers_to_capture = [5] if captures else []
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=target))
    complete_on_last_stage(SimpleNamespace(logits_output=output), worker, None, pp_proxy_tensors=proxy)
    return output.hidden_states


def proxy_of(**parts: Tensor) -> PPProxyTensors:
    return PPProxyTensors({"hidden_states": torch.zeros(2, HIDDEN), "__msg_type__": "proxy"} | parts)


def test_the_drafter_gets_all_layers_in_order_even_with_more_than_ten_stages() -> None:
    """Keys sorted as text would put stage 10 before stage 2."""
    stages = {f"{KEY}{stage}": torch.full((2, HIDDEN), float(stage)) for stage in (10, 2, 0)}
    found = completed(proxy_of(**stages), torch.full((2, HIDDEN), 11.0), captures=True)
    assert found[0, ::HIDDEN].tolist() == [0, 2, 10, 11]


def test_final_hidden_states_are_no_part_of_what_the_drafter_gets() -> None:
    found = completed(proxy_of(**{f"{KEY}0": inputs_of(1, 3)}), torch.full((2, HIDDEN), 99.0), captures=False)
    assert torch.equal(found, inputs_of(1, 3))


def test_without_received_states_the_result_is_left_alone() -> None:
    own = torch.ones(2, HIDDEN)
    assert completed(proxy_of(), own, captures=True) is own
    assert completed(None, own, captures=True) is own


def test_stages_with_another_number_of_tokens_are_an_error() -> None:
    with pytest.raises(PPSpecError, match=r"\[3, 2\] tokens"):
        joined([torch.zeros(3, HIDDEN)], torch.zeros(2, HIDDEN), captures=True)


def test_only_aux_hidden_states_are_passed_on() -> None:
    part = inputs_of(1)
    assert of_earlier_stages(proxy_of(**{f"{KEY}0": part})) == {f"{KEY}0": part}
    assert of_earlier_stages(None) == {}


@pytest.mark.parametrize(("width", "own"), [(HIDDEN, False), (HIDDEN // 2, True)])
def test_a_narrower_head_keeps_its_own_embedding_and_others_get_the_target_s(
    monkeypatch, width: int, own: bool
) -> None:
    monkeypatch.setattr(aux_states, "get_parallel", lambda: SimpleNamespace(pp_size=2))
    monkeypatch.setattr(aux_states, "resolve_target_embed_and_head", lambda model: (None, "target's head"))
    config = SimpleNamespace(hidden_size=width, target_hidden_size=HIDDEN)
    head = SimpleNamespace(config=config, get_embed=lambda: "own embedding")
    worker = SimpleNamespace(
        draft_runner=SimpleNamespace(model=head),
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=None)),
    )
    found = aux_states.keep_own_embedding(lambda _: ("target's embedding", "target's head"), worker)
    assert found == ("own embedding" if own else "target's embedding", "target's head")
