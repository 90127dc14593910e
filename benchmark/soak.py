"""Ten minutes of everything: random arrivals, long prompts, aborts, chain or tree; nothing may hang, leak or fail.

    python -m benchmark.soak --pp 2 --minutes 9 --json OUT.json          # on a GPU machine, or on the CPU engine
    python -m benchmark.soak --pp 4 --minutes 1 --topk 2

A real server with this plugin, asked by ``--clients`` clients at once. A client picks short, chunked and long prompts
and few or many tokens at random, and aborts every tenth of its requests midway. At the end the KV pool must be whole
(a cache flush succeeds only then). Reported: requests, aborts, tokens and acceptance; the host memory of the stages
after the first and the last tenth of the time, and on a GPU its used memory then. Exit status 1 if a request failed,
the pool did not come back, or memory grew by more than ``--growth-mib`` on the host or ``--gpu-growth-mib`` on a GPU.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from sglang_pp_spec.core.settings import COLOCATED
from sglang_pp_spec.server import Reply, Server, ServerError, ServerSpec

from .arms import DEFAULT_DRAFT, DEFAULT_MODEL, GPU_ARGS
from .report import emit, nvidia_smi, provenance

CHUNK = 128


class Soak:
    """The clients of one server and what they saw."""

    def __init__(self, server: Server, until: float, seed: int, long_tokens: int) -> None:
        self.server, self.until, self.long_tokens = server, until, long_tokens
        self.seen: Counter[str] = Counter()
        self.failures: list[str] = []
        self._seed = seed
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        """Ask until the time is over."""
        rng = random.Random(self._seed * 1000 + number)
        while time.monotonic() < self.until and not self.failures:
            time.sleep(rng.expovariate(2.0))
            length = rng.choice((20, 3 * CHUNK, self.long_tokens))
            prompt = [rng.randrange(32, 120) for _ in range(length)]
            self._ask(prompt, rng.choice((1, 16, 64, 200)), f"{number}-{rng.random()}", rng.random() < 0.1)

    def _ask(self, prompt: list[int], tokens: int, rid: str, abort: bool) -> None:
        timer = threading.Timer(0.3, self.server.abort, [rid]) if abort else None
        if timer is not None:
            timer.start()
        try:
            sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
            self._note(self.server.generate(prompt, sampling, rid=rid), tokens, abort)
        except ServerError as error:
            with self._lock:
                self.failures.append(str(error)[-2000:])
        finally:
            if timer is not None:
                timer.join()

    def _note(self, reply: Reply, tokens: int, abort: bool) -> None:
        with self._lock:
            self.seen["requests"] += 1
            self.seen["tokens"] += reply.completion_tokens
            self.seen["rounds"] += reply.verify_rounds
            self.seen["aborted"] += reply.finish_reason == "abort"
            if reply.completion_tokens != tokens and not abort:
                self.failures.append(f"{reply.completion_tokens} tokens instead of {tokens}: {reply.finish_reason}")


def processes(server: Server) -> dict[int, float]:
    """pid -> resident memory in MiB of every process of the server, mapped files excepted: those come and go."""
    listing = subprocess.run(["ps", "-eo", "pgid,pid"], capture_output=True, text=True, timeout=10).stdout
    rows = [line.split() for line in listing.splitlines()[1:]]
    return {int(pid): own_memory_mib(int(pid)) for group, pid in rows if int(group) == server.pid}


def own_memory_mib(pid: int) -> float:
    """Resident anonymous and shared memory of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)) / 1024


def gpu_memory_mib(server: Server) -> dict[str, int]:
    """Used memory per GPU: of the server's own processes, or of all where the driver does not tell them apart."""
    own = processes(server)
    used: Counter[str] = Counter()
    for gpu, pid, mib in nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory"):
        if pid.isdigit() and int(pid) in own and mib.isdigit():
            used[f"{gpu} (own processes)"] += int(mib)
    return dict(used) or {gpu: int(mib) for gpu, mib in nvidia_smi("--query-gpu=uuid,memory.used")}


def growth_mib(first: dict[str, int], last: dict[str, int]) -> list[int]:
    """Per GPU; ValueError if the two readings are not of the same things."""
    if set(first) != set(last):
        raise ValueError(f"GPU memory was first read of {sorted(first)}, then of {sorted(last)}")
    return [last[gpu] - first[gpu] for gpu in first]


def spec_of(options: argparse.Namespace) -> ServerSpec:
    """The server that is asked."""
    spec = ServerSpec(
        options.model,
        options.draft,
        pp=options.pp,
        mode="plugin",
        topk=options.topk,
        num_draft_tokens=4 if options.topk > 1 else None,
        extra_env={COLOCATED: "1"} if options.colocated else {},
    )
    fixed = ("--chunked-prefill-size", str(CHUNK), "--skip-tokenizer-init")
    machine = () if spec.on_cpu else GPU_ARGS
    return replace(spec, extra_args=(*fixed, *machine, *options.server_args.split()))


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Run, report; exit status 1 if something was wrong."""
    options = parse(argv)
    spec = spec_of(options)
    memory = {}
    with Server(spec, start_timeout_s=300, request_timeout_s=300) as server:
        start, length_s = time.monotonic(), 60 * options.minutes
        soak = Soak(server, start + length_s, options.seed, options.long_tokens)
        with ThreadPoolExecutor(options.clients) as pool:
            clients = [pool.submit(soak.client, number) for number in range(options.clients)]
            for name, when in (("first tenth", 0.1), ("last tenth", 0.95)):
                time.sleep(max(0.0, start + when * length_s - time.monotonic()))
                memory[name] = {"host_mib": sum(processes(server).values()), "gpu_mib": gpu_memory_mib(server)}
            for client in clients:
                client.result()
        server.flush_cache(timeout_s=60)
        alive = server.is_alive()
    grown = memory["last tenth"]["host_mib"] - memory["first tenth"]["host_mib"]
    grown_gpus: list[int] = []
    try:
        grown_gpus = growth_mib(memory["first tenth"]["gpu_mib"], memory["last tenth"]["gpu_mib"])
    except ValueError as error:
        soak.failures.append(str(error))
    seen = soak.seen
    result = provenance() | {
        "settings": {name: getattr(options, name) for name in ("pp", "topk", "minutes", "clients", "long_tokens")},
        **seen,
        "accept_length": seen["tokens"] / max(1, seen["rounds"]),
        "memory": memory,
        "host_growth_mib": grown,
        "gpu_growth_mib": grown_gpus,
        "failures": soak.failures,
    }
    emit(result, options.json)
    too_much = grown > options.growth_mib or max(grown_gpus, default=0) > options.gpu_growth_mib
    if soak.failures or not alive or too_much:
        sys.exit(1)
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--long-tokens", type=int, default=1500)
    parser.add_argument("--growth-mib", type=float, default=200.0, help="host memory, all processes")
    parser.add_argument("--gpu-growth-mib", type=float, default=64.0, help="of any GPU")
    parser.add_argument("--colocated", action="store_true", help="all stages on GPU 0, over CUDA IPC")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    parser.add_argument("--server-args", default="")
    parser.add_argument("--json", help="also write the result to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
