"""The tiny model's EAGLE3 head made into others: fed by other layers, or narrower."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmark.random_model import write
from sglang_pp_spec.tiny import DRAFT_EAGLE3_PATH


def fed_by(folder: Path, layers: list[int]) -> Path:
    """The EAGLE3 head, fed by other layers than it was trained on, in ``folder``."""
    shutil.copytree(DRAFT_EAGLE3_PATH, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def half_as_wide(folder: Path) -> Path:
    """The EAGLE3 head cut to half its width, in ``folder``: it drafts badly, but the same everywhere."""
    weights = load_file(DRAFT_EAGLE3_PATH / "model.safetensors")
    config = json.loads((DRAFT_EAGLE3_PATH / "config.json").read_text())
    size, wide = config["hidden_size"] // 2, config["hidden_size"]
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            rows = weight.shape[0] // 2  # of [embedding | state]
            weights[name] = torch.cat([weight[:rows, :size], weight[:rows, wide : wide + size]], dim=1)
        elif name in ("embed_tokens.weight", "lm_head.weight") or name.endswith(
            ("gate_proj.weight", "up_proj.weight")
        ):
            weights[name] = weight[:, :size]
        elif name.endswith("o_proj.weight"):
            weights[name] = weight[:size, :size]
        elif name != "d2t":
            weights[name] = weight[:size]
    config |= {"hidden_size": size, "num_attention_heads": 2, "num_key_value_heads": 1}
    write(folder, config, {name: weight.contiguous() for name, weight in weights.items()})
    return folder
