"""What does a round's relay cost: messages, bytes, bytes nobody reads, and waits of the host?

    python -m benchmark.relay_budget --pp 2 --requests 4 --tokens 32

Counted in running servers on the CPU engine by ``sglang_pp_spec/cpu_engine/counting.py``, the same way for this
plugin and for SGLang's built-in. Held fixed: model, prompts, greedy sampling, number of requests. Counts of the
warm-up are subtracted.

A hop is what one stage sends another so that it learns a verify round's outcome: a frame, or the host's "output"
message. Requests and hidden states (the proxy) are counted apart. Bytes of a hop include its pickles. A byte is
unread if no torch function but a view touched it after it was received; a conversion to numpy or a list counts as
reading all that it covers.

Host waits per verify round and stage are copies between host and device that block, and event waits; ``sites`` lists
them all. A CPU has no device tensors, so which tensors would be on a device is inferred (see ``counting.py``),
kernels and attention planners are left out, and a copy that blocks on the CPU alone is told apart in ``CPU_ONLY``.
This shows which calls would block on a GPU, not for how long, and not waits inside kernels, planners or NCCL.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_pp_spec.server import Server, ServerSpec

from .arms import DEFAULT_DRAFT, DEFAULT_MODEL, generate, prompts
from .report import emit, provenance, table

HOPS = {"ours": "frame-VERIFY", "builtin": "output-verify"}
VERIFY = "DECODE"  # the mode of a verify round when SGLang starts it
# Call sites that copy to the host on the CPU engine but not with a GPU backend that plans on the device.
CPU_ONLY = {"sglang_pp_spec/host/tail_draft.py:_draft_next": "only where a backend plans from host lengths"}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Count, print, return the result."""
    options = parse(argv)
    counted = {"ours": count("plugin", options), "builtin": count("builtin", options)}
    arms = {name: budget(stages, HOPS[name]) for name, stages in counted.items()}
    print(render(arms))
    settings = {name: getattr(options, name) for name in ("pp", "requests", "tokens")}
    result = provenance() | {"settings": settings} | arms
    emit(result, options.json)
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    parser.add_argument("--json", help="also write the result to this file")
    return parser.parse_args(argv)


def count(mode, options: argparse.Namespace) -> dict[int, Counter[str]]:
    """Counters per stage of one measured batch."""
    asked = prompts(options.requests, options.requests)
    arguments = ("--max-running-requests", str(options.requests), "--skip-tokenizer-init", "--disable-radix-cache")
    with tempfile.TemporaryDirectory(prefix="pp_spec-count-") as folder:
        spec = ServerSpec(
            options.model,
            options.draft,
            pp=options.pp,
            mode=mode,
            extra_args=arguments,
            extra_env={"SGLANG_PP_SPEC_COUNT": folder},
        )
        print(f"starting {mode}", flush=True)
        with Server(spec, start_timeout_s=600, stop_timeout_s=2) as server:
            generate(server, asked, 4)
            before = read_counts(folder, options.pp)
            generate(server, asked, options.tokens)
            after = read_counts(folder, options.pp)
    return {stage: after[stage] - before[stage] for stage in after}


def read_counts(folder: str, num_stages: int, settle_s: float = 3.0) -> dict[int, Counter[str]]:
    """What the stages had counted when they last became idle."""
    time.sleep(settle_s)
    return {
        stage: Counter(json.loads((Path(folder) / f"count{stage}.json").read_text())) for stage in range(num_stages)
    }


def budget(stages: dict[int, Counter[str]], hop: str) -> dict[str, Any]:
    """The numbers of one arm. Counters are named ``phase|what|which|...``."""
    every = sum(stages.values(), Counter())
    hops = max(1, total(every, "hops", hop))
    rounds = {stage: max(1, counts[f"{VERIFY}|steps"]) for stage, counts in stages.items()}
    sites = {stage: waits(counts) for stage, counts in stages.items()}
    return {
        "hops": hops,
        "device_tensors_per_hop": total(every, "sent", hop) / hops,
        "host_messages_per_hop": total(every, "sent", f"{hop}/host") / hops,
        "bytes_per_hop": (total(every, "bytes", hop) + total(every, "bytes", f"{hop}/host")) / hops,
        "unread_bytes_per_hop": total(every, "unread", hop) / max(1, total(every, "delivered", hop)),
        "host_waits_per_round": {
            stage: sum(n for (_, site, _), n in own.items() if site not in CPU_ONLY) / rounds[stage]
            for stage, own in sites.items()
        },
        "cpu_only_waits_per_round": {
            stage: sum(n for (_, site, _), n in own.items() if site in CPU_ONLY) / rounds[stage]
            for stage, own in sites.items()
        },
        "sites_per_round": {
            stage: {" ".join(key).strip(): n / rounds[stage] for key, n in own.most_common()}
            for stage, own in sites.items()
        },
        "host_messages_awaited_per_round": {
            stage: sum(n for key, n in counts.items() if key.startswith(f"{VERIFY}|received|") and "host" in key)
            / rounds[stage]
            for stage, counts in stages.items()
        },
        "other_messages_per_round": {
            name: sum(total(counts, "sent", name) for counts in stages.values()) / min(rounds.values())
            for name in ("proxy", "proxy/host", "requests/host")
        },
    }


def total(counts: Counter[str], what: str, which: str) -> int:
    """Sum over all phases."""
    return sum(n for key, n in counts.items() if key.split("|")[1:3] == [what, which])


def waits(counts: Counter[str]) -> Counter[tuple[str, str, str]]:
    """(kind, call site, function) of the waits in verify rounds."""
    found: Counter[tuple[str, str, str]] = Counter()
    for key, n in counts.items():
        phase, what, *rest = key.split("|")
        if phase == VERIFY and what == "wait":
            found[tuple(rest)] += n
    return found


def render(arms: dict[str, dict[str, Any]]) -> str:
    """The table, and the call sites of the waits below it."""
    names = ("device_tensors_per_hop", "host_messages_per_hop", "bytes_per_hop", "unread_bytes_per_hop")
    rows = [[name.replace("_", " "), *(arm[name] for arm in arms.values())] for name in names]
    stages = next(iter(arms.values()))["host_waits_per_round"]
    for stage in stages:
        counted = [arm["host_waits_per_round"][stage] for arm in arms.values()]
        rows.append([f"host waits per round, stage {stage}", *counted])
    lines = [table(["", *arms], rows)]
    for name, arm in arms.items():
        for stage, sites in arm["sites_per_round"].items():
            lines += [f"{name}, stage {stage}: {n:.2f} x {site}" for site, n in sites.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
