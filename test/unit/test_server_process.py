"""Starting, asking and stopping, with a few lines of Python in SGLang's place."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_pp_spec.server import Server, ServerError, ServerSpec, free_port, process, started_together

ECHO = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
class Echo(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"pp_size": 2})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/die":
            os._exit(3)
        if self.path == "/refuse":
            return self.answer({"why": "because"}, 400)
        ids = body.get("input_ids", [])
        meta = {"completion_tokens": len(ids), "spec_verify_ct": 1, "finish_reason": {"type": "length"}}
        self.answer({"text": body.get("text", ""), "output_ids": ids, "meta_info": meta})
    def answer(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
"""
DIES = "import sys; print('no such kernel'); sys.exit(7)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ECHO
CRASHES = "import time; print('Scheduler hit an exception: KeyError', flush=True); time.sleep(60)"
HANGS = "import time; time.sleep(60)"


@dataclass(frozen=True)
class ScriptSpec(ServerSpec):
    """A spec whose command is a script that takes the port."""

    script: str = ECHO

    def command(self, port):
        return [sys.executable, "-c", self.script, str(port)]


def a_server(tmp_path, script=ECHO, **options):
    return Server(ScriptSpec("m", script=script), log_path=tmp_path / "log", **options)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_of(server: Server) -> int:
    return int(server.log().split("child ")[1].split()[0])


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.05)


USER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_server_process import a_server, child_of
from pathlib import Path
with a_server(Path(sys.argv[2]), stop_timeout_s=1.0) as server:
    print(server.pid, child_of(server), flush=True)
    time.sleep(60)
"""


def test_sigterm_to_the_user_of_a_server_ends_the_server_too(tmp_path):
    """A test run ended by ``timeout`` used to leave a server that polled on two cores for ever."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", USER, here, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        pids = [int(word) for word in user.stdout.readline().split()]
        user.terminate()
        assert user.wait(timeout=20) == 143
    wait_until_gone(*pids)


@pytest.mark.parametrize("script", [ECHO, STUBBORN], ids=["polite", "ignores SIGTERM"])
def test_leaving_the_context_ends_the_whole_group(tmp_path, script):
    with a_server(tmp_path, script, stop_timeout_s=1.0) as server:
        leader, child = server.pid, child_of(server)
        assert server.is_alive() and is_running(child)
    wait_until_gone(leader, child)
    assert server.pid is None and not server.is_alive()


def test_an_exception_inside_the_context_ends_the_server_and_keeps_its_log(tmp_path):
    server = a_server(tmp_path, stop_timeout_s=1.0)
    with pytest.raises(KeyError), server:
        leader = server.pid
        raise KeyError
    wait_until_gone(leader)
    assert "child" in server.log()


def test_replies_come_in_the_prompts_order_and_every_one_is_reported(tmp_path):
    seen = []
    with a_server(tmp_path, stop_timeout_s=1.0) as server:
        replies = server.generate([f"p{i}" for i in range(20)], concurrency=5, on_reply=seen.append)
        assert [reply.text for reply in replies] == [f"p{i}" for i in range(20)]
        assert len(seen) == 20
        assert server.generate("one").text == "one"
        assert server.generate([4, 5]).token_ids == (4, 5)
        assert [r.token_ids for r in server.generate([[4, 5], [6]])] == [(4, 5), (6,)]
        assert server.generate([]) == []
        assert server.get_server_info() == {"pp_size": 2}


def test_a_server_that_exits_at_start_is_reported_at_once_with_its_log(tmp_path):
    with pytest.raises(ServerError, match=r"(?s)exit code 7.*no such kernel"), a_server(tmp_path, DIES):
        pass


def test_a_crashed_scheduler_is_reported_although_the_leader_lives_on(tmp_path):
    server = a_server(tmp_path, CRASHES, stop_timeout_s=1.0)
    with pytest.raises(ServerError, match="KeyError"), server:
        pass


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path):
    server = a_server(tmp_path, HANGS, start_timeout_s=0.5, stop_timeout_s=1.0)
    with pytest.raises(ServerError, match="not ready"), server:
        pass
    assert not server.is_alive()


def test_a_refused_request_carries_the_servers_words(tmp_path):
    refused = pytest.raises(ServerError, match=r"HTTP 400.*because")
    with a_server(tmp_path, stop_timeout_s=1.0) as server, refused:
        server.post("/refuse")


def test_a_server_that_dies_while_it_is_asked_is_named_as_gone(tmp_path):
    with a_server(tmp_path, stop_timeout_s=1.0) as server:
        with pytest.raises(ServerError, match="the server"):
            server.post("/die")
        leader = server.pid
        deadline = time.monotonic() + 5
        while server.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(ServerError, match=r"is gone \(exit code 3\)"):
            server.post("/generate")
    wait_until_gone(leader)


def test_a_server_killed_from_outside_says_so(tmp_path):
    with a_server(tmp_path, stop_timeout_s=1.0) as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_until_gone(server.pid)
        with pytest.raises(ServerError, match=r"signal 9"):
            server.post("/generate")


def test_servers_started_together_answer_in_the_block_and_are_gone_after_it(tmp_path):
    one, other = a_server(tmp_path), a_server(tmp_path)
    with started_together(one, other):
        pids = [one.pid, other.pid]
        assert all(server.answers() for server in (one, other))
    assert not any(is_running(pid) for pid in pids)


def test_one_of_several_servers_that_does_not_start_takes_the_others_with_it(tmp_path):
    one, other = a_server(tmp_path), a_server(tmp_path, script="raise SystemExit(3)")
    with pytest.raises(ServerError), started_together(one, other):
        pytest.fail("the block was entered")
    assert one.pid is None and other.pid is None


def test_a_server_s_port_is_none_that_the_kernel_gives_to_others():
    """Chosen half a minute before it is bound: a connection of another server had it by then."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(10_000 <= free_port() < max(first, 32768) for _ in range(50))


def test_a_port_that_is_taken_is_not_chosen(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = free_port()
        drawn = iter([taken.getsockname()[1], other])
        monkeypatch.setattr(process.random, "randrange", lambda *_: next(drawn))
        assert free_port() == other
