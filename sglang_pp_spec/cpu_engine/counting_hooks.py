"""Where the counters of ``counting.py`` are attached, all through SGLang's hook registry.

Target:       the functions of ``_hooks``   (AROUND; BEFORE where named so)
Why:          what a relay costs is to be counted in the running server, the same way in ours and the built-in
How:          every hook runs the original and counts beside it
Upstream:     none: specific to measurements on the CPU engine
Remove when:  never; without SGLANG_PP_SPEC_COUNT none is registered
"""

from __future__ import annotations

import dataclasses

import torch

from sglang_pp_spec.core.frame import FrameKind
from sglang_pp_spec.core.layout import HEADER_FIELDS
from sglang_pp_spec.core.settings import Settings

from .counting import Counts, WaitWatcher, on_device_and_host

_counts = Counts("")
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"


def event_loop(original, self):
    """Watch the scheduler's thread from here on."""
    _counts.stage = self.pp_group.rank_in_group
    with WaitWatcher(_counts):
        return original(self)


def run_batch(original, self, batch, *args, **kwargs):
    """A batch's mode names the phase until the next batch."""
    _counts.phase = batch.forward_mode.name
    _counts.add("steps")
    return original(self, batch, *args, **kwargs)


def on_idle(original, self, *args, **kwargs):
    """Nothing to do: write the counters."""
    if _counts.phase != "idle":
        _counts.save()
        _counts.phase = "idle"
    return original(self, *args, **kwargs)


def send_tensor_dict(original, self, tensor_dict, *args, **kwargs):
    """One message of the host: a proxy or a round's output."""
    name = _message_name(tensor_dict)
    _counts.add("hops", name)
    with _counts.message(name):
        return original(self, tensor_dict, *args, **kwargs)


def send_object(original, self, *args, **kwargs):
    """The pickled part of a message."""
    with _counts.message("host"):
        return original(self, *args, **kwargs)


def point_to_point(original, *args, **kwargs):
    """Requests and the like between the schedulers of neighbouring stages."""
    with _counts.message("requests"), _counts.message("host"):
        return original(*args, **kwargs)


def send(original, tensor, *args, **kwargs):
    """Anything that leaves this process."""
    _counts.add("sent", _counts.current)
    _counts.add("bytes", _counts.current, number=tensor.nbytes)
    with torch._C.DisableTorchFunction():  # sending is not reading, and torch would come back here
        return original(tensor, *args, **kwargs)


def receive(original, *args, **kwargs):
    """A receive; of a host message it blocks the host on any backend."""
    _counts.add("received", _counts.current)
    with torch._C.DisableTorchFunction():
        return original(*args, **kwargs)


def receive_object(original, self, *args, **kwargs):
    """The pickled part of a message."""
    with _counts.message("host"):
        return original(self, *args, **kwargs)


def receive_tensor_dict(original, self, *args, **kwargs):
    """Watch what is read of a round's output."""
    with _counts.message("dict"):
        received = original(self, *args, **kwargs)
    name = _message_name(received)
    _counts.add("delivered", name)
    for tensor in received.values():
        if name != "proxy" and isinstance(tensor, torch.Tensor) and tensor.numel():
            _counts.watch(name, tensor)
    return received


def synchronize(original, self):
    """The host waits for an event."""
    _counts.add("wait", "event", "Event.synchronize", "")
    return original(self)


def send_frame(original, self, slot, frame):
    """One frame to every earlier stage: each destination is a hop."""
    name = _frame_name(frame)
    for _ in self._ranks[:-1]:
        _counts.add("hops", name)
    with _counts.message(name):
        return original(self, slot, frame)


def fetch_frame(original, self, slot):
    """The one wait of this plugin's round; watch what is read of the frame."""
    _counts.add("wait", "event", "FrameTransport.fetch", "")
    arrived = original(self, slot)
    if not self.channel.is_sender:
        name = _frame_name(arrived.host)
        _counts.add("delivered", name)
        _counts.watch(name, arrived.host)
    device, host = on_device_and_host(arrived.host)
    return dataclasses.replace(arrived, frame=device, host=host)


def send_proxy_tensor(original, self, whole):
    """A tensor of hidden states that travels without a description."""
    with _counts.message("proxy"):
        return original(self, whole)


def _frame_name(frame: torch.Tensor) -> str:
    with torch._C.DisableTorchFunction():
        return f"frame-{FrameKind(int(frame[0, HEADER_FIELDS.index('kind')])).name}"


def _message_name(tensor_dict: dict) -> str:
    kind = tensor_dict.get("__msg_type__", "default")
    return f"{kind}-verify" if "spec_accept_lens" in tensor_dict else kind


_HOOKS = (
    (f"{_SCHEDULER}.event_loop_pp", event_loop),
    (f"{_SCHEDULER}.run_batch", run_batch),
    (f"{_SCHEDULER}.on_idle", on_idle),
    (f"{_GROUP}.send_tensor_dict", send_tensor_dict),
    (f"{_GROUP}.recv_tensor_dict", receive_tensor_dict),
    (f"{_GROUP}.send_object", send_object),
    (f"{_GROUP}.recv_object", receive_object),
    ("sglang.srt.utils.common.point_to_point_pyobj", point_to_point),
    ("torch.distributed.isend", send),
    ("torch.distributed.send", send),
    ("torch.distributed.irecv", receive),
    ("torch.distributed.recv", receive),
    ("torch.cpu.Event.synchronize", synchronize),
)
_OUR_HOOKS = (
    ("sglang_pp_spec.core.channel.FrameChannel.send", send_frame),
    ("sglang_pp_spec.host.transport.FrameTransport.fetch", fetch_frame),
    ("sglang_pp_spec.host.proxy.ProxyLink._send_one", send_proxy_tensor),
)


def register(registry, settings: Settings) -> None:
    """Register the hooks, to count into the folder of ``settings``; ``registry`` is SGLang's ``HookRegistry``."""
    global _counts
    from sglang.srt.plugins.hook_registry import HookType

    _counts = Counts(settings.count)
    plugin_runs = settings.enabled and _plugin_allowed()
    for target, around in _HOOKS + (_OUR_HOOKS if plugin_runs else ()):
        registry.register(target, around, HookType.AROUND)


def _plugin_allowed() -> bool:
    """Whether this process also loads the plugin proper; importing its transport otherwise would be for nothing."""
    from sglang.srt.environ import envs

    allowed = envs.SGLANG_PLUGINS.get()
    return not allowed or "pp_spec" in allowed.split(",")
