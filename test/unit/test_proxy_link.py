"""Hidden states on their way to the next stage: what of a stage's output travels."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.core.errors import PPSpecError
from sglang_pp_spec.core.settings import Settings
from sglang_pp_spec.host import proxy as proxy_module
from sglang_pp_spec.host.proxy import ProxyLink

DRAFTS = 3


def link() -> ProxyLink:
    return ProxyLink(SimpleNamespace(device="cpu", settings=Settings()), num_draft_tokens=DRAFTS)


def batch(rows: int, extend: bool = False) -> SimpleNamespace:
    return SimpleNamespace(reqs=[object()] * rows, forward_mode=SimpleNamespace(is_extend=lambda: extend))


def sent_by(proxy: ProxyLink, of: SimpleNamespace, tensors: dict) -> dict:
    """What goes the host's way, as every first batch does."""
    found: list[dict] = []
    proxy.scheduler._pp_send_dict_to_next_stage = lambda tensors, **_: found.append(tensors) or []
    proxy.send(of, tensors, launched=None)
    return found[0]


def test_rows_that_only_fill_a_cuda_graph_s_batch_do_not_travel():
    """A graph of 10 requests ran a batch of 9; its padding was sent too, and another layout ended the server."""
    tensors = {"hidden_states": torch.arange(60.0).view(30, 2), "residual": None, "__msg_type__": "proxy"}
    sent = sent_by(link(), batch(rows=9), tensors)
    assert torch.equal(sent["hidden_states"], tensors["hidden_states"][:27])
    assert sent["residual"] is None and sent["__msg_type__"] == "proxy"


def test_a_padded_first_batch_teaches_the_layout_of_its_requests_alone():
    """Learned from a padded batch there was no common layout, and every later one went with a description."""
    proxy = link()
    sent_by(proxy, batch(rows=9), {"hidden_states": torch.zeros(30, 2)})
    assert proxy._layouts["out"] is not None


def test_a_batch_that_fills_its_graph_and_a_prompt_travel_as_they_are():
    tensors = {"hidden_states": torch.zeros(27, 2)}
    assert sent_by(link(), batch(rows=9), tensors)["hidden_states"].shape == (27, 2)
    assert sent_by(link(), batch(rows=1, extend=True), tensors)["hidden_states"].shape == (27, 2)


def test_hidden_states_of_another_layout_are_named_with_their_shapes():
    proxy = link()
    sent_by(proxy, batch(rows=9), {"hidden_states": torch.zeros(27, 2)})
    with pytest.raises(PPSpecError, match=r"27 tokens.*\(27, 4\)"):
        proxy.send(batch(rows=9), {"hidden_states": torch.zeros(27, 4)}, launched=None)


class Stream:
    """A stream that writes down what it waits for."""

    def __init__(self) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.waited_for.append(stream)


@pytest.mark.parametrize(("on_sms", "expected"), [(True, ["forward stream"]), (False, [])])
def test_a_receive_that_takes_sms_while_it_waits_is_queued_behind_the_forwards_before_it(
    monkeypatch, on_sms: bool, expected: list[str]
) -> None:
    """NCCL's ran beside the other slot's forward and cost its kernels a sixth of their time."""
    proxy, stream, received = link(), Stream(), []
    proxy._layouts["in"] = proxy_module._layout_of({"hidden_states": torch.zeros(27, 2)}, 27)
    proxy._receives_on_sms = on_sms
    proxy.scheduler.forward_stream = "forward stream"
    proxy.scheduler.device_module = SimpleNamespace(Event=lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(proxy, "_stream", lambda way: contextlib.nullcontext(stream))
    monkeypatch.setattr(proxy, "_receive_one", lambda part, tokens: received.append(list(stream.waited_for)))
    proxy.receive(batch(rows=9))
    assert received == [expected]
