"""Hidden states from a stage to the next ("proxy tensors"), without a message that describes them.

SGLang sends a pickled description with every proxy, and the receiving host waits for it before it can prepare its own
forward. In a verify round both ends know the shapes: tokens = rows x draft tokens, the rest is the model's. So the
first verify proxy goes the host's way and teaches both ends the layout; later ones are tensors alone, received on a
stream of their own while the host prepares the forward. Prefill steps, whose tensors may vary, keep the host's way.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed.parallel_state import P2PWork
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from torch import Tensor

from ..core.errors import FrameRefused, PPSpecError
from .streams import new_stream, uses_streams


@dataclass(frozen=True)
class TensorLayout:
    """One proxy tensor: [tokens, *trailing] of ``dtype``."""

    name: str
    dtype: torch.dtype
    trailing: tuple[int, ...]


class ProxyLink:
    """This stage's ends of the links to its neighbours."""

    def __init__(self, scheduler, num_draft_tokens: int) -> None:
        self.scheduler = scheduler
        self.num_draft_tokens = num_draft_tokens
        self._layouts: dict[str, tuple[TensorLayout, ...] | None] = {}  # per direction; None: no common layout
        self._has_streams = uses_streams(scheduler)
        self._receives_on_sms = self._has_streams and dist.get_backend(scheduler.pp_group.device_group) == "nccl"
        self._streams = dict(zip(("in", "out"), self._new_streams(), strict=True))

    def receive(self, batch: ScheduleBatch) -> PPProxyTensors | None:
        """Hidden states of ``batch`` from the previous stage; on a GPU the forward stream waits, not the host.

        NCCL receives on SMs: a receive that waits for its sender takes them from the kernels beside it. So it is
        queued behind the forwards that come before its own; what was sent meanwhile lies in NCCL's buffer, or, if it
        does not fit, the sender's send waits on a stream of its own.
        """
        layout = self._layout("in", batch)
        if layout is None:
            proxy = self.scheduler._pp_recv_proxy_tensors()
            self._learn("in", batch, proxy.tensors)
            return proxy
        num_tokens = self._num_tokens(batch)
        with self._stream("in") as stream:
            if self._receives_on_sms:
                stream.wait_stream(self.scheduler.forward_stream)
            try:
                tensors = {part.name: self._receive_one(part, num_tokens) for part in layout}
            except RuntimeError as error:
                raise FrameRefused(
                    f"no hidden states of {num_tokens} tokens for the {len(batch.reqs)} rows launched here: the "
                    f"previous stage launched another batch, or it is gone ({error})"
                ) from error
            if stream is not None:
                self.scheduler.pp_proxy_recv_event = self.scheduler.device_module.Event()
                self.scheduler.pp_proxy_recv_event.record(stream)
        return PPProxyTensors(tensors)

    def send(self, batch: ScheduleBatch, tensors: dict[str, Tensor], launched) -> list[P2PWork]:
        """Start sending ``tensors`` to the next stage behind the event ``launched``; keep the returned work.

        Rows that only fill a CUDA graph's batch are nobody's and do not travel.
        """
        tensors = self._of_requests(batch, tensors)
        layout = self._layout("out", batch)
        if layout is None:
            self._learn("out", batch, tensors)
            return self.scheduler._pp_send_dict_to_next_stage(
                tensors, async_send=True, msg_type="proxy", ready_event=launched
            )
        num_tokens = self._num_tokens(batch)
        if _layout_of(tensors, num_tokens) != layout:
            now = {name: (part.dtype, tuple(part.shape)) for name, part in tensors.items() if torch.is_tensor(part)}
            raise PPSpecError(f"hidden states of {num_tokens} tokens changed their layout: {layout} became {now}")
        with self._stream("out") as stream:
            if stream is not None:
                stream.wait_event(launched)
            return [self._send_one(tensors[part.name]) for part in layout]

    def _of_requests(self, batch: ScheduleBatch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if batch.forward_mode.is_extend():
            return tensors
        num_tokens = self._num_tokens(batch)
        return {name: part[:num_tokens] if torch.is_tensor(part) else part for name, part in tensors.items()}

    def _layout(self, way: str, batch: ScheduleBatch) -> tuple[TensorLayout, ...] | None:
        return None if batch.forward_mode.is_extend() else self._layouts.get(way)

    def _learn(self, way: str, batch: ScheduleBatch, tensors: dict[str, Tensor]) -> None:
        """Both ends see the same first verify proxy and so come to the same layout."""
        if not batch.forward_mode.is_extend() and way not in self._layouts:
            self._layouts[way] = _layout_of(tensors, self._num_tokens(batch))

    def _num_tokens(self, batch: ScheduleBatch) -> int:
        return len(batch.reqs) * self.num_draft_tokens

    def _receive_one(self, part: TensorLayout, num_tokens: int) -> Tensor:
        whole = torch.empty((num_tokens, *part.trailing), dtype=part.dtype, device=self.scheduler.device)
        mine, group = self._share(whole), self.scheduler.pp_group
        dist.irecv(mine, group.ranks[group.rank_in_group - 1], group=self._group(whole)).wait()
        if mine.numel() == whole.numel():
            return whole
        return self.scheduler.attn_tp_group.all_gather(mine, dim=0).reshape(whole.shape)

    def _send_one(self, whole: Tensor) -> P2PWork:
        mine, group = self._share(whole).contiguous(), self.scheduler.pp_group
        return P2PWork(dist.isend(mine, group.ranks[group.rank_in_group + 1], group=self._group(whole)), mine)

    def _share(self, whole: Tensor) -> Tensor:
        """What this tensor-parallel rank moves of a tensor: like the host, an equal share where it divides."""
        tp_group = self.scheduler.attn_tp_group
        if tp_group.world_size == 1 or whole.numel() % tp_group.world_size:
            return whole
        return whole.reshape(tp_group.world_size, -1)[tp_group.rank_in_group]

    def _group(self, tensor: Tensor) -> dist.ProcessGroup:
        group = self.scheduler.pp_group
        return group.cpu_group if tensor.is_cpu else group.device_group

    def _new_streams(self) -> tuple[Any, Any]:
        """Two streams that are none of those in use, where there are streams."""
        if not self._has_streams:
            return None, None
        scheduler = self.scheduler
        used = (scheduler.forward_stream, scheduler.copy_stream, scheduler.schedule_stream)
        one = new_stream(scheduler, used)
        return one, new_stream(scheduler, (*used, one))

    @contextlib.contextmanager
    def _stream(self, way: str):
        stream = self._streams[way]
        if stream is None:
            yield None
            return
        with self.scheduler.device_module.stream(stream):
            yield stream


def _layout_of(tensors: dict[str, Tensor], num_tokens: int) -> tuple[TensorLayout, ...] | None:
    """The layout of a proxy whose tensors all are [num_tokens, ...]; None if one is not."""
    parts = {name: tensor for name, tensor in tensors.items() if torch.is_tensor(tensor)}
    if any(tensor.dim() < 1 or tensor.shape[0] != num_tokens for tensor in parts.values()):
        return None
    return tuple(TensorLayout(name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in parts.items())
