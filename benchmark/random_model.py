"""A Llama of any size with random weights and an EAGLE head for it, for timing rounds on a GPU.

    python -m benchmark.random_model OUT --layers 24 --hidden 2048
    python -m benchmark.random_model OUT --layers 80 --hidden 6144 --config-only      # for --load-format dummy

Random weights cost what trained ones cost. The head passes the target's hidden state through (``fc = [0 | I]``, its
own layer adds nothing), so it proposes the token the target just chose: greedy random models repeat themselves, and
some drafts are accepted. Compare rounds, not tokens. Writes OUT/target and OUT/draft (token ids only, no tokenizer).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 32000
HEAD_DIM = 128


def config(layers: int, hidden: int, architecture: str) -> dict[str, object]:
    """The Hugging Face config of target or draft."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": max(2, hidden // HEAD_DIM // 4),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 16384,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def layer_weights(shape: dict[str, object], device: str, *, adds: float = 1.0) -> dict[str, torch.Tensor]:
    """One decoder layer's weights, normal with the usual 1/sqrt(fan-in); what it adds to its input times ``adds``."""
    hidden, inner = int(str(shape["hidden_size"])), int(str(shape["intermediate_size"]))
    kv = int(str(shape["num_key_value_heads"])) * int(str(shape["head_dim"]))

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        weight = torch.randn(rows, columns, device=device) * scale * columns**-0.5
        return weight.to(torch.bfloat16).cpu()

    return {
        "self_attn.q_proj.weight": matrix(hidden, hidden),
        "self_attn.k_proj.weight": matrix(kv, hidden),
        "self_attn.v_proj.weight": matrix(kv, hidden),
        "self_attn.o_proj.weight": matrix(hidden, hidden, adds),
        "mlp.gate_proj.weight": matrix(inner, hidden),
        "mlp.up_proj.weight": matrix(inner, hidden),
        "mlp.down_proj.weight": matrix(hidden, inner, adds),
        "input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }


def write(folder: Path, shape: dict[str, object], weights: dict[str, torch.Tensor]) -> None:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    save_file(weights, folder / "model.safetensors")


def write_configs(out: Path, layers: int, hidden: int) -> None:
    """OUT/target and OUT/draft without weights."""
    for name, shape in (
        ("target", config(layers, hidden, "LlamaForCausalLM")),
        ("draft", config(1, hidden, "LlamaForCausalLMEagle")),
    ):
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "config.json").write_text(json.dumps(shape, indent=1))


def build(out: Path, layers: int, hidden: int, seed: int = 0) -> None:
    """Write OUT/target and OUT/draft."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = config(layers, hidden, "LlamaForCausalLM")
    weights = {
        f"model.layers.{i}.{name}": weight
        for i in range(layers)
        for name, weight in layer_weights(target, device).items()
    }
    weights["model.embed_tokens.weight"] = torch.randn(VOCAB, hidden).to(torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["lm_head.weight"] = (torch.randn(VOCAB, hidden) * hidden**-0.5).to(torch.bfloat16)
    write(out / "target", target, weights)

    draft = config(1, hidden, "LlamaForCausalLMEagle")
    head = {f"layers.0.{name}": w for name, w in layer_weights(draft, device, adds=0.0).items()}
    del head["layers.0.input_layernorm.weight"]  # an EAGLE head normalises nothing before its first layer
    head["fc.bias"] = torch.zeros(hidden, dtype=torch.bfloat16)
    identity = torch.eye(hidden, dtype=torch.bfloat16)
    head["fc.weight"] = torch.cat([torch.zeros_like(identity), identity], dim=1)
    write(out / "draft", draft, head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--config-only", action="store_true", help="no weights; SGLang makes them up")
    arguments = parser.parse_args()
    make = write_configs if arguments.config_only else build
    make(arguments.out, arguments.layers, arguments.hidden)


if __name__ == "__main__":
    main()
