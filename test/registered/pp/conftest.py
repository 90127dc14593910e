"""Shared servers: plain speculation answers every workload once per tree shape, then one plugin server at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
from workloads import CHUNK, WORKLOADS, ask_all

from sglang_pp_spec.server import Reply, Server, ServerSpec
from sglang_pp_spec.tiny import DRAFT_PATH, TARGET_PATH

CHAIN = ServerSpec(str(TARGET_PATH), str(DRAFT_PATH), extra_args=("--chunked-prefill-size", str(CHUNK)))
TREE = replace(CHAIN, topk=2, num_draft_tokens=4)


def depth(spec: ServerSpec, value: int) -> ServerSpec:
    """``spec`` with more slots than stages."""
    return replace(spec, extra_args=(*spec.extra_args, "--pp-async-batch-depth", str(value)))


ARMS = {
    "pp2-chain": replace(CHAIN, pp=2, mode="plugin"),
    "pp2-tree": replace(TREE, pp=2, mode="plugin"),
    "pp3-tree-depth1": depth(replace(TREE, pp=3, mode="plugin"), 1),
    "pp4-chain": replace(CHAIN, pp=4, mode="plugin"),
    "pp2-chain-depth2": depth(replace(CHAIN, pp=2, mode="plugin"), 2),
}


@dataclass(frozen=True)
class Arm:
    """A running plugin server and what plain speculation of the same tree shape replied to every workload."""

    name: str
    server: Server
    reference: dict[str, list[Reply]]


@pytest.fixture(scope="session")
def references() -> Callable[[ServerSpec], dict[str, list[Reply]]]:
    """Workload -> replies of plain EAGLE with the tree shape of a spec; one server start per shape."""

    @cache
    def of_topk(topk: int) -> dict[str, list[Reply]]:
        with Server(CHAIN if topk == 1 else TREE) as server:
            return {name: ask_all(server, make()) for name, make in WORKLOADS.items()}

    return lambda spec: of_topk(spec.topk)


@pytest.fixture(scope="class", params=ARMS)
def arm(request: pytest.FixtureRequest, references: Callable[[ServerSpec], dict[str, list[Reply]]]) -> Iterator[Arm]:
    """One plugin server after the other; all tests of a class run on a server before the next one starts."""
    spec = ARMS[request.param]
    reference = references(spec)
    with Server(spec) as server:
        yield Arm(request.param, server, reference)
        assert server.is_alive(), f"the server died during its tests\n{server.log_tail()}"
