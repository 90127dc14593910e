"""What becomes of the arms of a GPU benchmark when one of them fails or the time is over; no server is started."""

import json

import pytest

from benchmark import gpu_round


class FakeServer:
    """Starts, unless its arm is the one without speculation."""

    pid = 1

    def __init__(self, spec, **_):
        self.spec = spec

    def launch(self):
        self.state = "launched"

    def wait_until_ready(self):
        if self.spec.mode == "nospec":
            raise RuntimeError("no such kernel")

    def pause(self):
        self.state = "paused"

    def resume(self):
        self.state = "running"

    def stop(self):
        self.state = "stopped"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(arms) -> (exit status, the JSON that was written, what was measured)."""
    (tmp_path / "config.json").write_text("{}")
    out, measured = tmp_path / "out.json", []

    def measure(server, batch_size, options):
        measured.append((server.spec.mode, batch_size))
        assert server.state == "running"
        if server.spec.mode == "builtin" and batch_size == 8:
            raise SystemExit(143)  # what SIGTERM becomes
        return {"ms_per_round": 3.0}

    monkeypatch.setattr(gpu_round, "Server", FakeServer)
    monkeypatch.setattr(gpu_round, "measure", measure)
    monkeypatch.setattr(gpu_round, "measure_device", lambda *_: {"device_ms_per_round": 2.0})
    monkeypatch.setattr(gpu_round, "pin_stages", lambda pid: {})
    monkeypatch.setattr(gpu_round, "nvidia_smi", lambda query: [])
    monkeypatch.setattr(gpu_round.time, "sleep", lambda seconds: None)

    def run(arms, *extra):
        folder = str(tmp_path)
        command = ["--model", folder, "--draft", folder, "--batch-sizes", "1,8", "--json", str(out), "--arms", arms]
        monkeypatch.setattr("sys.argv", ["gpu_round", *command, *extra])
        try:
            gpu_round.main()
            status = 0
        except SystemExit as end:
            status = end.code
        return status, json.loads(out.read_text())["arms"] if out.exists() else None, measured

    return run


@pytest.mark.parametrize("together", ["1", "3"])
def test_an_arm_that_fails_costs_itself_and_the_exit_status(run, capsys, together):
    status, arms, _ = run("ours,pp2_nospec,ours_sync", "--together", together)
    assert status == 1
    assert {name: list(sizes) for name, sizes in arms.items()} == {"ours": ["1", "8"], "ours_sync": ["1", "8"]}
    assert arms["ours"]["8"]["to_device"] == 1.5
    assert "pp2_nospec failed: no such kernel" in capsys.readouterr().out


def test_all_arms_measured_is_a_success(run):
    assert run("ours,tp1")[0] == 0


def test_what_was_measured_before_the_end_of_the_time_is_written(run):
    """A run that its time limit ended had its figures in a log alone."""
    status, arms, measured = run("ours,builtin,tp1", "--together", "3")
    assert status == 143
    assert {name: list(sizes) for name, sizes in arms.items()} == {"ours": ["1", "8"], "builtin": ["1"]}
    assert ("plain", 1) not in measured


def test_an_unknown_arm_is_named_before_anything_starts(run, capsys):
    status, arms, measured = run("ours,our")
    assert (status, arms, measured) == (2, None, [])
    assert "unknown arms our;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arm", "busy_slots"),
    [("ours", [1, 2, 2, 2]), ("ours_one_slot", [1, 1, 1, 2]), ("builtin", [1, 1, 1, 2]), ("tp_all", [1, 1, 1, 1])],
)
def test_a_batch_that_comes_at_once_fills_the_slots_as_its_arm_does(arm, busy_slots):
    of_two_gpus = gpu_round.arms(2, 1)
    assert [of_two_gpus[arm].busy_slots(size) for size in (1, 8, 32, 64)] == busy_slots
