"""A target of Qwen3's mixture-of-experts kind and an EAGLE head for it, both random, made in a second.

The target's layers add little to the embedding, so the next token mostly follows from the last one; the head passes
the token's embedding through, and the target's greedy decoding accepts some of what follows from it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from benchmark.random_model import layer_weights, write
from sglang_pp_spec.tiny import TARGET_PATH

VOCAB, HIDDEN, LAYERS, EXPERTS, EXPERT_SIZE, HEAD_DIM = 320, 128, 4, 4, 64, 32
ADDS = 0.25  # how much a layer of the target adds to the residual stream
SHARED: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": HIDDEN // HEAD_DIM,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
TARGET: dict[str, object] = SHARED | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_SIZE,
    "norm_topk_prob": True,
}
DRAFT: dict[str, object] = SHARED | {
    "architectures": ["LlamaForCausalLMEagle"],
    "model_type": "llama",
    "num_hidden_layers": 1,
}


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """(target, draft) folders under ``folder``, with the tiny model's tokenizer."""
    torch.manual_seed(5)
    target = {f"model.layers.{i}.{name}": weight for i in range(LAYERS) for name, weight in _layer().items()}
    target["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    target["model.norm.weight"] = torch.ones(HIDDEN)
    target["lm_head.weight"] = torch.randn(VOCAB, HIDDEN) * HIDDEN**-0.5
    layer = layer_weights(DRAFT, "cpu", adds=0.0)
    del layer["input_layernorm.weight"]  # EAGLE's layer has none
    draft = {f"layers.0.{name}": weight for name, weight in layer.items()}
    draft["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    write(folder / "target", TARGET, target)
    write(folder / "draft", DRAFT, draft)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_PATH / file, folder / "target")
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
