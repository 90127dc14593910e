"""Is decode really pipelined, and how far is it from the floor?

    python -m benchmark.schedule --pp 2 --slots 2 --stage-ms 200 --draft-ms 0
    python -m benchmark.schedule --pp 4 --slots 4 --stage-ms 200 --draft-ms 0
    python -m benchmark.schedule --pp 2 --slots 1 --requests 1 --stage-ms 200     # one request alone

Real SGLang servers on the CPU engine, whose stages sleep a known time in every target forward and draft, so that a
few cores are enough for all stages. Arms: this plugin, SGLang's built-in, the built-in with
``--pp-async-batch-depth 1`` (``--depth``), PP without speculation, and on demand this plugin with
``SGLANG_PP_SPEC_OVERLAP=on``, which has nothing to gain where forwards run on the host. Held fixed: machine, model,
prompts, greedy sampling to the same length, requests per slot (``--pp-max-micro-batch-size``), the sleeps and the
code that records busy times. One warm-up run per server is discarded; the arms that fit into memory together are
measured in turn; the numbers are medians.

The floor follows from each stage's own measured busy time in the same run: forward, draft extend and draft spans,
not the host's scheduling, tree building, sampling and accounting. With b_s the mean busy time of a decode step on
stage s and e_s the busy time of all prefill steps::

    floor = max(e) + rounds * max(slots * max(b), sum(b)) + sum(b) - max(b)      two or more slots
    floor = sum(e) + rounds * sum(b)                                             one slot

The last term of the first line is the fill. The measured wall time is the client's, HTTP included. What this cannot
show: streams, CUDA graphs and kernel times of a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from sglang_pp_spec.server import ServerSpec

from .arms import DEFAULT_DRAFT, DEFAULT_MODEL, Run, groups, prompts, serve
from .occupancy import busy_per_step, cycle_time, floor_seconds, prefill_busy, utilisation, write_spans
from .report import emit, provenance, table

ARMS = ("ours", "ours_overlap", "builtin", "builtin_depth", "nospec")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, print, return the result."""
    options = parse(argv)
    runs = measure(options)
    arms = {name: summary(own, options) for name, own in runs.items()}
    result = provenance() | {"settings": settings(options), **ratios(runs, arms, options), "arms": arms}
    print(render(arms, options))
    if options.occupancy:
        for name, own in runs.items():
            write_spans(Path(options.occupancy) / name, typical(own).spans)
    emit(result, options.json)
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--slots", type=int, help="slots with requests (default: as many as stages)")
    parser.add_argument("--stage-ms", type=float, default=200.0, help="sleep in every target forward")
    parser.add_argument("--draft-ms", type=float, default=0.0, help="sleep in every draft")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="generated per request")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--depth", type=int, default=1, help="--pp-async-batch-depth of the third arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[arm for arm in ARMS if arm != "ours_overlap"])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    parser.add_argument("--json", help="also write the result to this file")
    parser.add_argument("--occupancy", help="folder for the busy spans of one typical run per arm")
    options = parser.parse_args(argv)
    options.slots = options.slots or options.pp
    if options.requests < options.slots:
        parser.error("--requests must be at least --slots")
    return options


def per_slot(options: argparse.Namespace) -> int:
    """Requests per slot."""
    return -(-options.requests // options.slots)


def specs(options: argparse.Namespace) -> dict[str, ServerSpec]:
    """The arms' servers; they differ in mode, overlap and async depth only."""
    common = (
        *("--pp-max-micro-batch-size", str(per_slot(options))),
        *("--max-running-requests", str(options.requests)),
        "--skip-tokenizer-init",  # prompts are token ids
        "--disable-radix-cache",  # a repeated prompt is computed again
        *("--watchdog-timeout", "3600"),  # servers are stopped between their runs
    )
    env = {
        "SGLANG_PP_SPEC_STAGE_DELAY_MS": str(options.stage_ms),
        "SGLANG_PP_SPEC_DRAFT_DELAY_MS": str(options.draft_ms),
    }

    def spec(mode, *extra: str, **more_env: str) -> ServerSpec:
        return ServerSpec(
            options.model,
            options.draft,
            pp=options.pp,
            mode=mode,
            extra_args=common + extra,
            extra_env=env | more_env,
        )

    every = {
        "ours": spec("plugin"),
        "ours_overlap": spec("plugin", SGLANG_PP_SPEC_OVERLAP="on"),
        "builtin": spec("builtin"),
        "builtin_depth": spec("builtin", "--pp-async-batch-depth", str(options.depth)),
        "nospec": spec("nospec"),
    }
    return {name: every[name] for name in options.arms}


def measure(options: argparse.Namespace) -> dict[str, list[Run]]:
    """``--repeat`` runs per arm."""
    asked = prompts(options.requests, per_slot(options))
    runs: dict[str, list[Run]] = {name: [] for name in options.arms}
    for group in groups(specs(options)):
        print(f"starting {', '.join(group)}", flush=True)
        with serve(group) as arms:
            for arm in arms.values():
                arm.measure(asked, min(6, options.tokens))  # warm-up
            for repetition in range(options.repeat):
                for name, arm in arms.items():
                    run = arm.measure(asked, options.tokens)
                    runs[name].append(run)
                    print(f"run {repetition + 1}: {name} {run.wall:.2f} s", flush=True)
    return runs


def typical(runs: list[Run]) -> Run:
    """The run with the median wall time."""
    return sorted(runs, key=lambda run: run.wall)[(len(runs) - 1) // 2]


def run_floor(run: Run, options: argparse.Namespace) -> float:
    """The floor of one run, from its own spans."""
    spans = run.spans
    return floor_seconds(busy_per_step(spans), prefill_busy(spans, options.pp), run.rounds, options.slots)


def summary(runs: list[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Medians of an arm."""
    walls = [run.wall for run in runs]
    best = typical(runs)
    return {
        "wall_s": statistics.median(walls),
        "walls_s": walls,
        "floor_s": statistics.median(run_floor(run, options) for run in runs),
        "to_floor": statistics.median(run.wall / run_floor(run, options) for run in runs),
        "cycle_s": cycle_time(best.spans, options.slots),
        "utilisation": utilisation(best.spans),
        "busy_per_step_s": busy_per_step(best.spans),
        "prefill_busy_s": prefill_busy(best.spans, options.pp),
        "prefill_steps": sum(s.is_step and not s.is_decode for s in best.spans if s.stage == 0),
        "rounds": best.rounds,
        "verify_rounds": [reply.verify_rounds for reply in best.replies],
        "completion_tokens": sum(reply.completion_tokens for reply in best.replies),
    }


def ratios(runs: dict[str, list[Run]], arms: dict[str, dict], options: argparse.Namespace) -> dict[str, Any]:
    """What the targets speak of; ratios are medians over repetitions, each pair from the same repetition."""
    result: dict[str, Any] = {"to_floor": arms["ours"]["to_floor"] if "ours" in arms else None}
    keys = {name: name for name in ARMS[1:]} | {"builtin_depth": f"builtin_depth{options.depth}"}
    for name, key in keys.items():
        if name in runs and "ours" in runs:
            pairs = zip(runs[name], runs["ours"], strict=True)
            result[f"{key}_to_ours"] = statistics.median(other.wall / ours.wall for other, ours in pairs)
    tokens = [run.tokens for own in runs.values() for run in own]
    result["same_tokens"] = all(own == tokens[0] for own in tokens)
    return result


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The workload, as data."""
    names = ("pp", "slots", "stage_ms", "draft_ms", "requests", "tokens", "repeat", "depth")
    return {name: getattr(options, name) for name in names}


def render(arms: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    """The table."""
    header = ["arm", "wall s", "floor s", "/ floor", "/ ours", "cycle s", "rounds"]
    header += [f"busy {stage}" for stage in range(options.pp)]
    ours = arms.get("ours", {}).get("wall_s")
    rows = [
        [
            name,
            *(arm["wall_s"], arm["floor_s"], arm["to_floor"], arm["wall_s"] / ours if ours else None),
            *(arm["cycle_s"], arm["rounds"]),
            *(f"{share:.0%}" for share in arm["utilisation"]),
        ]
        for name, arm in arms.items()
    ]
    return table(header, rows)


if __name__ == "__main__":
    main()
