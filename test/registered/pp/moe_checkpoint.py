"""A target of Qwen3's mixture-of-experts kind and an EAGLE head for it, both random, made in a second.

The head passes the token through (``random_target.py``).
"""

from __future__ import annotations

from pathlib import Path

import torch
from random_target import ADDS, HEAD_DIM, config, ends, write_with_tokenizer
from torch import Tensor

from benchmark.random_model import layer_weights, write

HIDDEN, LAYERS, EXPERTS, EXPERT_SIZE = 128, 4, 4, 64
TARGET = config(
    HIDDEN,
    LAYERS,
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_intermediate_size=EXPERT_SIZE,
    norm_topk_prob=True,
)
DRAFT = config(HIDDEN, 1, architectures=["LlamaForCausalLMEagle"], model_type="llama")


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """(target, draft) folders under ``folder``."""
    torch.manual_seed(5)
    target = {f"model.layers.{i}.{name}": weight for i in range(LAYERS) for name, weight in _layer().items()}
    target |= ends(HIDDEN)
    draft = {f"layers.0.{name}": weight for name, weight in layer_weights(DRAFT, "cpu", adds=0.0).items()}
    del draft["layers.0.input_layernorm.weight"]  # EAGLE's layer has none
    draft["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    write_with_tokenizer(folder / "target", TARGET, target)
    write(folder / "draft", DRAFT, draft)
    return folder / "target", folder / "draft"


def _layer() -> dict[str, Tensor]:
    """Attention with norms of queries and keys, a router, and the experts."""
    layer = {name: w for name, w in layer_weights(TARGET, "cpu", adds=ADDS).items() if not name.startswith("mlp.")}
    layer |= {f"self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
    layer["mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        for name, rows, columns, scale in (
            ("gate_proj", EXPERT_SIZE, HIDDEN, 1.0),
            ("up_proj", EXPERT_SIZE, HIDDEN, 1.0),
            ("down_proj", HIDDEN, EXPERT_SIZE, ADDS),
        ):
            layer[f"mlp.experts.{expert}.{name}.weight"] = torch.randn(rows, columns) * columns**-0.5 * scale
    return layer
