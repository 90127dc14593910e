"""A target of Qwen2's kind and an MTP module of MiMo's kind for it, both random, made in a second.

Qwen2 is what MiMo's target is without its MTP layers, and it can be split into stages, which MiMo's class cannot. The
target's layers add little to the embedding, so the next token mostly follows from the last one; the MTP module passes
the token through and so proposes what the target would say without its layers. Greedy decoding accepts some of that.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from benchmark.random_model import layer_weights, write
from sglang_pp_spec.tiny import TARGET_PATH

VOCAB, HIDDEN, LAYERS = 320, 64, 4
ADDS = 0.25  # how much a layer of the target adds to the residual stream
CONFIG: dict[str, object] = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """(target, draft) folders under ``folder``, with the tiny model's tokenizer."""
    torch.manual_seed(3)
    target = {f"model.layers.{i}.{name}": weight for i in range(LAYERS) for name, weight in _layer(ADDS).items()}
    target["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    target["model.norm.weight"] = torch.ones(HIDDEN)
    target["lm_head.weight"] = torch.randn(VOCAB, HIDDEN) * HIDDEN**-0.5
    mtp = _layer(adds=0.0)
    mtp |= {f"{norm}_layernorm.weight": torch.ones(HIDDEN) for norm in ("token", "hidden", "final")}
    mtp["input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    mtp = {f"model.mtp_layers.0.{name}": weight for name, weight in mtp.items()}
    for name, architecture, weights in (("target", "Qwen2ForCausalLM", target), ("draft", "MiMoForCausalLM", mtp)):
        write(folder / name, CONFIG | {"architectures": [architecture]}, weights)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TARGET_PATH / file, folder / name)
    return folder / "target", folder / "draft"


def _layer(adds: float) -> dict[str, Tensor]:
    """A layer of Qwen2, which is one of Llama with biases."""
    layer = layer_weights(CONFIG, "cpu", adds=adds)
    return layer | {f"self_attn.{name}_proj.bias": torch.zeros(HIDDEN) for name in "qkv"}
