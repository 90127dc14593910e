"""The same questions to three servers in turn, and one table.

    python -m sglang_pp_spec.demo [--pp N] [--questions N] [--topk K] [--json FILE]

    plain     EAGLE on one stage: what every reply must equal
    plugin    PP x EAGLE through this plugin
    builtin   PP x EAGLE of SGLang itself, this plugin excluded

All questions of an arm are asked at once, greedy. Exit status 1 if a reply through the plugin differs from plain
EAGLE's, or its acceptance length falls short of it, or it took another number of verify rounds. Replies alone
would not do: the bonus token of a round is always right, so text survives a relay that loses every draft.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from sglang_pp_spec.check import all_checks
from sglang_pp_spec.core.checkpoint import PreflightFailure
from sglang_pp_spec.server import Mode, Reply, Server, ServerError, ServerSpec, uses_cpu_engine
from sglang_pp_spec.tiny import DRAFT_PATH, TARGET_PATH
from sglang_pp_spec.tiny.problems import Problem, final_number, held_out, prompt

ACCEPTANCE_SHARE = 0.999  # of plain EAGLE's acceptance length that the plugin must reach
SAMPLING = {"temperature": 0.0, "max_new_tokens": 160, "stop": ["\n\n"]}
_WARM_UP = {"temperature": 0.0, "max_new_tokens": 8}
_SEED = 7

OnUp = Callable[[], None]
OnReply = Callable[[Reply], None]


@dataclass(frozen=True)
class ArmResult:
    """One row of the table. A server that failed has `error` and no numbers."""

    name: Mode
    questions: int
    identical: int | None = None  # replies with plain EAGLE's tokens
    accuracy: float | None = None
    accept_length: float | None = None  # completion tokens per verify round, over all replies
    verify_rounds: int | None = None
    wall_s: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Asked:
    """What came back from one server."""

    replies: list[Reply]
    wall_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(argv)
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the servers' context managers
    try:
        environment_word = _preflight(console, options.pp)
    except PreflightFailure as failure:
        console.print(f"FAILED: {failure}", markup=False, soft_wrap=True)
        return 1
    problems = held_out(options.questions, _SEED)
    results = _run(console, options, problems)
    console.print(_table(results, options, environment_word))
    if options.json:
        options.json.write_text(json.dumps({"arms": [_as_json(result) for result in results]}, indent=2) + "\n")
    verdicts = faults(results)
    for verdict in verdicts:
        console.print(f"FAILED: {verdict}", markup=False, soft_wrap=True)
    if not verdicts:
        console.print(f"passed: {options.questions} replies through the plugin equal plain EAGLE's, token for token")
    return 1 if verdicts else 0


def arms(pp: int, topk: int) -> list[ServerSpec]:
    """The three servers; plain EAGLE, on one stage, comes first because the others are compared with it."""
    modes: tuple[tuple[Mode, int], ...] = (("plain", 1), ("plugin", pp), ("builtin", pp))
    return [ServerSpec(str(TARGET_PATH), str(DRAFT_PATH), pp=n, mode=mode, topk=topk) for mode, n in modes]


def ask(spec: ServerSpec, prompts: Sequence[str], on_up: OnUp, on_reply: OnReply) -> Asked:
    """Start one server, ask everything at once, stop it. The clock runs from first question to last reply."""
    with Server(spec) as server:
        server.generate(prompts[0], _WARM_UP)
        server.flush_cache(timeout_s=10)
        on_up()
        started = time.perf_counter()
        replies = server.generate(prompts, SAMPLING, concurrency=len(prompts), on_reply=on_reply)
        return Asked(replies, time.perf_counter() - started)


def summarise(name: Mode, asked: Asked, problems: Sequence[Problem], reference: Sequence[Reply] | None) -> ArmResult:
    """The row of one arm; `reference` holds plain EAGLE's replies, None when that server failed."""
    rounds = sum(reply.verify_rounds for reply in asked.replies)
    tokens = sum(reply.completion_tokens for reply in asked.replies)
    pairs = zip(asked.replies, problems, strict=True)
    return ArmResult(
        name=name,
        questions=len(problems),
        identical=None if reference is None else _num_identical(asked.replies, reference),
        accuracy=sum(final_number(reply.text) == problem.number for reply, problem in pairs) / len(problems),
        accept_length=round(tokens / rounds, 4) if rounds else None,
        verify_rounds=rounds,
        wall_s=round(asked.wall_s, 2),
    )


def _num_identical(replies: Sequence[Reply], reference: Sequence[Reply]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(replies, reference, strict=True))


def faults(results: Sequence[ArmResult]) -> list[str]:
    """What speaks against the plugin; empty when its replies, acceptance and rounds are plain EAGLE's."""
    by_name = {result.name: result for result in results}
    plain, plugin = by_name["plain"], by_name["plugin"]
    failed = [f"{arm.name}: {arm.error}" for arm in (plain, plugin) if arm.error]
    if failed:
        return failed
    found = []
    if plugin.identical != plugin.questions:
        found.append(f"{plugin.questions - (plugin.identical or 0)} of {plugin.questions} replies differ from plain")
    if not plain.accept_length:
        found.append("plain EAGLE reports no verify rounds: nothing was speculated")
    elif (plugin.accept_length or 0.0) < ACCEPTANCE_SHARE * plain.accept_length:
        found.append(f"acceptance length {plugin.accept_length}, plain EAGLE has {plain.accept_length}")
    if plugin.verify_rounds != plain.verify_rounds:
        found.append(f"{plugin.verify_rounds} verify rounds, plain EAGLE took {plain.verify_rounds}")
    return found


def _run(console: Console, options: argparse.Namespace, problems: Sequence[Problem]) -> list[ArmResult]:
    """Every arm in turn, with a line of progress each."""
    prompts = [prompt(problem.question) for problem in problems]
    results: list[ArmResult] = []
    reference: list[Reply] | None = None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for spec in arms(options.pp, options.topk):
            title = _title(spec.mode, spec.pp)
            task = progress.add_task("", total=len(prompts))
            on_up, on_reply = _reporters(progress, task, title)
            _show(progress, task, f"{title}: starting")
            try:
                asked = ask(spec, prompts, on_up, on_reply)
            except ServerError as error:
                _show(progress, task, f"{title}: failed")
                console.print(str(error), markup=False, soft_wrap=True)
                results.append(ArmResult(spec.mode, len(prompts), error=str(error).splitlines()[0]))
                continue
            _show(progress, task, f"{title}: done")
            if spec.mode == "plain":
                reference = asked.replies
            results.append(summarise(spec.mode, asked, problems, reference))
    return results


def _show(progress: Progress, task: TaskID, text: str) -> None:
    """On a terminal the bar's text changes; in a log, where no bar is drawn, a line is written."""
    progress.update(task, description=text)
    if not progress.console.is_terminal:
        progress.console.print(text)


def _reporters(progress: Progress, task: TaskID, title: str) -> tuple[OnUp, OnReply]:
    def on_up() -> None:
        _show(progress, task, f"{title}: asking")

    def on_reply(_: Reply) -> None:
        progress.advance(task)

    return on_up, on_reply


def _preflight(console: Console, num_stages: int) -> str:
    """Run every check; returns what serves, in a word."""
    with console.status("checking the installation"):
        for check in all_checks(os.environ, num_stages):
            check()
    return "CPU engine, float32" if uses_cpu_engine(os.environ) else "GPU"


def _table(results: Sequence[ArmResult], options: argparse.Namespace, where: str) -> Table:
    shape = "chain" if options.topk == 1 else f"topk {options.topk} tree"
    table = Table(title=f"{options.questions} word problems, {shape}, {where}")
    for heading in ("server", "accuracy", "accept length", "verify rounds", "same as plain", "wall time"):
        is_first = heading == "server"
        table.add_column(heading, justify="left" if is_first else "right", no_wrap=is_first)
    for result in results:
        title = _title(result.name, options.pp)
        if result.error:
            table.add_row(title, "failed", *[""] * 4)
            continue
        accept = "-" if result.accept_length is None else f"{result.accept_length:.3f}"
        table.add_row(
            title,
            f"{result.accuracy:.1%}",
            accept,
            str(result.verify_rounds),
            "-" if result.identical is None else f"{result.identical}/{result.questions}",
            f"{result.wall_s:.1f} s",
        )
    return table


def _title(mode: Mode, pp: int) -> str:
    return {
        "plain": "plain EAGLE",
        "plugin": f"PP{pp} x EAGLE, plugin",
        "builtin": f"PP{pp} x EAGLE, built-in",
    }.get(mode, mode)


def _as_json(result: ArmResult) -> dict[str, object]:
    row = asdict(result)
    if row["error"] is None:
        del row["error"]
    return row


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sglang_pp_spec.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default 2)")
    parser.add_argument("--questions", type=int, default=40, help="how many questions (default 40)")
    parser.add_argument("--topk", type=int, default=1, help="1 for a chain, 2 for a tree (default 1)")
    parser.add_argument("--json", type=Path, help="write the table's numbers to this file")
    options = parser.parse_args(argv)
    if min(options.pp, options.questions, options.topk) < 1:
        parser.error("--pp, --questions and --topk start at 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
