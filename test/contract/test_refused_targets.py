"""Targets that are refused before their weights are loaded."""

import contextlib
from types import SimpleNamespace

import pytest
from sglang.srt.configs import (
    InternS2PreviewConfig,
    NemotronHConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3NextConfig,
)
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.managers.scheduler import Scheduler
from transformers import LlamaConfig

from sglang_pp_spec.core.errors import UnsupportedCombination
from sglang_pp_spec.core.layout import TreeShape
from sglang_pp_spec.host import scheduler as ours
from sglang_pp_spec.host.arguments import check_target


def model(config) -> SimpleNamespace:
    return SimpleNamespace(
        hf_config=config,
        linear_attn_registry_result=None,
        is_multimodal=False,
        is_draft_model=False,
        attention_arch=AttentionArch.MHA,
    )


@pytest.mark.parametrize(
    "config",
    [
        NemotronHConfig(architectures=["NemotronHForCausalLM"]),
        Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]),
        InternS2PreviewConfig(architectures=["InternS2PreviewForConditionalGeneration"]),
    ],
    ids=["Mamba", "a gated delta rule with an assertion against stages", "one that came later"],
)
def test_a_target_with_recurrent_layers_other_than_qwen3_5_is_refused(config) -> None:
    """Mamba's scratch is written by the batch's rows and, with the switch on, read by those of the pool."""
    with pytest.raises(UnsupportedCombination, match="only those of Qwen3.5 are served"):
        check_target(model(config))


@pytest.mark.parametrize(("config", "kind"), [(Qwen3_5Config, "Qwen3_5"), (Qwen3_5MoeConfig, "Qwen3_5Moe")])
def test_qwen3_5_is_served(config, kind) -> None:
    target = model(config(architectures=[f"{kind}ForConditionalGeneration"]))
    assert mambaish_config(target) is not None, "nothing was decided here"
    check_target(target)


def test_deepseek_v4_is_refused() -> None:
    config = LlamaConfig(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4")
    with pytest.raises(UnsupportedCombination, match="DeepSeek-V4"):
        check_target(model(config))


def test_a_target_that_sees_images_is_refused_with_eagle3_alone() -> None:
    """The head of the last stage asked for embeddings that the first stage has, and the server ended at an image."""
    target = model(LlamaConfig(architectures=["LlamaForCausalLM"]))
    target.is_multimodal = True
    check_target(target)
    with pytest.raises(UnsupportedCombination, match="embeddings of images"):
        check_target(target, eagle3=True)


def test_a_target_with_latent_attention_is_refused_with_flashinfer_alone() -> None:
    """Its plans of two slots share pinned buffers, and the later one does not wait for the earlier one's copy."""
    target = model(LlamaConfig(architectures=["LlamaForCausalLM"]))
    check_target(target, flashinfer=True)
    target.attention_arch = AttentionArch.MLA
    check_target(target)
    with pytest.raises(UnsupportedCombination, match="MLA target.*use another backend"):
        check_target(target, flashinfer=True)


def test_a_target_of_attention_layers_alone_is_not() -> None:
    check_target(model(LlamaConfig(architectures=["LlamaForCausalLM"])))


@pytest.mark.parametrize(("algorithm", "refused"), [("EAGLE3", True), ("EAGLE", False)])
def test_a_scheduler_says_to_the_check_whether_its_head_is_an_eagle3_one(monkeypatch, algorithm, refused) -> None:
    monkeypatch.setattr(Scheduler, "init_model_config", lambda self: None)
    monkeypatch.setattr(ours, "uses_flashinfer", lambda: False)
    monkeypatch.setattr(ours, "tree_shape", lambda: TreeShape(2, 2, 4))
    monkeypatch.setattr(ours, "get_parallel", lambda: SimpleNamespace(pp_size=2))
    scheduler = object.__new__(ours.PPSpecScheduler)
    scheduler.model_config = model(LlamaConfig(architectures=["LlamaForCausalLM"]))
    scheduler.model_config.is_multimodal = True
    scheduler.server_args = SimpleNamespace(speculative_algorithm=algorithm)
    with pytest.raises(SystemExit, match="images") if refused else contextlib.nullcontext():
        scheduler.init_model_config()


@pytest.mark.parametrize("flashinfer", [True, False])
def test_a_scheduler_refuses_latent_attention_with_flashinfer_and_otherwise_asks_for_host_plans(
    monkeypatch, flashinfer
) -> None:
    asked: list[TreeShape] = []
    monkeypatch.setattr(Scheduler, "init_model_config", lambda self: None)
    monkeypatch.setattr(ours, "uses_flashinfer", lambda: flashinfer)
    monkeypatch.setattr(ours, "tree_shape", lambda: TreeShape(2, 1, 3))
    monkeypatch.setattr(ours, "prefer_host_plans", asked.append)
    monkeypatch.setattr(ours, "get_parallel", lambda: SimpleNamespace(pp_size=2))
    scheduler = object.__new__(ours.PPSpecScheduler)
    scheduler.model_config = model(LlamaConfig(architectures=["LlamaForCausalLM"]))
    scheduler.model_config.attention_arch = AttentionArch.MLA
    scheduler.server_args = SimpleNamespace(speculative_algorithm="EAGLE")
    with pytest.raises(SystemExit, match="MLA target") if flashinfer else contextlib.nullcontext():
        scheduler.init_model_config()
    assert asked == ([] if flashinfer else [TreeShape(2, 1, 3)])


@pytest.mark.parametrize(("pp_size", "algorithm"), [(2, "EAGLE"), (1, "EAGLE"), (2, None)])
def test_a_scheduler_refuses_as_soon_as_it_knows_the_model_and_only_under_pp_spec(monkeypatch, pp_size, algorithm):
    monkeypatch.setattr(Scheduler, "init_model_config", lambda self: None)
    monkeypatch.setattr(ours, "uses_flashinfer", lambda: False)
    monkeypatch.setattr(ours, "tree_shape", lambda: TreeShape(2, 2, 4))
    monkeypatch.setattr(ours, "get_parallel", lambda: SimpleNamespace(pp_size=pp_size))
    scheduler = object.__new__(ours.PPSpecScheduler)
    scheduler.model_config = model(NemotronHConfig(architectures=["NemotronHForCausalLM"]))
    scheduler.server_args = SimpleNamespace(speculative_algorithm=algorithm)
    if pp_size == 2 and algorithm:
        with pytest.raises(SystemExit, match="recurrent layers"):
            scheduler.init_model_config()
    else:
        scheduler.init_model_config()
