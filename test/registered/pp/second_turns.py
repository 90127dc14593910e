"""How many second turns are wrong where a reply that was decoded is reused as a prefix, by arm.

    PYTHONPATH=. python test/registered/pp/second_turns.py

A random target of Qwen3.5's kind on the CPU engine; five servers, one after the other, two minutes and a half.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import hybrid_checkpoint
from conftest import CHAIN
from hybrid_checkpoint import CHECKPOINTS, NO_PREFIXES, nextn
from test_recurrent import long_replies, second_turns
from workloads import accept_length, ask_all

from sglang_pp_spec.server import Reply, Server


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = str(hybrid_checkpoint.write_checkpoint(Path(folder)))
        arms = {
            "plain speculation, no prefix cache": nextn(CHAIN, model, NO_PREFIXES),
            "built-in PP2": nextn(replace(CHAIN, mode="builtin", pp=2), model, CHECKPOINTS),
            "built-in PP3": nextn(replace(CHAIN, mode="builtin", pp=3), model, CHECKPOINTS),
            "built-in PP3, no prefix cache": nextn(replace(CHAIN, mode="builtin", pp=3), model, NO_PREFIXES),
            "plugin PP3": nextn(replace(CHAIN, mode="plugin", pp=3), model, CHECKPOINTS),
        }
        first: list[Reply] = []
        right: list[Reply] = []
        for name, spec in arms.items():
            with Server(spec) as server:
                turns = ask_all(server, long_replies())
                first = first or turns
                replies = ask_all(server, second_turns(model, first))
            right = right or replies
            reused = [reply.meta["cached_tokens"] for reply in replies]
            print(
                f"{name}: first turns wrong {num_different(turns, first)}, second turns wrong "
                f"{num_different(replies, right)} of {len(replies)}, {accept_length(replies):.3f} tokens a round, "
                f"reused {reused}",
                flush=True,
            )


def num_different(replies: list[Reply], reference: list[Reply]) -> int:
    """Replies with other tokens."""
    return sum(a.token_ids != b.token_ids for a, b in zip(replies, reference, strict=True))


if __name__ == "__main__":
    main()
