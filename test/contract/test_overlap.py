"""When overlap is on, and the KV it needs, asked of the host's own functions."""

from types import SimpleNamespace

import pytest

from sglang_pp_spec.core.ring import Overlap
from sglang_pp_spec.host import overlap


def scheduler(device="cpu", disabled=False, setting="auto", backends=(), recurrent=False, prefixes=True):
    return SimpleNamespace(
        tree_cache=SimpleNamespace(supports_mamba=lambda: recurrent, supports_prefix_sharing=lambda: prefixes),
        device=device,
        server_args=SimpleNamespace(disable_overlap_schedule=disabled),
        settings=SimpleNamespace(overlap=setting),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backends[0] if backends else None)),
        draft_worker=SimpleNamespace(spec_v2_attn_backends=backends) if backends else None,
    )


class Flashinfer:
    needs_cpu_seq_lens = True


class Triton:
    needs_cpu_seq_lens = False


@pytest.mark.parametrize(
    ("options", "mode", "reason"),
    [
        ({"disabled": True, "setting": "on"}, Overlap.OFF, "--disable-overlap-schedule"),
        ({"device": "cuda", "disabled": True}, Overlap.OFF, "--disable-overlap-schedule"),
        ({}, Overlap.OFF, "forwards run on the host"),
        ({"setting": "on"}, Overlap.ON, ""),
        ({"setting": "accounting"}, Overlap.ACCOUNTING, "SGLANG_PP_SPEC_OVERLAP=accounting"),
        ({"device": "cuda", "setting": "accounting", "backends": (Triton(),)}, Overlap.ACCOUNTING, "SGLANG_PP_SPEC_"),
        ({"device": "cuda", "backends": (Triton(), Flashinfer(), None)}, Overlap.ACCOUNTING, "Flashinfer plans"),
        ({"device": "cuda", "backends": (Triton(), Triton())}, Overlap.ON, ""),
        ({"setting": "on", "recurrent": True}, Overlap.OFF, "the prefix cache keeps a request's last state"),
        ({"setting": "on", "recurrent": True, "checkpoints": True}, Overlap.ON, ""),
        ({"setting": "on", "recurrent": True, "prefixes": False}, Overlap.ON, ""),
    ],
)
def test_what_is_in_the_way_of_more_overlap_is_named(options, mode, reason, monkeypatch):
    """The flag wins over everything: it is how a user gets the loop of before."""
    options = dict(options)
    kept = SimpleNamespace(mamba=SimpleNamespace(enable_mamba_extra_buffer=options.pop("checkpoints", False)))
    monkeypatch.setattr(overlap, "get_exec", lambda: kept)
    needs = lambda backends: any(b.needs_cpu_seq_lens for b in backends if b)  # noqa: E731
    monkeypatch.setattr(overlap, "decide_needs_cpu_seq_lens", needs)
    found, why = overlap._possible_here(scheduler(**options))
    assert found is mode
    assert why.startswith(reason) and bool(why) is bool(reason)


@pytest.mark.parametrize(
    ("stages", "mode", "words"),
    [
        ([(Overlap.ON, ""), (Overlap.ON, "")], Overlap.ON, "on"),
        ([(Overlap.ON, ""), (Overlap.ACCOUNTING, "A plans")], Overlap.ACCOUNTING, "of accounting alone: A plans"),
        ([(Overlap.ACCOUNTING, "A plans"), (Overlap.OFF, "flag")], Overlap.OFF, "off: flag"),
    ],
)
def test_the_stage_that_can_do_least_decides_for_all(stages, mode, words, monkeypatch, caplog):
    """A stage of its own mind would account for a frame when the others have scheduled without it."""
    monkeypatch.setattr(overlap.dist, "all_gather_object", lambda out, *_, **__: out.__setitem__(slice(None), stages))
    group = SimpleNamespace(world_size=len(stages), cpu_group=None)
    with caplog.at_level("INFO"):
        assert overlap.agree_on_overlap(SimpleNamespace(pp_group=group, **vars(scheduler()))) is mode
    assert f"sglang_pp_spec: overlap {words}\n" in caplog.text


@pytest.mark.parametrize(("pp_spec", "expected"), [(True, 12), (False, 8)])
def test_three_decode_steps_are_reserved_under_pp_spec_alone(pp_spec, expected, monkeypatch):
    """The host reserves two steps of 4; a third one is what the tail draft writes past an unread round."""
    monkeypatch.setattr(overlap, "is_pp_spec", lambda: pp_spec)
    assert overlap.reserve_for_lag(8) == expected


@pytest.mark.parametrize(("pp_spec", "extra", "expected"), [(True, 8, 27), (True, 40, 40), (False, 8, 8)])
def test_a_row_of_the_kv_table_holds_the_reserve_and_a_page(pp_spec, extra, expected, monkeypatch):
    from sglang.srt.mem_cache import allocation_sizing

    monkeypatch.setattr(overlap, "is_pp_spec", lambda: pp_spec)
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 12)
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: 16)
    assert overlap.row_headroom(extra) == expected
