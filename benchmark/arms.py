"""Servers that are compared: several real ones at a time, of which only the measured one may run.

An idle SGLang server polls, which takes cores from the one that is measured. So the others are stopped (SIGSTOP) and
continued for their turn.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_pp_spec.server import Reply, Server, ServerSpec

from .occupancy import Span, read_spans
from .report import available_gib

_GIB_PER_PROCESS = 0.7
_OTHER_PROCESSES = 3  # beside the stages: HTTP and tokenizer, detokenizer, resource tracker
_TINY = Path(__file__).resolve().parent.parent / "sglang_pp_spec" / "tiny"

#: What every server on a GPU is given: the backends that plan without host lengths, the type their kernels take, and
#: a KV pool of fixed size, so that servers that share a GPU leave each other room.
GPU_ARGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--dtype", "bfloat16"),
    *("--mem-fraction-static", "0.8", "--max-total-tokens", "131072"),
)
DEFAULT_MODEL, DEFAULT_DRAFT = str(_TINY / "target"), str(_TINY / "draft")


@dataclass(frozen=True)
class Run:
    """One measured batch of requests."""

    wall: float  # seconds, from the client's request to the last reply
    replies: tuple[Reply, ...]
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [reply.token_ids for reply in self.replies]

    @property
    def rounds(self) -> int:
        """Decode rounds of the request that needed most."""
        return max(reply.verify_rounds or reply.completion_tokens - 1 for reply in self.replies)


class ArmServer:
    """A server of one arm, stopped except while it is measured."""

    def __init__(self, name: str, spec: ServerSpec, timeline: Path) -> None:
        self.name = name
        self.timeline = timeline
        self._server = Server(spec, start_timeout_s=600, request_timeout_s=600, stop_timeout_s=2)

    @contextlib.contextmanager
    def running(self) -> Iterator[ArmServer]:
        """Start, then stop its processes until they are woken; end them on exit."""
        with self._server:
            try:
                self._server.pause()
                yield self
            finally:
                self._server.resume()

    def measure(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Run:
        """All prompts in one HTTP request, greedy, to the same length."""
        self._server.resume()
        try:
            time.sleep(0.5)  # let what was stopped catch up
            start = time.monotonic()
            replies = generate(self._server, prompts, max_new_tokens)
            end = time.monotonic()
            time.sleep(0.2)
            return Run(end - start, replies, tuple(read_spans(self.timeline, start, end)))
        finally:
            self._server.pause()


def generate(server: Server, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[Reply, ...]:
    """All prompts in one HTTP request, greedy, all to the same length."""
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
    }
    return tuple(Reply.from_json(reply) for reply in json.loads(server.post("/generate", body)))


@contextlib.contextmanager
def serve(specs: Mapping[str, ServerSpec]) -> Iterator[dict[str, ArmServer]]:
    """All arms of ``specs`` at once, each with its own timeline folder."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pp_spec-timeline-")))
        arms = {}
        for name, spec in specs.items():
            arm = ArmServer(name, _with_timeline(spec, folder / name), folder / name)
            arms[name] = stack.enter_context(arm.running())
        yield arms


def groups(specs: Mapping[str, ServerSpec]) -> list[dict[str, ServerSpec]]:
    """The arms in groups of at least two (the last may be smaller) that fit into memory together."""
    largest = max(spec.pp * spec.tp for spec in specs.values())
    room = int(available_gib() / ((largest + _OTHER_PROCESSES) * _GIB_PER_PROCESS))
    size = max(2, min(room, len(specs)))
    names = list(specs)
    return [{name: specs[name] for name in names[i : i + size]} for i in range(0, len(names), size)]


def prompts(count: int, per_slot: int) -> list[list[int]]:
    """Fixed prompts as byte values, which the byte-level test models take as token ids.

    Every slot gets the same ``per_slot`` different prompts and so needs the same rounds: no slot ends alone.
    """
    different = [list(f"Tom has {3 + i} apples and buys {2 * i + 5} more.".encode()) for i in range(per_slot)]
    return [different[i % per_slot] for i in range(count)]


def _with_timeline(spec: ServerSpec, folder: Path) -> ServerSpec:
    return replace(spec, extra_env=dict(spec.extra_env) | {"SGLANG_PP_SPEC_TIMELINE": str(folder)})
