"""What crosses the stages and what makes a host wait, counted in a running server: for benchmark/relay_budget.py.

Messages are counted where they leave (``torch.distributed.isend`` and ``send``), with the name of the host's function
that sends them; bytes of a received relay message that nothing reads are found by watching every torch function that
touches its memory. Host waits are found by watching torch functions on the scheduler's thread.

The CPU has no device tensors. A tensor counts as one unless it is known to be the host's: made without a device, by
``.cpu()`` or ``.to("cpu")``, or from such tensors alone. Then a wait is

- device to host: ``.cpu()``, ``.to("cpu")`` without non_blocking, ``.tolist()``, ``.item()``, ``bool()``, ``int()``,
  ``float()``, ``.numpy()`` on what would be a device tensor;
- host to device: ``torch.tensor(..., device=...)`` and ``.to(device)`` without non_blocking on a host tensor;
- event: ``Event.synchronize``, and in this plugin's loop the wait for a frame (``FrameTransport.fetch``);
- message: a blocking receive of a host message (size or pickle), counted apart.

Kernels, their stand-ins here and the planners of attention backends are not looked into.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_HOST = "_pp_spec_on_host"
_FACTORIES = ("tensor", "arange", "empty", "zeros", "ones", "full", "frombuffer", "from_numpy", "as_tensor", "rand")
_METADATA = ("numel", "nelement", "size", "stride", "dim", "ndimension", "storage_offset", "element_size", "__len__")
_METADATA += ("is_contiguous", "is_floating_point", "is_complex", "untyped_storage", "data_ptr", "is_pinned")
_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")
_WATCHED_TENSORS = 256
# No call site of a wait is looked for in these; the last ones stand for kernels or plan for a backend.
_TRANSPARENT = ("/torch/", "/contextlib.py", "/functools.py", "cpu_engine/counting", "plugins/hook_registry.py")
_KERNELS = ("sglang_pp_spec/cpu_engine/", "sgl_kernel", "srt/layers/", "srt/models/", "srt/model_executor/")


class Counts:
    """Counters of one process, by phase (the forward mode that runs, or "idle"), and the messages being watched."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.stage: int | None = None
        self.phase = "start"
        self.counters: Counter[str] = Counter()
        self._message: list[str] = []
        self._watched: deque[tuple[str, torch.Tensor, torch.Tensor]] = deque()
        self._masks: dict[int, torch.Tensor] = {}

    def add(self, *key: object, number: int = 1) -> None:
        """Add to the counter named by ``key`` in this phase."""
        self.counters["|".join(map(str, (self.phase, *key)))] += number

    def save(self) -> None:
        """Write the counters, if this process is a stage."""
        with torch._C.DisableTorchFunction():
            while self._watched:
                self._finish(self._watched[0])
        if self.stage is None:
            return
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"count{self.stage}.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.counters))
        path.with_suffix(".tmp").rename(path)

    @contextlib.contextmanager
    def message(self, name: str) -> Iterator[None]:
        """What is sent or received meanwhile belongs to ``name``; the innermost name holds."""
        self._message.append(name)
        try:
            yield
        finally:
            self._message.pop()

    @property
    def current(self) -> str:
        return "/".join(self._message) or "other"

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Look from now on which elements of a received tensor are read."""
        with torch._C.DisableTorchFunction():
            self._watch(name, tensor)

    def _watch(self, name: str, tensor: torch.Tensor) -> None:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in self._masks:
            self._finish(next(entry for entry in self._watched if entry[1].untyped_storage().data_ptr() == pointer))
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._masks[pointer] = torch.zeros(elements, dtype=torch.bool)
        self._watched.append((f"{self.phase}|unread|{name}", tensor, self._masks[pointer]))
        if len(self._watched) > _WATCHED_TENSORS:
            self._finish(self._watched[0])

    def mark_read(self, tensor: torch.Tensor) -> None:
        """The elements that ``tensor`` covers were read."""
        mask = self._masks.get(tensor.untyped_storage().data_ptr()) if self._masks else None
        if mask is not None:
            mask.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(True)

    def is_watched(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._masks

    def _finish(self, entry: tuple[str, torch.Tensor, torch.Tensor]) -> None:
        name, tensor, mask = entry
        self._watched = deque(other for other in self._watched if other is not entry)
        del self._masks[tensor.untyped_storage().data_ptr()]
        read = mask.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        self.counters[name] += int((~read).sum()) * tensor.element_size()


class WaitWatcher(TorchFunctionMode):
    """Counts host waits and reads of watched messages, for every torch function that Python code calls."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == "__get__" or name in _METADATA or not (tensors or name in _FACTORIES):
            return func(*args, **kwargs)
        result = self._call(func, name, tensors, args, kwargs)
        self._note_reads(name, tensors, result)
        return result

    def _call(self, func, name: str, tensors: list[torch.Tensor], args: tuple, kwargs: dict):
        if name in ("cpu", "to", "tensor", "as_tensor") or name in _READS:
            return self._move(func, name, tensors, args, kwargs)
        result = func(*args, **kwargs)
        on_host = (
            all(map(_on_host, tensors)) if tensors else kwargs.get("device") is None or _says_cpu(_call_site(True))
        )
        if on_host:
            for leaf in tree_leaves(result):
                _mark(leaf)
        return result

    def _move(self, func, name: str, tensors: list[torch.Tensor], args: tuple, kwargs: dict):
        """A function that may wait: count it, and keep the mark of host tensors right."""
        result = func(*args, **kwargs)
        source_on_host = all(map(_on_host, tensors))
        if name in _READS:
            if not source_on_host:
                self._wait("device_to_host", name)
            return _mark(result)
        to_host, to_device = _direction(name, args, kwargs)
        if not (to_host or to_device):
            return _mark(result) if source_on_host and tensors else result
        result = result.detach() if any(result is tensor for tensor in tensors) else result
        blocking = not kwargs.get("non_blocking")
        if to_host:
            if blocking and tensors and not source_on_host:
                self._wait("device_to_host", name)
            return _mark(result)
        if blocking and source_on_host:
            self._wait("host_to_device", name)
        if getattr(result, _HOST, False):
            setattr(result, _HOST, False)
        return result

    def _wait(self, kind: str, name: str) -> None:
        frame = _call_site()
        if frame is not None:
            self._counts.add("wait", kind, f"{_short(frame.f_code.co_filename)}:{frame.f_code.co_name}", name)

    def _note_reads(self, name: str, tensors: list[torch.Tensor], result) -> None:
        counts = self._counts
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided or not counts.is_watched(tensor):
                continue
            storage = tensor.untyped_storage().data_ptr()
            views = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            if not any(t.untyped_storage().data_ptr() == storage for t in views):
                counts.mark_read(tensor)


def _on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _HOST, False)


def on_device_and_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of a tensor that on a GPU would be a device tensor and its copy on the host."""
    with torch._C.DisableTorchFunction():
        return tensor.detach(), _mark(tensor.detach())


def _mark(value):
    if isinstance(value, torch.Tensor):
        setattr(value, _HOST, True)
    return value


def _direction(name: str, args: tuple, kwargs: dict) -> tuple[bool, bool]:
    """(to the host, to the device) of a move. On a CPU both are spelt "cpu": the caller's source decides."""
    if name == "cpu":
        return True, False
    operands = args[1:] if name == "to" else ()
    devices = [a for a in (*operands, kwargs.get("device")) if isinstance(a, (str, torch.device))]
    if not devices:
        return name in ("tensor", "as_tensor"), False
    to_host = _says_cpu(_call_site(kernels_too=True))
    return to_host, not to_host


def _call_site(kernels_too: bool = False) -> FrameType | None:
    """The frame that called torch; None inside kernels, their stand-ins and planners."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _TRANSPARENT):
        frame = frame.f_back
    if kernels_too:
        return frame
    caller = frame
    while caller is not None:
        path = caller.f_code.co_filename
        if any(part in path for part in _KERNELS) and not any(part in path for part in _TRANSPARENT):
            return None
        caller = caller.f_back
    return frame


def _says_cpu(frame: FrameType | None) -> bool:
    """Whether the statement a frame is at names the CPU."""
    if frame is None:
        return False
    start, end, *_ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    path, lines = frame.f_code.co_filename, range(start or 0, (end or start or 0) + 1)
    return any('"cpu"' in linecache.getline(path, line) for line in lines)


def _short(path: str) -> str:
    for root in ("site-packages/", "sglang_pp_spec/"):
        _, found, rest = path.rpartition(root)
        if found:
            return rest if root == "site-packages/" else root + rest
    return path
