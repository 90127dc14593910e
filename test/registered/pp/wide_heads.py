"""The tiny model with attention heads of 64 instead of 32, for backends without kernels for such narrow ones.

The added half of a head is zero, so the model computes what it computed: dimension i and i + 16 of a head turn
together at 10000^(-2i/32); among 64 dimensions that pair is (i, i + 32), and turns alike at a base of 10000^2.
Attention divides by sqrt(64) instead of sqrt(32), for which the queries make up.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmark.random_model import write

NARROW, WIDE = 32, 64


def widened(source: Path, folder: Path) -> Path:
    """The checkpoint ``source`` with wide heads, in ``folder``."""
    config = json.loads((source / "config.json").read_text())
    assert config["head_dim"] == NARROW
    config["head_dim"] = WIDE
    config["rope_parameters"]["rope_theta"] **= 2
    weights = load_file(source / "model.safetensors")
    write(folder, config, {name: _wide(name, weight) for name, weight in weights.items()})
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _wide(name: str, weight: Tensor) -> Tensor:
    if name.endswith("q_proj.weight"):
        return spread(weight.float() * (WIDE / NARROW) ** 0.5).to(weight.dtype)
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return spread(weight)
    if name.endswith("o_proj.weight"):
        return spread(weight.T).T.contiguous()
    return weight


def spread(rows: Tensor) -> Tensor:
    """``rows`` ([heads * 32, n]) with zeros behind each half of a head: [heads * 64, n]."""
    halves = rows.reshape(-1, NARROW // 2, rows.shape[1])
    return torch.cat([halves, torch.zeros_like(halves)], dim=1).reshape(-1, rows.shape[1])
