"""The played backend that plans from lengths on the host: it must notice what a GPU would not."""

from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.cpu_engine.planning import plan_from_host_lengths


def forward_batch(on_host):
    return SimpleNamespace(
        seq_lens=torch.tensor([5, 7]), seq_lens_cpu=on_host, forward_mode=SimpleNamespace(name="TARGET_VERIFY")
    )


@pytest.mark.parametrize("on_host", [None, torch.tensor([5, 6]), torch.tensor([5])])
def test_a_forward_whose_lengths_on_the_host_are_missing_or_stale_ends_the_server(on_host):
    with pytest.raises(RuntimeError, match="TARGET_VERIFY: lengths on the host"):
        plan_from_host_lengths(lambda *_: None, None, forward_batch(on_host))


def test_a_forward_with_the_same_lengths_on_both_sides_is_planned():
    batch = forward_batch(torch.tensor([5, 7]))
    assert plan_from_host_lengths(lambda self, batch: "planned", None, batch) == "planned"
