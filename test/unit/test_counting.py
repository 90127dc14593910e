"""The counters behind the relay budget: which calls would make a host wait, and which received bytes nobody reads."""

import torch

from sglang_pp_spec.cpu_engine.counting import Counts, WaitWatcher

# What code for a device says at run time, where ``"cpu"`` in the source means the host.
DEVICE = torch.device("cpu")


def waits_of(action) -> list[tuple[str, str]]:
    """(kind, function) of every wait that ``action`` causes, given a device tensor made before it."""
    counts = Counts("")
    with WaitWatcher(counts):
        action(torch.arange(6, device=DEVICE).reshape(2, 3))
    return [(key.split("|")[2], key.split("|")[4]) for key, n in counts.counters.items() for _ in range(n)]


def test_reading_a_device_tensor_on_the_host_waits():
    assert waits_of(lambda t: t.tolist()) == [("device_to_host", "tolist")]
    assert waits_of(lambda t: t[0, 1].item()) == [("device_to_host", "item")]
    assert waits_of(lambda t: bool(t[0, 0] == 0)) == [("device_to_host", "__bool__")]
    assert waits_of(lambda t: t.to(torch.int32).cpu()) == [("device_to_host", "cpu")]


def test_a_copy_is_waited_for_once_however_often_it_is_read():
    assert waits_of(lambda t: [row.tolist() for row in t.to("cpu")]) == [("device_to_host", "to")]


def test_the_device_tensor_itself_stays_one_after_it_was_copied():
    """On a CPU ``.cpu()`` returns its argument; the mark of host tensors must not stick to it."""
    assert waits_of(lambda t: (t.cpu(), t.tolist())) == [("device_to_host", "cpu"), ("device_to_host", "tolist")]


def test_host_tensors_and_what_is_made_of_them_never_wait():
    assert waits_of(lambda _: (torch.tensor([1, 2]) + 1).sum().item()) == []
    assert waits_of(lambda _: torch.empty(1, device="cpu").item()) == []


def test_a_blocking_upload_waits_and_one_that_does_not_block_does_not():
    assert waits_of(lambda _: torch.tensor([1, 2], device=DEVICE)) == [("host_to_device", "tensor")]
    assert waits_of(lambda _: torch.tensor([1, 2]).to(DEVICE)) == [("host_to_device", "to")]
    assert waits_of(lambda _: torch.tensor([1, 2]).to(DEVICE, non_blocking=True)) == []


def test_bytes_of_a_message_that_only_views_touch_are_unread():
    counts = Counts("")
    message = torch.zeros(4, 4)
    with WaitWatcher(counts):
        counts.watch("frame", message)
        message[0].add(1)
        message[1:3, 1].tolist()
        _ = message[3].view(2, 2), message.numel(), message.size(), message.is_contiguous()
    counts.save()
    assert counts.counters["start|unread|frame"] == (16 - 4 - 2) * 4


def test_a_reused_buffer_is_a_new_message():
    counts = Counts("")
    buffer = torch.zeros(8)
    with WaitWatcher(counts):
        for _ in range(3):
            counts.watch("frame", buffer)
            buffer[:6].sum()
    counts.save()
    assert counts.counters["start|unread|frame"] == 3 * 2 * 4
