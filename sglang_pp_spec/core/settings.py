"""This project's settings: one frozen object, the only place that reads the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ENABLE = "SGLANG_ENABLE_PP_SPEC"
CPU_ENGINE = "SGLANG_PP_SPEC_CPU_ENGINE"
COLOCATED = "SGLANG_PP_SPEC_COLOCATED"
_PREFIX = "SGLANG_PP_SPEC_"
_TRUE = ("1", "true", "yes", "y", "t", "on")
_FALSE = ("", "0", "false", "no", "n", "f", "off")
ON_MISMATCH = ("stop", "abort")
OVERLAP = ("auto", "accounting", "on")


@dataclass(frozen=True)
class Settings:
    """Resolved settings of one process."""

    enabled: bool = False  # SGLANG_ENABLE_PP_SPEC
    cpu_engine: bool = False  # SGLANG_PP_SPEC_CPU_ENGINE: SGLang on a machine without a GPU
    colocated: bool = False  # SGLANG_PP_SPEC_COLOCATED: development: all stages on GPU 0
    on_mismatch: str = "stop"  # SGLANG_PP_SPEC_ON_MISMATCH: stop the engine, or abort the affected requests
    overlap: str = "auto"  # SGLANG_PP_SPEC_OVERLAP: auto = where forwards run beside the host; tests: on the CPU, too
    slot_fill: int = 1  # SGLANG_PP_SPEC_SLOT_FILL: requests a slot takes before it leaves any to the other slots
    streams: bool = False  # SGLANG_PP_SPEC_STREAMS: tests: the GPU's way through streams on the CPU engine, too
    poison: bool = False  # SGLANG_PP_SPEC_POISON: development: overwrite free memory before every turn
    fault: str = ""  # SGLANG_PP_SPEC_FAULT: for tests, kind@N of ``core.faults``, "" = none
    frame_timeout_s: float = 240.0  # SGLANG_PP_SPEC_FRAME_TIMEOUT_S: how long a stage waits for a frame
    timeline: str = ""  # SGLANG_PP_SPEC_TIMELINE: folder for one JSON-lines file of events per stage, "" = off
    stage_delay_ms: float = 0.0  # SGLANG_PP_SPEC_STAGE_DELAY_MS: CPU engine only, sleep added to a target forward
    draft_delay_ms: float = 0.0  # SGLANG_PP_SPEC_DRAFT_DELAY_MS: CPU engine only, sleep added to a draft
    count: str = ""  # SGLANG_PP_SPEC_COUNT: CPU engine only, folder for counts of messages and host waits, "" = off

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings; ValueError for an unknown SGLANG_PP_SPEC_* key or a value out of range."""
        known = {
            CPU_ENGINE: ("cpu_engine", _boolean),
            COLOCATED: ("colocated", _boolean),
            f"{_PREFIX}ON_MISMATCH": ("on_mismatch", _one_of(*ON_MISMATCH)),
            f"{_PREFIX}OVERLAP": ("overlap", _one_of(*OVERLAP)),
            f"{_PREFIX}SLOT_FILL": ("slot_fill", _requests),
            f"{_PREFIX}STREAMS": ("streams", _boolean),
            f"{_PREFIX}POISON": ("poison", _boolean),
            f"{_PREFIX}FAULT": ("fault", _fault),
            f"{_PREFIX}FRAME_TIMEOUT_S": ("frame_timeout_s", _seconds),
            f"{_PREFIX}TIMELINE": ("timeline", lambda _, text: text),
            f"{_PREFIX}STAGE_DELAY_MS": ("stage_delay_ms", _milliseconds),
            f"{_PREFIX}DRAFT_DELAY_MS": ("draft_delay_ms", _milliseconds),
            f"{_PREFIX}COUNT": ("count", lambda _, text: text),
        }
        unknown = sorted(k for k in environ if k.startswith(_PREFIX) and k not in known)
        if unknown:
            raise ValueError(f"unknown setting(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        values = {field: read(key, environ[key]) for key, (field, read) in known.items() if key in environ}
        return cls(enabled=_boolean(ENABLE, environ.get(ENABLE, "")), **values)


def _boolean(key: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{key}={text!r} is neither true nor false")


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def read(key: str, text: str) -> str:
        if text not in choices:
            raise ValueError(f"{key}={text!r}; choose one of {', '.join(choices)}")
        return text

    return read


def _fault(key: str, text: str) -> str:
    from .faults import Fault

    try:
        Fault.parse(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return text


def _requests(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{key}={text!r} is not a number of requests, 1 or more")
    return int(text)


def _milliseconds(key: str, text: str) -> float:
    return _number(key, text, "milliseconds", 60_000.0)


def _seconds(key: str, text: str) -> float:
    seconds = _number(key, text, "seconds", 86_400.0)
    if seconds < 1.0:
        raise ValueError(f"{key}={text!r} is too short to wait for anything; give 1 second or more")
    return seconds


def _number(key: str, text: str, unit: str, below: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < below:
        raise ValueError(f"{key}={text!r} is not a number of {unit} within [0, {below:g})")
    return value
