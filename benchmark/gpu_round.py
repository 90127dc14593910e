"""How long is a decode round on GPUs, ours against SGLang's built-in and against one stage?

    python -m benchmark.gpu_round --model M/target --draft M/draft --arms ours,builtin,tp1 --json OUT.json

    python -m benchmark.gpu_round --colocated --model M/target --draft M/draft     # both stages on one GPU

Held fixed: model, prompts, batch, EAGLE 2/1/3, greedy, CUDA graphs, Triton attention. A batch is asked twice, for few
and for many tokens; ms per round = difference in time / difference in rounds of its slowest request, so prefill and
HTTP cancel. Per arm and batch size: median and spread of ``--repeat`` pairs. The device time of a round comes from
two shorter batches under the PyTorch profiler, differenced in the same way: the busy time of the GPU that all stages
share, or the shortest round that stages busy for so long allow (``device_time.round_floor_ms``). ``to_device`` is
round time over device time. Only the server that is measured runs, each stage on cores of its own; the others are
stopped.

With ``--colocated`` stages share one GPU and every arm of several stages uses the same CUDA IPC channel. Stages take
turns on that GPU; those of an arm called ``..._mps`` run side by side, each on an equal part of its SMs. Last line of
output: one JSON object. Exit status 1 if an arm failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from sglang_pp_spec.core.settings import COLOCATED
from sglang_pp_spec.server import Reply, Server, ServerSpec

from . import device_time
from .mps import mps_server
from .pin import pin_stages
from .report import emit, nvidia_smi, provenance

PROMPT_TOKENS = 64
FEW = 32
PROFILED = 8, 40  # under the profiler, whose traces take long to write
LONG_REPLY = 128
MAX_RUNNING = 64
SLOT_FILL = "SGLANG_PP_SPEC_SLOT_FILL"


@dataclass(frozen=True)
class Arm:
    """One way to serve the model."""

    mode: str
    pp: int
    tp: int
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    mps: bool = False

    def rows_per_slot(self, batch_size: int) -> int:
        """How many requests of a batch that comes at once share a slot: SGLang fills one slot after the other."""
        full = MAX_RUNNING // self.pp
        if self.mode != "plugin":
            return min(batch_size, full)
        return min(batch_size, full, max(int(self.env.get(SLOT_FILL, "1")), -(-batch_size // self.pp)))

    def busy_slots(self, batch_size: int) -> int:
        """How many slots such a batch keeps busy."""
        return -(-batch_size // self.rows_per_slot(batch_size))


def arms(num_gpus: int, tp: int) -> dict[str, Arm]:
    """All arms on ``num_gpus`` GPUs: pipelines of num_gpus / tp stages, and one stage on the same GPUs."""
    pp, sync = num_gpus // tp, ("--disable-overlap-schedule",)
    known = {
        "ours": Arm("plugin", pp, tp),
        "ours_one_slot": Arm("plugin", pp, tp, env={SLOT_FILL: str(MAX_RUNNING)}),
        "ours_sync": Arm("plugin", pp, tp, sync),
        "builtin": Arm("builtin", pp, tp, sync),
        "builtin_depth1": Arm("builtin", pp, tp, (*sync, "--pp-async-batch-depth", "1")),
        "pp2_nospec": Arm("nospec", pp, tp, sync),
        "tp1": Arm("plain", 1, 1, sync),
        "tp1_overlap": Arm("plain", 1, 1),
        "tp_all": Arm("plain", 1, num_gpus, sync),
        "tp_all_overlap": Arm("plain", 1, num_gpus),
    }
    return known | {f"{name}_mps": replace(arm, mps=True) for name, arm in known.items() if arm.pp > 1}


def spec_of(arm: Arm, options: argparse.Namespace) -> ServerSpec:
    """The server of an arm."""
    longest = max(PROMPT_TOKENS + options.tokens, options.long_prompt + LONG_REPLY)
    graph_sizes = sorted({1, 2, 4, 8, *options.batch_sizes, *map(arm.rows_per_slot, options.batch_sizes)})
    fixed = (
        *("--attention-backend", options.attention_backend, "--sampling-backend", "pytorch"),
        *("--mem-fraction-static", "0.93", "--max-total-tokens", str(max(options.batch_sizes) * (longest + 64))),
        *("--max-running-requests", str(MAX_RUNNING), "--cuda-graph-bs-decode", *map(str, graph_sizes)),
        *("--context-length", "16384", "--disable-radix-cache", "--skip-tokenizer-init"),
    )
    env = dict(arm.env)
    if options.colocated and arm.pp > 1:
        env[COLOCATED] = "1"
    if arm.mps:
        env |= options.mps | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // arm.pp)}
    spec = ServerSpec(options.model, options.draft, pp=arm.pp, tp=arm.tp, mode=arm.mode, extra_env=env)
    return replace(spec, extra_args=(*fixed, *arm.args, *options.server_args.split()))


def ask(
    server: Server, batch_size: int, num_tokens: int, seed: int, prompt_tokens: int
) -> tuple[float, int, list[Reply]]:
    """(seconds, rounds of the slowest request, replies) of one batch of random prompts, asked as one request."""
    rng = Random(seed)
    prompts = [[rng.randrange(3, 30000) for _ in range(prompt_tokens)] for _ in range(batch_size)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True},
    }
    start = time.monotonic()
    answers = json.loads(server.post("/generate", body))
    elapsed = time.monotonic() - start
    replies = [Reply.from_json(answer) for answer in answers]
    return elapsed, max(r.verify_rounds or r.completion_tokens for r in replies), replies


def measure(server: Server, batch_size: int, options: argparse.Namespace) -> dict[str, object]:
    """ms per round of one batch size."""
    ask(server, batch_size, FEW, seed=999, prompt_tokens=PROMPT_TOKENS)
    rounds_ms, lengths = [], []
    for repeat in range(options.repeat):
        short_s, short_rounds, _ = ask(server, batch_size, FEW, seed=repeat, prompt_tokens=PROMPT_TOKENS)
        long_s, long_rounds, replies = ask(
            server, batch_size, options.tokens, seed=repeat, prompt_tokens=PROMPT_TOKENS
        )
        rounds_ms.append(1000 * (long_s - short_s) / max(1, long_rounds - short_rounds))
        verifies = sum(r.verify_rounds for r in replies)
        lengths.append(sum(r.completion_tokens for r in replies) / verifies if verifies else 1.0)
    return {
        "ms_per_round": round(statistics.median(rounds_ms), 3),
        "ms_all": [round(ms, 3) for ms in rounds_ms],
        "accept_length": round(statistics.median(lengths), 3),
    }


def measure_device(server: Server, batch_size: int, arm: Arm, options: argparse.Namespace) -> dict[str, object]:
    """Device milliseconds per round: busy time of a long batch less that of a short one."""
    found: list[tuple[list[float], int]] = []
    gpus: list[device_time.Spans] = []
    for tokens in PROFILED:
        with tempfile.TemporaryDirectory(prefix="pp_spec-trace-") as folder:
            device_time.start(server, Path(folder))
            _, rounds, _ = ask(server, batch_size, tokens, seed=500, prompt_tokens=PROMPT_TOKENS)
            gpus = device_time.stop(server, Path(folder), arm.pp * arm.tp)
            if not all(gpus):
                raise RuntimeError("a stage's trace shows no device work")
            found.append(([device_time.busy_ms(spans) for spans in [*gpus, device_time.shared(gpus)]], rounds))
    (few, few_rounds), (many, many_rounds) = found
    *per_gpu, together = [(b - a) / max(1, many_rounds - few_rounds) for a, b in zip(few, many, strict=True)]
    floor = device_time.round_floor_ms(per_gpu, arm.tp, arm.busy_slots(batch_size))
    keeps = options.excerpt_ms and batch_size == options.batch_sizes[0]
    return {
        "device_ms_per_round": round(together if options.colocated else floor, 3),
        "device_ms_per_gpu": [round(ms, 3) for ms in per_gpu],
    } | ({"device_spans_ms": device_time.excerpt(gpus, options.excerpt_ms)} if keeps else {})


def measure_long_prompt(server: Server, batch_size: int, options: argparse.Namespace) -> dict[str, float]:
    """TTFT and TPOT (ms) and tokens per second with ``--long-prompt`` tokens, of a whole batch at once."""
    tokens = options.long_prompt
    ask(server, batch_size, 1, seed=77, prompt_tokens=tokens)
    first_s, _, _ = ask(server, batch_size, 1, seed=78, prompt_tokens=tokens)
    total_s, _, _ = ask(server, batch_size, LONG_REPLY, seed=79, prompt_tokens=tokens)
    return {
        "ttft_ms": round(1000 * first_s, 1),
        "tpot_ms": round(1000 * (total_s - first_s) / (LONG_REPLY - 1), 3),
        "tokens_per_s": round(batch_size * LONG_REPLY / total_s, 1),
    }


def run_arms(
    chosen: Mapping[str, Arm], options: argparse.Namespace, found: dict[str, dict[str, dict[str, object]]]
) -> None:
    """All batch sizes of every arm, ``--together`` servers at a time: they start at once and run one by one."""
    names = list(chosen)
    for start in range(0, len(names), options.together):
        with contextlib.ExitStack() as stack:
            group = names[start : start + options.together]
            servers = {name: _launched(stack, name, chosen[name], options) for name in group}
            for name in [name for name, server in servers.items() if _settles(server, name)]:
                found[name] = {}
                with _reported(name), _running_alone(servers[name]):
                    run_arm(name, chosen[name], servers[name], options, found[name])


@contextlib.contextmanager
def _running_alone(server: Server) -> Iterator[None]:
    """A paused server runs for this block, and is gone after it."""
    server.resume()
    time.sleep(0.5)  # let what was stopped catch up
    try:
        yield
    finally:
        server.stop()


def _settles(server: Server, name: str) -> bool:
    """Wait for a launched server, give its stages cores, pause it; False, after a word about it, if it fails."""
    with _reported(name):
        server.wait_until_ready()
        assert server.pid is not None
        pin_stages(server.pid)
        server.pause()
        return True
    return False


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    """A server that fails costs its own arm, not the others."""
    try:
        yield
    except RuntimeError as error:
        print(f"{name} failed: {error}", flush=True)


def _launched(stack: contextlib.ExitStack, name: str, arm: Arm, options: argparse.Namespace) -> Server:
    log = Path(options.logs) / f"{name}.log" if options.logs else None
    server = Server(spec_of(arm, options), log_path=log, start_timeout_s=options.start_timeout)
    stack.callback(server.stop)
    stack.callback(server.resume)
    server.launch()
    return server


def run_arm(
    name: str, arm: Arm, server: Server, options: argparse.Namespace, found: dict[str, dict[str, object]]
) -> None:
    """All batch sizes of one arm, into ``found``."""
    for batch_size in options.batch_sizes:
        one = measure(server, batch_size, options) | measure_device(server, batch_size, arm, options)
        one |= {"to_device": round(one["ms_per_round"] / one["device_ms_per_round"], 3)}
        if options.long_prompt:
            one |= measure_long_prompt(server, batch_size, options)
        found[str(batch_size)] = one
        print(name, batch_size, {k: v for k, v in one.items() if k != "device_spans_ms"}, flush=True)


def model_shape(folder: Path) -> dict[str, object]:
    """What decides how long a round of the target takes."""
    config = json.loads((folder / "config.json").read_text())
    wanted = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size")
    return {name: config.get(name) for name in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of a stage")
    parser.add_argument("--colocated", action="store_true", help="all stages on GPU 0, over CUDA IPC")
    parser.add_argument("--arms", default="ours,ours_sync,builtin,tp1,tp1_overlap,pp2_nospec")
    parser.add_argument("--batch-sizes", type=lambda s: [int(x) for x in s.split(",")], default=[1, 8, 32])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help=f"of the long replies; the short ones have {FEW}")
    parser.add_argument(
        "--long-prompt", type=int, default=0, help="also measure TTFT and TPOT with prompts this long"
    )
    parser.add_argument(
        "--excerpt-ms", type=float, default=0.0, help="keep what the devices ran for so long, at the first batch size"
    )
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--server-args", default="", help="added to every arm's command line")
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        choices=range(1, 17),
        metavar="N",
        help="servers that start at once; all of them must fit on the GPUs",
    )
    parser.add_argument("--logs", default="", help="folder for server logs")
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    known = arms(options.gpus, options.tp)
    unknown = [name for name in options.arms.split(",") if name not in known]
    if unknown:
        parser.error(f"unknown arms {', '.join(unknown)}; known: {', '.join(known)}")
    chosen = {name: known[name] for name in options.arms.split(",")}
    found: dict[str, dict[str, dict[str, object]]] = {}
    about = provenance() | {
        "gpus": [", ".join(gpu) for gpu in nvidia_smi("--query-gpu=name,driver_version")],
        "model": model_shape(Path(options.model)),
    }
    try:
        with mps_server() if any(arm.mps for arm in chosen.values()) else contextlib.nullcontext() as options.mps:
            run_arms(chosen, options, found)
    finally:  # ended half way, it still says what it found; nothing found, an older result stays
        emit(about | {"arms": found}, options.json if any(found.values()) else None)
    if any(len(found.get(name, {})) < len(options.batch_sizes) for name in chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
