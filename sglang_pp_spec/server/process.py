"""The processes of one server: start, wait, stop; nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from .client import Client, ServerError
from .spec import LOOPBACK, ServerSpec

_LOG_TAIL_LINES = 40
_FIRST_PORT = 10_000
_POLL_S = 0.25
_LAST_BREATH_S = 2.0
_CRASH_WORDS = "Scheduler hit an exception"  # the log knows at once


class Server(Client):
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
        super().__init__(f"http://{LOOPBACK}:{self.port}", request_timeout_s)
        self.log_path = Path(log_path) if log_path else _new_log(spec)
        self._keep_log = log_path is not None
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

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
        while not self.answers():
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

    def _ends_within(self, seconds: float) -> bool:
        """Whether the server is gone, now or shortly: a dying one closes its sockets before its exit can be seen."""
        deadline = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.is_alive()

    def _exit_word(self) -> str:
        ended = _ended(self._process.pid) if self._process else None
        if ended is None:
            return "no exit code yet" if self._process else "not started"
        return f"exit code {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"signal {ended.si_status}"

    def explanation(self) -> str:
        """Whether the server is gone, and the end of its log."""
        state = f"is gone ({self._exit_word()})" if self._ends_within(_LAST_BREATH_S) else "still runs"
        return f"; the server {state}\n{self.log_tail()}"


@contextlib.contextmanager
def started_together(*servers: Server) -> Iterator[None]:
    """Servers that start at once, since starting takes longest, and are all gone after the block."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.launch()
        for server in servers:
            server.wait_until_ready()
        yield


def free_port() -> int:
    """A port that is free now and that the kernel gives to nobody.

    A server takes half a minute until it binds its port. One of the kernel's may be a connection's by then.
    """
    while True:
        port = random.randrange(_FIRST_PORT, _first_ephemeral_port())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def _first_ephemeral_port() -> int:
    """Where the ports begin that the kernel hands out; Linux's default if it does not say or leaves too few."""
    with contextlib.suppress(OSError, ValueError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if first > 2 * _FIRST_PORT:
            return first
    return 32768


def _new_log(spec: ServerSpec) -> Path:
    handle, path = tempfile.mkstemp(prefix=f"pp_spec-{spec.mode}-pp{spec.pp}-", suffix=".log")
    os.close(handle)
    return Path(path)


def _ended(pid: int) -> os.waitid_result | None:
    """How our child ended, None while it runs. It is not reaped by this: its id stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _end_by_exception_on_sigterm() -> None:
    """Let SIGTERM end this process through its ``finally`` blocks; by default its servers would run on for ever."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
