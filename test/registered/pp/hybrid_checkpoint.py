"""A target of Qwen3.5's kind, random, made in a second: gated delta rule and attention in turns, and an MTP module.

The MTP module passes the token through (``random_target.py``).
"""

from __future__ import annotations

from pathlib import Path

import torch
from random_target import ADDS, HEAD_DIM, config, ends, write_with_tokenizer
from torch import Tensor

from benchmark.random_model import layer_weights

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


def write_checkpoint(folder: Path) -> Path:
    """The folder, which serves as target and as draft."""
    torch.manual_seed(7)
    weights = {}
    for i in range(LAYERS):
        layer = _attention(ADDS) if i % 2 else _recurrent()
        weights |= {f"model.language_model.layers.{i}.{name}": weight for name, weight in layer.items()}
    ending = ends(HIDDEN)
    weights["model.language_model.embed_tokens.weight"] = ending["model.embed_tokens.weight"]
    weights["model.language_model.norm.weight"] = torch.zeros(HIDDEN)
    weights["lm_head.weight"] = ending["lm_head.weight"]
    mtp = {f"layers.0.{name}": weight for name, weight in _attention(adds=0.0).items()}
    mtp |= {name: torch.zeros(HIDDEN) for name in ("norm.weight", *(f"pre_fc_norm_{n}.weight" for n in NORMED))}
    mtp["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    weights |= {f"mtp.{name}": weight for name, weight in mtp.items()}
    write_with_tokenizer(folder, CONFIG, weights)
    return folder


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


def _recurrent() -> dict[str, Tensor]:
    """A gated delta rule that remembers some twenty tokens."""
    keys, values = KEY_HEADS * RECURRENT_DIM, VALUE_HEADS * RECURRENT_DIM

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
        "norm.weight": torch.ones(RECURRENT_DIM),
        "out_proj.weight": matrix(HIDDEN, values, 2 * ADDS),
    }
    return _common(ADDS) | {f"linear_attn.{name}": weight for name, weight in own.items()}
