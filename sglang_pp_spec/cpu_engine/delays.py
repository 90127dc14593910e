"""Known delays that burn no CPU, and a record of when each stage was busy: for measurements on the CPU engine.

A sleeping stage leaves the core to the others, so the stages of a pipeline overlap on few cores as they would on as
many GPUs. Installed by the CPU engine's entry point, so SGLang's built-in loop, plain PP and this plugin's loop get
the same sleeps and are recorded by the same code. With neither a delay nor a timeline folder no hook is registered.

``busy<stage>.jsonl`` in the timeline folder has one JSON line per span::

    stage, name ("forward" | "extend" | "draft"), mode, requests, start, end

``forward`` is the target's forward and ``draft`` the draft, both with their sleep; ``extend`` is the draft extend.
``mode`` is SGLang's forward mode; ``requests`` are the batch's request pool indices, which tell slots apart.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from sglang_pp_spec.core.settings import Settings

from .hooks import Hook


class BusyRecorder:
    """Writes the busy spans of this process's stage; a draft span inherits the batch of the forward before it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._sink: TextIO | None = None
        self._batch: dict = {}

    def enter_forward(self, stage: int, mode: str, pool_indices: list[int]) -> None:
        """The spans that follow belong to this batch."""
        self._batch = {"stage": stage, "mode": mode, "requests": pool_indices}

    @contextlib.contextmanager
    def span(self, name: str, sleep_ms: float = 0.0) -> Iterator[None]:
        """Time the block; sleep at its end, as a device that is still computing."""
        start = time.monotonic()
        yield
        if sleep_ms:
            time.sleep(sleep_ms / 1000)
        self._write({"name": name, **self._batch, "start": start, "end": time.monotonic()})

    def _write(self, record: dict) -> None:
        if not self._folder or "stage" not in record:
            return
        if self._sink is None:
            path = Path(self._folder)
            path.mkdir(parents=True, exist_ok=True)
            self._sink = (path / f"busy{record['stage']}.jsonl").open("w", buffering=1)
        self._sink.write(json.dumps(record) + "\n")


_settings = Settings()
_recorder = BusyRecorder("")


def forward_with_delay(original, self, forward_batch, *args, **kwargs):
    """Sleep after the target's layers, and note the span.

    Target:       sglang.srt.model_executor.model_runner.ModelRunner.forward   (AROUND)
    Why:          tiny models leave a stage idle most of the time, and compute-bound ones make two cores too noisy
                  to compare schedules
    How:          the original runs, then the process sleeps; the draft model's runner is left alone
    Upstream:     none: specific to measurements on the CPU engine
    Remove when:  never; without its settings it is not registered
    """
    if self.is_draft_worker:
        return original(self, forward_batch, *args, **kwargs)
    pool_indices = forward_batch.req_pool_indices.tolist() if forward_batch.req_pool_indices is not None else []
    _recorder.enter_forward(self.pp_group.rank_in_group, forward_batch.forward_mode.name, pool_indices)
    with _recorder.span("forward", _settings.stage_delay_ms):
        return original(self, forward_batch, *args, **kwargs)


def draft_with_delay(original, self, *args, **kwargs):
    """Sleep after the draft, and note the span.

    Target:       sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft   (AROUND)
    Why:          as for the forward; the draft loads the last stage alone
    How:          the original runs, then the process sleeps
    Upstream:     none: specific to measurements on the CPU engine
    Remove when:  never; without its settings it is not registered
    """
    with _recorder.span("draft", _settings.draft_delay_ms):
        return original(self, *args, **kwargs)


def extend_recorded(original, self, *args, **kwargs):
    """Note the span of a draft extend.

    Target:       sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode
                  and ._draft_extend_for_prefill   (AROUND)
    Why:          the draft extend is device work of the last stage and belongs to its busy time
    How:          the original runs, timed
    Upstream:     none: specific to measurements on the CPU engine
    Remove when:  never; without its settings it is not registered
    """
    with _recorder.span("extend"):
        return original(self, *args, **kwargs)


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_DRAFTER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"

HOOKS = (
    Hook(f"{_RUNNER}.forward", forward_with_delay, ("self", "forward_batch"), "19034759e5d5ec51"),
    Hook(f"{_DRAFTER}.draft", draft_with_delay, ("self", "batch"), "bc895b907be4e337"),
    Hook(f"{_DRAFTER}._draft_extend_for_decode", extend_recorded, ("self", "batch"), "43fac9eb9ad0ac5e"),
    Hook(f"{_DRAFTER}._draft_extend_for_prefill", extend_recorded, ("self", "batch"), "3189eb126ef534d3"),
)


def register(registry, settings: Settings) -> None:
    """Register the hooks if ``settings`` ask for a delay or a timeline; ``registry`` is SGLang's ``HookRegistry``."""
    global _settings, _recorder
    if not (settings.stage_delay_ms or settings.draft_delay_ms or settings.timeline):
        return
    from sglang.srt.plugins.hook_registry import HookType

    _settings, _recorder = settings, BusyRecorder(settings.timeline)
    for hook in HOOKS:
        registry.register(hook.target, hook.around, HookType.AROUND)
