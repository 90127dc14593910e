"""Start a real SGLang server, ask it, stop it: the one piece that demo, tests and benchmarks share.

Standard library only; SGLang is imported by the process it starts, never here. One use, in order:

    spec = ServerSpec(model, draft, pp=2, mode="plugin")
    with Server(spec) as server:                        # returns when the server answers
        replies = server.generate(prompts)              # concurrently, in the prompts' order
    # here every process of the server is gone

`ServerSpec` is the whole difference between the arms that are compared:

    mode       --speculative-*   SGLANG_ENABLE_PP_SPEC   this plugin
    nospec     no                unset                   excluded
    plain      EAGLE             unset                   excluded
    builtin    EAGLE             1                       excluded
    plugin     EAGLE             1                       allowed
"""

from __future__ import annotations

import contextlib
import glob
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sglang_pp_spec.core.settings import COLOCATED, CPU_ENGINE, ENABLE, Settings
from sglang_pp_spec.cpu_engine.environment import cpu_environment, cpu_server_args

Mode = Literal["plain", "plugin", "builtin", "nospec"]
Prompt = str | Sequence[int]  # text or token ids

PLUGINS = "SGLANG_PLUGINS"  # SGLang's allow-list of plugins
PLUGIN_NAME = "pp_spec"
CPU_PLUGIN_NAME = "pp_spec_cpu_engine"
COLOCATED_PLUGIN_NAME = "pp_spec_colocated"
_LOOPBACK = "127.0.0.1"
_LOG_TAIL_LINES = 40
_POLL_S = 0.25
_LAST_BREATH_S = 2.0
# The leading process outlives a crashed scheduler by a minute of diagnostics; its log knows at once.
_CRASH_WORDS = "Scheduler hit an exception"
_CRASH_DIAGNOSES = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")

# float32: in bf16 another batch shape may flip a tie between two tokens. Room for 16 requests of 1000 tokens.
_CPU_DEFAULTS = (("--dtype", "float32"), ("--max-running-requests", "16"), ("--max-total-tokens", "16384"))


class ServerError(RuntimeError):
    """The server did not start, died or refused a request; the log's end is in the message where it helps."""


@dataclass(frozen=True)
class ServerSpec:
    """Which server: its command line and environment follow from this alone, and from the machine."""

    model: str
    draft: str | None = None
    pp: int = 1
    tp: int = 1
    mode: Mode = "plain"
    topk: int = 1
    steps: int = 2
    num_draft_tokens: int | None = None  # steps + topk by default: 3 for a chain of 2 steps, 4 for a topk=2 tree
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode {self.mode!r}; choose one of {', '.join(get_args(Mode))}")
        if min(self.pp, self.tp, self.topk, self.steps) < 1:
            raise ValueError(f"pp, tp, topk and steps start at 1: {self}")

    def command(self, port: int) -> list[str]:
        """The full command line of a server on this machine."""
        arguments = [
            *("--model-path", str(self.model)),
            *("--pp-size", str(self.pp)),
            *("--tp-size", str(self.tp)),
            *self._speculative_args(),
            *self.extra_args,
        ]
        if self.on_cpu:
            for default in _CPU_DEFAULTS:
                if not is_given(default[0], arguments):
                    arguments += default
            arguments += cpu_server_args(arguments)
        address = ["--host", _LOOPBACK, "--port", str(port)]
        return [sys.executable, "-m", "sglang.launch_server", *arguments, *address]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (this process's environment) without its plugin switches, plus this server's."""
        env = {k: v for k, v in (os.environ if base is None else base).items() if k not in (ENABLE, PLUGINS)}
        if self.on_cpu:
            env = cpu_environment(self.pp * self.tp, env) | {CPU_ENGINE: "1"}
        if self.mode in ("plugin", "builtin"):
            env[ENABLE] = "1"
        allowed = [PLUGIN_NAME] if self.mode == "plugin" else []
        if self.on_cpu:
            allowed.append(CPU_PLUGIN_NAME)
        if self.extra_env.get(COLOCATED):
            allowed.append(COLOCATED_PLUGIN_NAME)
        env[PLUGINS] = ",".join(allowed) or "none-such"  # an empty list would allow every plugin
        for diagnosis in _CRASH_DIAGNOSES:
            env.setdefault(diagnosis, "0")
        # SGLang asks itself over HTTP at start-up; a proxy in the environment would take those requests.
        env["no_proxy"] = env["NO_PROXY"] = ",".join(filter(None, [env.get("NO_PROXY"), _LOOPBACK, "localhost"]))
        return env | dict(self.extra_env)

    @property
    def on_cpu(self) -> bool:
        """Whether this server runs on the CPU engine."""
        return uses_cpu_engine({**os.environ, **self.extra_env})

    def _speculative_args(self) -> list[str]:
        if self.mode == "nospec":
            return []
        given = {
            "--speculative-algorithm": "EAGLE",
            "--speculative-draft-model-path": self.draft,
            "--speculative-num-steps": self.steps,
            "--speculative-eagle-topk": self.topk,
            "--speculative-num-draft-tokens": self.num_draft_tokens or self.steps + self.topk,
        }
        defaults = {k: v for k, v in given.items() if v is not None and not is_given(k, self.extra_args)}
        return [str(part) for pair in defaults.items() for part in pair]


def is_given(flag: str, arguments: Sequence[str]) -> bool:
    """Whether a command line sets `flag`, as `--flag value` or `--flag=value`."""
    return any(argument.partition("=")[0] == flag for argument in arguments)


def uses_cpu_engine(environ: Mapping[str, str]) -> bool:
    """What SGLANG_PP_SPEC_CPU_ENGINE says, and without it whether the machine has no GPU."""
    if CPU_ENGINE in environ:
        return Settings.from_environment({CPU_ENGINE: environ[CPU_ENGINE]}).cpu_engine
    return not has_gpu(environ)


def has_gpu(environ: Mapping[str, str]) -> bool:
    """Whether a GPU's device file is there and visible, without loading a driver into this process."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/kfd"))


@dataclass(frozen=True)
class Reply:
    """One finished generation."""

    text: str
    token_ids: tuple[int, ...]
    completion_tokens: int
    verify_rounds: int  # 0 without speculation
    accept_length: float | None  # completion tokens per verify round, as SGLang counts them
    finish_reason: str  # "stop", "length", "abort"
    meta: Mapping[str, Any] = field(repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Reply:
        """The answer of SGLang's /generate."""
        meta = body["meta_info"]
        return cls(
            text=body.get("text", ""),  # none from a server without a tokenizer
            token_ids=tuple(body["output_ids"]),
            completion_tokens=meta["completion_tokens"],
            verify_rounds=meta.get("spec_verify_ct", 0),
            accept_length=meta.get("spec_accept_length"),
            finish_reason=(meta.get("finish_reason") or {}).get("type", ""),
            meta=meta,
        )


class Server:
    """A running server as a context manager. Its processes are one group, and the group is gone on exit."""

    def __init__(
        self,
        spec: ServerSpec,
        *,
        log_path: Path | str | None = None,
        start_timeout_s: float = 300.0,
        request_timeout_s: float = 300.0,
        stop_timeout_s: float = 20.0,
    ) -> None:
        self.spec = spec
        self.port = free_port()
        self.log_path = Path(log_path) if log_path else _new_log(spec)
        self._keep_log = log_path is not None
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        # Without proxies: the server is on this machine.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is None and not self._keep_log:
            self.log_path.unlink(missing_ok=True)

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://{_LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The leader of the server's process group; None when nothing runs."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the processes, wait until the server generates; `ServerError` with the log if it does not."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start the processes and return at once."""
        _end_by_exception_on_sigterm()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.spec.command(self.port),
                env=self.spec.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._deadline = time.monotonic() + self._start_timeout_s

    def wait_until_ready(self) -> None:
        """Wait until a launched server generates; `ServerError` with the log if it does not."""
        while not self._answers():
            if not self.is_alive() or _CRASH_WORDS in self.log():
                raise ServerError(f"the server failed at start ({self._exit_word()})\n{self.log_tail()}")
            if time.monotonic() > self._deadline:
                raise ServerError(f"not ready after {self._start_timeout_s:.0f} s\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """SIGTERM to the server, then SIGKILL to what is left of its group; returns when it is gone."""
        process = self._process
        if process is None:
            return
        if self.is_alive():
            process.send_signal(signal.SIGTERM)
        self._ends_within(self._stop_timeout_s)
        self._process = None
        # The leader is not reaped yet, so its id, which names the group, cannot belong to anybody else.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)

    def pause(self) -> None:
        """Stop all of the server's processes where they are (SIGSTOP): an idle SGLang server polls."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let paused processes run on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def is_alive(self) -> bool:
        """Whether the server's leading process runs."""
        return self._process is not None and _ended(self._process.pid) is None

    def log(self) -> str:
        """Everything the server wrote so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The log's last lines, headed by its path."""
        return "\n".join([f"--- end of {self.log_path} ---", *self.log().splitlines()[-lines:]])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Mapping[str, Any] | None = None,
        *,
        concurrency: int = 16,
        on_reply: Callable[[Reply], None] | None = None,
        **fields: Any,
    ) -> Any:
        """One `Reply` for one prompt, or a list in the prompts' order, `concurrency` requests at a time.

        Greedy unless `sampling` says otherwise. `fields` go into every request's body (`rid`, ...).
        `on_reply` is called as replies come in, by the calling thread.
        """
        body = {"sampling_params": {"temperature": 0.0, "max_new_tokens": 128} | dict(sampling or {})} | fields
        if _is_one_prompt(prompts):
            return self._ask(prompts, body)
        with ThreadPoolExecutor(max_workers=max(1, concurrency)) as pool:
            futures = [pool.submit(self._ask, prompt, body) for prompt in prompts]
            try:
                for done in as_completed(futures):
                    reply = done.result()
                    if on_reply:
                        on_reply(reply)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def get_server_info(self) -> dict[str, Any]:
        """SGLang's resolved arguments and the schedulers' internal state."""
        return json.loads(self._request("GET", "/server_info"))

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort the request `rid`, or every request."""
        self.post("/abort_request", {"rid": rid, "abort_all": everything})

    def flush_cache(self, timeout_s: float = 0.0) -> None:
        """Empty the prefix cache; `ServerError` when requests are still running after `timeout_s`."""
        self.post(f"/flush_cache?timeout={timeout_s}")

    def pause_generation(self, mode: str = "retract") -> None:
        """Stop generating: "abort" the requests, "retract" them to the queue, or hold them "in_place"."""
        self.post("/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        """Go on after a pause."""
        self.post("/continue_generation", {})

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Any other endpoint; `ServerError` on an HTTP error."""
        return self._request("POST", path, body or {})

    def _ask(self, prompt: Prompt, body: Mapping[str, Any]) -> Reply:
        key = "text" if isinstance(prompt, str) else "input_ids"
        value = prompt if isinstance(prompt, str) else list(prompt)
        return Reply.from_json(json.loads(self.post("/generate", {key: value, **body})))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with self._http.open(request, timeout=self._request_timeout_s) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:2000]
            raise ServerError(f"{method} {path}: HTTP {error.code}: {text}") from None
        except (OSError, http.client.HTTPException) as error:
            state = f"is gone ({self._exit_word()})" if self._ends_within(_LAST_BREATH_S) else "still runs"
            raise ServerError(f"{method} {path}: {error}; the server {state}\n{self.log_tail()}") from error

    def _ends_within(self, seconds: float) -> bool:
        """Whether the server is gone, now or shortly: a dying one closes its sockets before its exit can be seen."""
        deadline = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.is_alive()

    def _answers(self) -> bool:
        """Whether the server has warmed up and generates a token."""
        try:
            with self._http.open(self.url + "/health_generate", timeout=30) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _exit_word(self) -> str:
        ended = _ended(self._process.pid) if self._process else None
        if ended is None:
            return "no exit code yet" if self._process else "not started"
        return f"exit code {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"signal {ended.si_status}"


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return probe.getsockname()[1]


def _new_log(spec: ServerSpec) -> Path:
    handle, path = tempfile.mkstemp(prefix=f"pp_spec-{spec.mode}-pp{spec.pp}-", suffix=".log")
    os.close(handle)
    return Path(path)


def _ended(pid: int) -> os.waitid_result | None:
    """How our child ended, None while it runs. It is not reaped by this: its id stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _end_by_exception_on_sigterm() -> None:
    """Let SIGTERM end this process through its ``finally`` blocks; by default its servers would run on for ever."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
