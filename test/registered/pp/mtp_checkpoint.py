"""A target of Qwen2's kind and an MTP module of MiMo's kind for it, both random, made in a second.

Qwen2 is what MiMo's target is without its MTP layers, and it can be split into stages, which MiMo's class cannot. The
MTP module passes the token through (``random_target.py``).
"""

from __future__ import annotations

from pathlib import Path

import torch
from random_target import ADDS, config, ends, write_with_tokenizer
from torch import Tensor

from benchmark.random_model import layer_weights

HIDDEN, LAYERS = 64, 4
CONFIG = config(HIDDEN, LAYERS, model_type="qwen2", num_nextn_predict_layers=1)


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """(target, draft) folders under ``folder``."""
    torch.manual_seed(3)
    target = {f"model.layers.{i}.{name}": weight for i in range(LAYERS) for name, weight in _layer(ADDS).items()}
    target |= ends(HIDDEN)
    mtp = _layer(adds=0.0)
    mtp |= {f"{norm}_layernorm.weight": torch.ones(HIDDEN) for norm in ("token", "hidden", "final")}
    mtp["input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    mtp = {f"model.mtp_layers.0.{name}": weight for name, weight in mtp.items()}
    write_with_tokenizer(folder / "target", CONFIG | {"architectures": ["Qwen2ForCausalLM"]}, target)
    write_with_tokenizer(folder / "draft", CONFIG | {"architectures": ["MiMoForCausalLM"]}, mtp)
    return folder / "target", folder / "draft"


def _layer(adds: float) -> dict[str, Tensor]:
    """A layer of Qwen2, which is one of Llama with biases."""
    layer = layer_weights(CONFIG, "cpu", adds=adds)
    return layer | {f"self_attn.{name}_proj.bias": torch.zeros(HIDDEN) for name in "qkv"}
