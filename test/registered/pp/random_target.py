"""What random targets of the server tests share: a residual stream to which the layers add little.

So the next token mostly follows from the last one, and a drafter that passes the token through proposes what the
target would say without its layers. Greedy decoding accepts some of that.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from benchmark.random_model import write
from sglang_pp_spec.tiny import TARGET_PATH

VOCAB, HEAD_DIM = 320, 32  # the tiny model's
ADDS = 0.25  # how much a layer adds to the residual stream


def config(hidden: int, layers: int, **more: object) -> dict[str, object]:
    """A config of ``layers`` layers of ``hidden``, and what a kind of model needs besides."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    } | more


def ends(hidden: int) -> dict[str, Tensor]:
    """Embedding, final norm and head."""
    return {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(VOCAB, hidden) * hidden**-0.5,
    }


def write_with_tokenizer(folder: Path, shape: dict[str, object], weights: dict[str, Tensor]) -> None:
    """A checkpoint with the tiny model's tokenizer."""
    write(folder, shape, weights)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_PATH / file, folder)
