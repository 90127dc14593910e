"""Images, with Qwen3.5's vision tower on the first stage and the MTP module, which reads its output, on the last.

The built-in's server ends at its own warm-up, a chat about an image: the drafter asserts that it has the embeddings.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
import vision_checkpoint
from conftest import CHAIN, TREE, poisoned, streamed, with_overlap
from hybrid_checkpoint import CHECKPOINTS, NO_PREFIXES, nextn
from PIL import Image
from vision_checkpoint import IMAGE
from workloads import Ask, accept_length, ask_all, assert_same_but_one_round, few_shot, questions

from sglang_pp_spec.server import Reply, Server

ARMS = {
    "pp3-chain-streams-poisoned": lambda chain, tree: with_overlap(streamed(poisoned(replace(chain, pp=3)))),
    "pp4-tree": lambda chain, tree: with_overlap(replace(tree, pp=4)),
    "tp2-pp2-chain-accounting": lambda chain, tree: with_overlap(replace(chain, pp=2, tp=2), "accounting"),
}


def picture(seed: int, height: int = 64, width: int = 96) -> str:
    """A PNG of noise as a data URI; 32 x 32 pixels are a token."""
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def about(prompt: str, *pictures: str, max_new_tokens: int = 40) -> Ask:
    """A request about ``pictures``, which ``prompt`` has places for."""
    return Ask(prompt, max_new_tokens, ignore_eos=True, fields={"image_data": list(pictures)})


def one_each() -> list[Ask]:
    """The same words about six pictures of different sizes, and three requests without any, all in shared batches."""
    sizes = [(64, 96), (64, 64), (128, 128), (32, 96), (64, 96), (96, 64)]
    asks = [about(f"What is {IMAGE} about?", picture(i, *size)) for i, size in enumerate(sizes)]
    return [*asks, *(replace(ask, max_new_tokens=40, ignore_eos=True) for ask in questions(3))]


def several_in_chunks() -> list[Ask]:
    """Pictures in every chunk of prompts of some chunks."""
    texts = [few_shot(2, seed=seed) for seed in range(2)]
    return [
        about(f"{IMAGE}{text}{IMAGE} and {text[:90]}{IMAGE}?", *(picture(10 + 3 * i + n, 96, 96) for n in range(3)))
        for i, text in enumerate(texts)
    ]


WORKLOADS = {"one each": one_each, "several in chunks": several_in_chunks}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vision_checkpoint.write_checkpoint(tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def plain(model: str) -> Callable[[int], dict[str, list[Reply]]]:
    """What plain speculation with that topk replies, without a prefix cache."""

    @cache
    def of_topk(topk: int) -> dict[str, list[Reply]]:
        with Server(nextn(TREE if topk > 1 else CHAIN, model, NO_PREFIXES)) as server:
            replies = {name: ask_all(server, make()) for name, make in WORKLOADS.items()}
        assert len({reply.token_ids for reply in replies["one each"][:6]}) == 6, "pictures make no difference"
        assert accept_length(replies["one each"]) > 1.1, "too little is accepted to show drafts of nothing"
        return replies

    return of_topk


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest, model: str) -> Iterator[Server]:
    chain, tree = (nextn(replace(spec, mode="plugin"), model, CHECKPOINTS) for spec in (CHAIN, TREE))
    with Server(ARMS[request.param](chain, tree)) as server:
        yield server
        assert server.is_alive(), f"the server died during its tests\n{server.log_tail()}"


class TestPPSpecImages:
    """Replies and verify rounds are plain speculation's: the drafter has read the same embeddings."""

    @pytest.mark.parametrize("workload", WORKLOADS)
    def test_a_drafter_reads_the_embeddings_that_the_first_stage_made(self, arm: Server, plain, workload) -> None:
        assert_same_but_one_round(ask_all(arm, WORKLOADS[workload]()), plain(arm.spec.topk)[workload])

    def test_a_picture_that_is_a_prefix_now_is_read_again_by_nobody(self, arm: Server, plain) -> None:
        """Asked once more, one by one: prompts begin within what the tests before have left in the prefix cache."""
        again = [reply for ask in several_in_chunks() for reply in ask_all(arm, [ask])]
        assert all(reply.meta["cached_tokens"] > 0 for reply in again), "nothing was reused"
        assert_same_but_one_round(again, plain(arm.spec.topk)["several in chunks"])
