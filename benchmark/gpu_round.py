"""How long is a decode round on GPUs, ours against SGLang's built-in and against one stage?

    python -m benchmark.gpu_round --model M/target --draft M/draft --arms ours,builtin,tp1 --json OUT.json

    python -m benchmark.gpu_round --colocated --model M/target --draft M/draft     # both stages on one GPU

Held fixed: model, prompts, batch, EAGLE 2/1/3, greedy, CUDA graphs, Triton attention. A batch is asked twice, for few
and for many tokens; ms per round = difference in time / difference in rounds of its slowest request, so prefill and
HTTP cancel. Per arm and batch size: median and spread of ``--repeat`` pairs. The device time of a round comes from
two more such batches under the PyTorch profiler: the busy time of all stages' GPUs, differenced in the same way;
``to_device`` is round time over device time. With ``--colocated`` stages share one GPU (``--mps``: each an equal part
of its SMs), and every arm with several stages uses the same CUDA IPC channel. Last line of output: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from sglang_pp_spec.core.settings import COLOCATED
from sglang_pp_spec.server import Reply, Server, ServerSpec

from . import device_time
from .report import emit, provenance

PROMPT_TOKENS = 64
FEW, MANY = 32, 160


@dataclass(frozen=True)
class Arm:
    """One way to serve the model."""

    mode: str
    pp: int
    tp: int
    args: tuple[str, ...] = ()


def arms(num_gpus: int, tp: int) -> dict[str, Arm]:
    """All arms on ``num_gpus`` GPUs: pipelines of num_gpus / tp stages, and one stage on the same GPUs."""
    pp, sync = num_gpus // tp, ("--disable-overlap-schedule",)
    return {
        "ours": Arm("plugin", pp, tp),
        "ours_sync": Arm("plugin", pp, tp, sync),
        "builtin": Arm("builtin", pp, tp, sync),
        "builtin_depth1": Arm("builtin", pp, tp, (*sync, "--pp-async-batch-depth", "1")),
        "pp2_nospec": Arm("nospec", pp, tp, sync),
        "tp1": Arm("plain", 1, 1, sync),
        "tp1_overlap": Arm("plain", 1, 1),
        "tp_all": Arm("plain", 1, num_gpus, sync),
        "tp_all_overlap": Arm("plain", 1, num_gpus),
    }


def spec_of(arm: Arm, options: argparse.Namespace) -> ServerSpec:
    """The server of an arm."""
    fixed = (
        *("--attention-backend", options.attention_backend, "--sampling-backend", "pytorch"),
        *("--mem-fraction-static", "0.4", "--max-running-requests", "64", "--cuda-graph-max-bs-decode", "32"),
        *("--context-length", "16384", "--disable-radix-cache", "--skip-tokenizer-init"),
    )
    env = {}
    if options.colocated and arm.pp > 1:
        env[COLOCATED] = "1"
    if options.mps and arm.pp > 1:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // arm.pp)
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
        long_s, long_rounds, replies = ask(server, batch_size, MANY, seed=repeat, prompt_tokens=PROMPT_TOKENS)
        rounds_ms.append(1000 * (long_s - short_s) / max(1, long_rounds - short_rounds))
        lengths.append(sum(r.completion_tokens for r in replies) / max(1, sum(r.verify_rounds for r in replies)))
    return {
        "ms_per_round": round(statistics.median(rounds_ms), 3),
        "ms_all": [round(ms, 3) for ms in rounds_ms],
        "accept_length": round(statistics.median(lengths), 3),
    }


def measure_device(server: Server, batch_size: int, num_stages: int) -> dict[str, object]:
    """Device milliseconds per round: all stages' busy time of a long batch less that of a short one."""
    found = []
    for tokens in (FEW, MANY):
        with tempfile.TemporaryDirectory(prefix="pp_spec-trace-") as folder:
            device_time.start(server, Path(folder))
            _, rounds, _ = ask(server, batch_size, tokens, seed=500, prompt_tokens=PROMPT_TOKENS)
            found.append((device_time.stop(server, Path(folder), num_stages), rounds))
    (few, few_rounds), (many, many_rounds) = found
    per_stage = [(b - a) / max(1, many_rounds - few_rounds) for a, b in zip(few, many, strict=True)]
    return {
        "device_ms_per_round": round(sum(per_stage), 3),
        "device_ms_per_stage": [round(ms, 3) for ms in per_stage],
    }


def measure_long_prompt(server: Server, batch_size: int, options: argparse.Namespace) -> dict[str, float]:
    """TTFT and TPOT (ms) and tokens per second with ``--long-prompt`` tokens, of a whole batch at once."""
    tokens = options.long_prompt
    ask(server, batch_size, 1, seed=77, prompt_tokens=tokens)
    first_s, _, _ = ask(server, batch_size, 1, seed=78, prompt_tokens=tokens)
    total_s, _, _ = ask(server, batch_size, 128, seed=79, prompt_tokens=tokens)
    return {
        "ttft_ms": round(1000 * first_s, 1),
        "tpot_ms": round(1000 * (total_s - first_s) / 127, 3),
        "tokens_per_s": round(batch_size * 128 / total_s, 1),
    }


def run_arm(name: str, arm: Arm, options: argparse.Namespace) -> dict[str, object]:
    """All batch sizes of one arm, on one server."""
    log = Path(options.logs) / f"{name}.log" if options.logs else None
    found: dict[str, object] = {}
    with Server(spec_of(arm, options), log_path=log, start_timeout_s=options.start_timeout) as server:
        for batch_size in options.batch_sizes:
            one = measure(server, batch_size, options) | measure_device(server, batch_size, arm.pp * arm.tp)
            found[str(batch_size)] = one | {"to_device": round(one["ms_per_round"] / one["device_ms_per_round"], 3)}
            if options.long_prompt:
                found[str(batch_size)] |= measure_long_prompt(server, batch_size, options)
            print(name, batch_size, found[str(batch_size)], flush=True)
    return found


def gpu_names() -> list[str]:
    """The GPUs of this machine, as the driver names them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of a stage")
    parser.add_argument("--colocated", action="store_true", help="all stages on GPU 0, over CUDA IPC")
    parser.add_argument("--mps", action="store_true", help="an equal share of the SMs for each stage; MPS must run")
    parser.add_argument("--arms", default="ours,ours_sync,builtin,tp1,tp1_overlap,pp2_nospec")
    parser.add_argument("--batch-sizes", type=lambda s: [int(x) for x in s.split(",")], default=[1, 8, 32])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--long-prompt", type=int, default=0, help="also measure TTFT and TPOT with prompts this long"
    )
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--server-args", default="", help="added to every arm's command line")
    parser.add_argument("--logs", default="", help="folder for server logs")
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    chosen = {name: arms(options.gpus, options.tp)[name] for name in options.arms.split(",")}
    found = {name: run_arm(name, arm, options) for name, arm in chosen.items()}
    emit(provenance() | {"gpus": gpu_names(), "arms": found}, options.json)


if __name__ == "__main__":
    main()
