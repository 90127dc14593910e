"""Targets that are refused before their weights are loaded."""

from types import SimpleNamespace

import pytest
from sglang.srt.configs import Qwen3NextConfig
from transformers import LlamaConfig

from sglang_pp_spec.core.errors import UnsupportedCombination
from sglang_pp_spec.host.arguments import check_target


def model(config) -> SimpleNamespace:
    return SimpleNamespace(hf_config=config, linear_attn_registry_result=None)


def test_a_target_with_recurrent_layers_is_refused() -> None:
    """Earlier stages never moved its recurrent state: wrong text, and acceptance as usual."""
    with pytest.raises(UnsupportedCombination, match="recurrent layers"):
        check_target(model(Qwen3NextConfig()))


def test_deepseek_v4_is_refused() -> None:
    config = LlamaConfig(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4")
    with pytest.raises(UnsupportedCombination, match="DeepSeek-V4"):
        check_target(model(config))


def test_a_target_of_attention_layers_alone_is_not() -> None:
    check_target(model(LlamaConfig(architectures=["LlamaForCausalLM"])))
