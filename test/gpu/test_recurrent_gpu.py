"""Targets of Qwen3.5's kind over stages on a GPU: recurrent states with CUDA graphs, and embeddings of images.

Stages share the first GPU where they have none of their own. The random targets' replies soon part in bfloat16, so
log probabilities are compared (``agreement.py``), and acceptance, since a lost tree gives the right text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "pp"))
import hybrid_checkpoint
import vision_checkpoint
from agreement import agreement, with_logprobs
from conftest import CHAIN, TREE, on_gpus
from hybrid_checkpoint import CHECKPOINTS, NO_PREFIXES, nextn
from test_images import one_each, several_in_chunks
from test_recurrent import WORKLOADS, long_replies, second_turns
from workloads import Ask, accept_length, ask_all

from sglang_pp_spec.server import Reply, Server, ServerSpec, started_together

ROUNDING = 0.125  # of a log probability, natural logarithm
PUBLISHED_DIM = 128  # of the gated delta rule's heads; the kernels were written for it
KERNELS = ("--linear-attn-prefill-backend", "triton", "--mm-attention-backend", "triton_attn")
STATES = ("--max-mamba-cache-size", "256")  # by default most of the GPU
CASES = {"chain_pp3": replace(CHAIN, pp=3), "tree_pp2": replace(TREE, pp=2)}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass(frozen=True)
class Pair:
    """The plugin's server and one of plain speculation, of the same target."""

    model: str
    ours: Server
    plain: Server


def started(spec: ServerSpec, model: str) -> Iterator[Pair]:
    ours, plain = (
        replace(nextn(one, model, prefixes), extra_env={})
        for one, prefixes in ((replace(spec, mode="plugin"), CHECKPOINTS), (replace(spec, pp=1), NO_PREFIXES))
    )
    ours, plain = (replace(one, extra_args=(*one.extra_args, *KERNELS, *STATES)) for one in (ours, plain))
    pair = Pair(model, Server(on_gpus(ours)), Server(plain))
    with started_together(pair.ours, pair.plain):
        assert "overlap on" in pair.ours.log()
        yield pair
        assert pair.ours.is_alive(), pair.ours.log_tail()


@pytest.fixture(scope="module", params=CASES)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("hybrid")
    yield from started(CASES[request.param], str(hybrid_checkpoint.write_checkpoint(folder, PUBLISHED_DIM)))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vision")
    yield from started(CASES["chain_pp3"], str(vision_checkpoint.write_checkpoint(folder, PUBLISHED_DIM)))


def compare(pair: Pair, asks: list[Ask], expected: list[Reply] | None = None) -> tuple[list[Reply], list[Reply]]:
    """Plain speculation's replies and the plugin's, which agree as far as rounding lets them."""
    wanted = with_logprobs(asks)
    plain = expected or ask_all(pair.plain, wanted)
    ours = ask_all(pair.ours, wanted)
    found = agreement(plain, ours)
    print(f"{found}; acceptance {accept_length(plain):.3f} plain, {accept_length(ours):.3f} plugin", flush=True)
    assert len(found.apart) > 4 * len(asks), "replies part too early to show anything"
    assert max(found.apart) <= ROUNDING and max(found.margins, default=0.0) <= 2 * ROUNDING
    return plain, ours


def assert_same_acceptance(plain: list[Reply], ours: list[Reply]) -> None:
    """Replies part, so rounds are compared over all of them together."""
    assert accept_length(plain) > 1.1
    assert accept_length(ours) == pytest.approx(accept_length(plain), rel=0.06)


def test_every_stage_goes_on_from_the_accepted_state(text: Pair) -> None:
    plain, ours = [], []
    for make in WORKLOADS.values():
        theirs, mine = compare(text, make())
        plain, ours = plain + theirs, ours + mine
    assert_same_acceptance(plain, ours)


def test_a_reply_that_is_a_prefix_now_brings_the_state_that_a_round_left(text: Pair) -> None:
    first = ask_all(text.ours, long_replies())
    asks = second_turns(text.model, first)
    _, replies = compare(text, asks)
    for reply, ask, before in zip(replies, asks, long_replies(), strict=True):
        prompt = len(ask.prompt) - len(b" And?") - before.max_new_tokens
        assert reply.meta["cached_tokens"] > prompt, "what was reused ends within the first prompt"


def test_a_drafter_reads_the_embeddings_that_the_first_stage_made(images: Pair) -> None:
    plain, ours = [], []
    for make in (one_each, several_in_chunks):
        theirs, mine = compare(images, make())
        plain, ours = plain + theirs, ours + mine
    assert len({reply.token_ids for reply in plain[:6]}) == 6, "pictures make no difference"
    assert_same_acceptance(plain, ours)
