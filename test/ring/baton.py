"""Threads of which one runs at a time: whoever holds the baton, until it must wait; then a seed picks the next.

Every interleaving of waits is reachable and every run can be repeated. When nobody can go on, all threads end with
``Stuck`` and the list of what each waits for.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from links import Stuck


class _Runner:
    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = lambda: True  # None: has ended
        self.what = "to start"


class Baton:
    """Runs functions in threads, one at a time."""

    def __init__(self, seed: int, timeout: float = 60.0) -> None:
        self._random = random.Random(seed)
        self._timeout = timeout
        self._runners: list[_Runner] = []
        self._current: _Runner | None = None
        self._failure: BaseException | None = None
        self._done = threading.Event()
        self.order: list[str] = []  # who held the baton, in turn

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Called by the running thread: go on only once ``ready``; others may run first even if it is."""
        me = self._current
        assert me is not None
        me.ready, me.what = ready, what
        self._pass_on()
        self._await_turn(me)

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run all functions to their end; raises what the first failing one raised."""
        self._runners = [_Runner(f"stage {i}") for i in range(len(functions))]
        threads = [
            threading.Thread(target=self._main, args=(runner, function), daemon=True)
            for runner, function in zip(self._runners, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        assert self._done.wait(self._timeout), "the baton was lost"
        for thread in threads:
            thread.join(self._timeout)
        if self._failure is not None:
            raise self._failure

    def _main(self, runner: _Runner, function: Callable[[], None]) -> None:
        try:
            self._await_turn(runner)
            function()
        except BaseException as error:
            self._failure = self._failure or error
        runner.ready = None
        self._pass_on()

    def _await_turn(self, runner: _Runner) -> None:
        assert runner.turn.acquire(timeout=self._timeout), f"{runner.name} never got the baton back"
        if self._failure is not None:
            raise Stuck("another stage failed")

    def _pass_on(self) -> None:
        alive = [runner for runner in self._runners if runner.ready is not None]
        if not alive:
            self._done.set()
            return
        runnable = [runner for runner in alive if self._failure or (runner.ready and runner.ready())]
        if not runnable:
            waiting = "; ".join(f"{runner.name}: {runner.what}" for runner in alive)
            self._failure = Stuck(f"nobody can go on: {waiting}")
            runnable = alive
        self._current = self._random.choice(runnable)
        self.order.append(self._current.name)
        self._current.turn.release()
