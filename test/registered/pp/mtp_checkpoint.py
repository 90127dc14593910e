"""A target of Qwen2's kind and an MTP module of MiMo's kind for it, both random, made in a second.

Qwen2 is what MiMo's target is without its MTP layers, and it can be split into stages, which MiMo's class cannot. The
target's layers add little to the embedding, so the next token mostly follows from the last one; the MTP module passes
the token through and so proposes what the target would say without its layers. Greedy decoding accepts some of that.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_pp_spec.tiny import TARGET_PATH

VOCAB, HIDDEN, INNER, HEADS, HEAD_DIM = 320, 64, 128, 2, 32
LAYERS = 4
ADDS = 0.25  # how much a layer of the target adds to the residual stream


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """(target, draft) folders under ``folder``, with the tiny model's tokenizer."""
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    def layer(adds: float) -> dict[str, torch.Tensor]:
        projections = {f"self_attn.{name}_proj": matrix(HEADS * HEAD_DIM, HIDDEN) for name in "qkv"}
        return (
            {f"{name}.weight": weight for name, weight in projections.items()}
            | {f"{name}.bias": torch.zeros(len(weight)) for name, weight in projections.items()}
            | {
                "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, adds),
                "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
                "mlp.up_proj.weight": matrix(INNER, HIDDEN),
                "mlp.down_proj.weight": matrix(HIDDEN, INNER, adds),
                "input_layernorm.weight": torch.ones(HIDDEN),
                "post_attention_layernorm.weight": torch.ones(HIDDEN),
            }
        )

    target = {f"model.layers.{i}.{name}": weight for i in range(LAYERS) for name, weight in layer(ADDS).items()}
    target["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    target["model.norm.weight"] = torch.ones(HIDDEN)
    target["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    mtp = {f"model.mtp_layers.0.{name}": weight for name, weight in layer(adds=0.0).items()}
    for norm in ("token", "hidden", "final"):
        mtp[f"model.mtp_layers.0.{norm}_layernorm.weight"] = torch.ones(HIDDEN)
    mtp["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    return _write(folder / "target", "Qwen2ForCausalLM", target), _write(folder / "draft", "MiMoForCausalLM", mtp)


def _write(folder: Path, architecture: str, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": [architecture],
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_PATH / name, folder)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder
