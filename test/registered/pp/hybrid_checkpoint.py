"""A target of Qwen3.5's kind, random, made in a second: gated delta rule and attention in turns, and an MTP module.

The MTP module passes the token through (``random_target.py``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_target import ADDS, HEAD_DIM, config, ends, write_with_tokenizer
from torch import Tensor

from benchmark.random_model import layer_weights
from sglang_pp_spec.server import ServerSpec

HIDDEN, LAYERS = 64, 8
KEY_HEADS, VALUE_HEADS, RECURRENT_DIM, CONV_WIDTH = 2, 4, 16, 4
TEXT = config(
    HIDDEN,
    LAYERS,
    model_type="qwen3_5_text",
    full_attention_interval=2,
    attn_output_gate=True,
    linear_num_key_heads=KEY_HEADS,
    linear_num_value_heads=VALUE_HEADS,
    linear_key_head_dim=RECURRENT_DIM,
    linear_value_head_dim=RECURRENT_DIM,
    linear_conv_kernel_dim=CONV_WIDTH,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],  # as published: positions in three dimensions, equal for text
        "mrope_interleaved": True,
    },
    partial_rotary_factor=0.5,
    mtp_num_hidden_layers=1,
)
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "language_model_only": True,  # no images, so no vision tower
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "eos_token_id": TEXT["eos_token_id"],
    "bos_token_id": TEXT["bos_token_id"],
}

#: Convolution states are bfloat16 by default, and a rounded one may flip a tie in another batch.
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
#: How states are kept for prefixes: SGLang's own choice, checkpoints every so many tokens; the last one; not at all.
CHECKPOINTS = ("--mamba-track-interval", "64")
LAST_STATES = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
NO_PREFIXES = ("--disable-radix-cache",)


def nextn(spec: ServerSpec, model: str, prefixes: tuple[str, ...]) -> ServerSpec:
    """``spec`` with the hybrid target in the folder ``model`` and its own MTP module."""
    arguments = (*spec.extra_args, "--speculative-algorithm", "NEXTN", *prefixes)
    return replace(spec, model=model, draft=model, extra_args=arguments, extra_env=EXACT)


def write_checkpoint(folder: Path, recurrent_dim: int = RECURRENT_DIM) -> Path:
    """The folder, which serves as target and as draft; ``recurrent_dim``: of the gated delta rule's heads."""
    write_with_tokenizer(folder, with_heads_of(recurrent_dim, CONFIG), make_weights(recurrent_dim))
    return folder


def with_heads_of(recurrent_dim: int, shape: dict[str, Any]) -> dict[str, Any]:
    """``shape`` with other heads of the gated delta rule."""
    sizes = {f"linear_{one}_head_dim": recurrent_dim for one in ("key", "value")}
    return {**shape, "text_config": {**shape["text_config"], **sizes}}


def make_weights(recurrent_dim: int = RECURRENT_DIM, mtp_adds: float = 0.0) -> dict[str, Tensor]:
    """Of the language model and its MTP module, by name; ``mtp_adds``: how much of a prompt a draft depends on."""
    torch.manual_seed(7)
    weights = {}
    for i in range(LAYERS):
        layer = _attention(ADDS) if i % 2 else _recurrent(recurrent_dim)
        weights |= {f"model.language_model.layers.{i}.{name}": weight for name, weight in layer.items()}
    ending = ends(HIDDEN)
    weights["model.language_model.embed_tokens.weight"] = ending["model.embed_tokens.weight"]
    weights["model.language_model.norm.weight"] = torch.zeros(HIDDEN)
    weights["lm_head.weight"] = ending["lm_head.weight"]
    mtp = {f"layers.0.{name}": weight for name, weight in _attention(mtp_adds).items()}
    mtp |= {name: torch.zeros(HIDDEN) for name in ("norm.weight", *(f"pre_fc_norm_{n}.weight" for n in NORMED))}
    mtp["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    return weights | {f"mtp.{name}": weight for name, weight in mtp.items()}


NORMED = ("embedding", "hidden")


def _common(adds: float) -> dict[str, Tensor]:
    """What both kinds of layers have; norms are stored less 1."""
    layer = {name: w for name, w in layer_weights(TEXT, "cpu", adds=adds).items() if name.startswith("mlp.")}
    return layer | {f"{norm}_layernorm.weight": torch.zeros(HIDDEN) for norm in ("input", "post_attention")}


def _attention(adds: float) -> dict[str, Tensor]:
    """Attention whose queries bring a gate each."""
    parts = layer_weights(TEXT, "cpu", adds=adds)
    layer = _common(adds) | {name: w for name, w in parts.items() if name.startswith("self_attn.")}
    layer["self_attn.q_proj.weight"] = torch.randn(2 * HIDDEN, HIDDEN) * HIDDEN**-0.5
    return layer | {f"self_attn.{name}_norm.weight": torch.zeros(HEAD_DIM) for name in "qk"}


def _recurrent(dim: int) -> dict[str, Tensor]:
    """A gated delta rule that remembers some twenty tokens."""
    keys, values = KEY_HEADS * dim, VALUE_HEADS * dim

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns) * scale * columns**-0.5

    own = {
        "in_proj_qkv.weight": matrix(2 * keys + values, HIDDEN),
        "in_proj_z.weight": matrix(values, HIDDEN),
        "in_proj_b.weight": matrix(VALUE_HEADS, HIDDEN),
        "in_proj_a.weight": matrix(VALUE_HEADS, HIDDEN),
        "conv1d.weight": torch.randn(2 * keys + values, 1, CONV_WIDTH) * 0.5,
        "A_log": torch.full((VALUE_HEADS,), 0.1).log(),
        "dt_bias": torch.zeros(VALUE_HEADS),
        "norm.weight": torch.ones(dim),
        "out_proj.weight": matrix(HIDDEN, values, 2 * ADDS),
    }
    return _common(ADDS) | {f"linear_attn.{name}": weight for name, weight in own.items()}
