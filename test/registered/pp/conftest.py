"""Shared servers: plain speculation answers every workload once per tree shape, then one plugin server at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from workloads import CHUNK, WORKLOADS, ask_all

from benchmark.arms import GPU_ARGS
from sglang_pp_spec.core.settings import COLOCATED
from sglang_pp_spec.server import Reply, Server, ServerSpec, num_gpus, uses_cpu_engine
from sglang_pp_spec.tiny import DRAFT_EAGLE3_PATH, DRAFT_PATH, TARGET_PATH

#: The GPU kernels take no float32. In bfloat16 another batch shape may flip a tie, so on a GPU tests that compare
#: tokens exactly are not expected to pass; ``test/gpu`` compares there.
MACHINE_ARGS = (
    ()
    if uses_cpu_engine(os.environ)
    else (*GPU_ARGS, "--max-running-requests", "32", "--cuda-graph-max-bs-decode", "16")
)
#: A request goes back to the queue every so many rounds, whether KV is short or not.
RETRACTING = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
CHAIN = ServerSpec(
    str(TARGET_PATH), str(DRAFT_PATH), extra_args=("--chunked-prefill-size", str(CHUNK), *MACHINE_ARGS)
)
TREE = replace(CHAIN, topk=2, num_draft_tokens=4)
EAGLE3 = replace(
    CHAIN, draft=str(DRAFT_EAGLE3_PATH), extra_args=(*CHAIN.extra_args, "--speculative-algorithm", "EAGLE3")
)
EAGLE3_TREE = replace(EAGLE3, topk=2, num_draft_tokens=4)


def on_gpus(spec: ServerSpec) -> ServerSpec:
    """``spec`` on as many GPUs as there are: where stages have none of their own, all share the first one."""
    enough = num_gpus(os.environ) >= spec.pp
    return spec if enough else replace(spec, extra_env={**spec.extra_env, COLOCATED: "1"})


def depth(spec: ServerSpec, value: int) -> ServerSpec:
    """``spec`` with more slots than stages."""
    return replace(spec, extra_args=(*spec.extra_args, "--pp-async-batch-depth", str(value)))


def paged(spec: ServerSpec) -> ServerSpec:
    """``spec`` with KV pages of 16 tokens; trees with pages need a GPU backend."""
    return replace(spec, extra_args=(*spec.extra_args, "--page-size", "16"))


def poisoned(spec: ServerSpec) -> ServerSpec:
    """``spec`` with free memory overwritten before every turn: what is read after it was freed shows."""
    return replace(spec, extra_env={**spec.extra_env, "SGLANG_PP_SPEC_POISON": "1"})


def streamed(spec: ServerSpec) -> ServerSpec:
    """``spec`` on the way that GPUs take through streams and events; on a GPU that is the only one."""
    return replace(spec, extra_env={**spec.extra_env, "SGLANG_PP_SPEC_STREAMS": "1"})


def with_overlap(spec: ServerSpec, how: str = "on") -> ServerSpec:
    """``spec`` with rounds launched before the round before is read ("on"), or accounted for ("accounting")."""
    return replace(spec, extra_env={**spec.extra_env, "SGLANG_PP_SPEC_OVERLAP": how})


def without_overlap(spec: ServerSpec) -> ServerSpec:
    """``spec`` with rounds launched after the frame of the round before is read; on a GPU that is not the default."""
    return replace(spec, extra_args=(*spec.extra_args, "--disable-overlap-schedule"))


PLUGIN_CHAIN, PLUGIN_TREE = replace(CHAIN, mode="plugin"), replace(TREE, mode="plugin")
ARMS = {
    "pp2-chain-streams": with_overlap(streamed(replace(PLUGIN_CHAIN, pp=2))),
    "tp2-pp2-tree": with_overlap(replace(PLUGIN_TREE, pp=2, tp=2)),
    "pp3-tree-depth1-poisoned-streams": with_overlap(streamed(poisoned(depth(replace(PLUGIN_TREE, pp=3), 1)))),
    "pp4-chain": with_overlap(replace(PLUGIN_CHAIN, pp=4)),
    "pp2-chain-depth2-page16": with_overlap(paged(depth(replace(PLUGIN_CHAIN, pp=2), 2))),
    "pp3-tree-depth2-accounting-streams": with_overlap(streamed(depth(replace(PLUGIN_TREE, pp=3), 2)), "accounting"),
    "pp3-chain-sync-streams": without_overlap(streamed(replace(PLUGIN_CHAIN, pp=3))),
    "pp4-tree-depth1-sync-poisoned": without_overlap(poisoned(depth(replace(PLUGIN_TREE, pp=4), 1))),
    "pp3-eagle3-tree-poisoned-streams": with_overlap(
        streamed(poisoned(replace(EAGLE3_TREE, mode="plugin", pp=3)))  # a layer of each stage is captured
    ),
}


@dataclass(frozen=True)
class Arm:
    """A running plugin server and what plain speculation of the same tree shape replied to every workload."""

    name: str
    server: Server
    reference: dict[str, list[Reply]]
    overlap: str  # "on", "accounting" or "off"
    timeline: Path  # folder of the stages' spans


@pytest.fixture(scope="session")
def references() -> Callable[[ServerSpec], dict[str, list[Reply]]]:
    """Workload -> replies of plain speculation with the drafter and tree of a spec; one server start for each."""

    @cache
    def of_plain(spec: ServerSpec) -> dict[str, list[Reply]]:
        with Server(spec) as server:
            return {name: ask_all(server, make()) for name, make in WORKLOADS.items()}

    plain = {(spec.draft, spec.topk): spec for spec in (CHAIN, TREE, EAGLE3_TREE)}
    return lambda spec: of_plain(plain[spec.draft, spec.topk])


@pytest.fixture(scope="class", params=ARMS)
def arm(
    request: pytest.FixtureRequest,
    references: Callable[[ServerSpec], dict[str, list[Reply]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Arm]:
    """One plugin server after the other; all tests of a class run on a server before the next one starts."""
    timeline = tmp_path_factory.mktemp("timeline")
    spec = ARMS[request.param]
    spec = replace(spec, extra_env={**spec.extra_env, "SGLANG_PP_SPEC_TIMELINE": str(timeline)})
    reference = references(spec)
    with Server(spec) as server:
        yield Arm(request.param, server, reference, spec.extra_env.get("SGLANG_PP_SPEC_OVERLAP", "off"), timeline)
        assert server.is_alive(), f"the server died during its tests\n{server.log_tail()}"
