"""The hybrid target with a vision tower, random: a model that is asked about images, as Qwen3.5's published ones are.

Its MTP module reads embeddings of images too, and what it proposes depends on them.
"""

from __future__ import annotations

import json
from pathlib import Path

import hybrid_checkpoint
import torch
from hybrid_checkpoint import HIDDEN, RECURRENT_DIM, with_heads_of
from torch import Tensor

from benchmark.random_model import write
from sglang_pp_spec.tiny import TARGET_PATH

WIDTH, BLOCKS, INNER, GRID = 32, 2, 64, 8  # of the tower; its positions are GRID x GRID
PATCH, MERGE, FRAMES = 16, 2, 2
SPECIALS = {"vision_start": 259, "vision_end": 260, "image": 261, "video": 262}  # token ids
NAMES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "".join(NAMES[i] for i in (0, 2, 1))  # in a prompt, where an image belongs
PIXELS = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2}
PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "size": PIXELS,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
#: SGLang warms a server of such a model up with a chat about an image.
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}" + IMAGE + "{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
MTP_ADDS = 0.5  # drafts depend on what the MTP module has read, so on images
CONFIG = {name: value for name, value in hybrid_checkpoint.CONFIG.items() if name != "language_model_only"} | {
    "image_token_id": SPECIALS["image"],
    "video_token_id": SPECIALS["video"],
    "vision_start_token_id": SPECIALS["vision_start"],
    "vision_end_token_id": SPECIALS["vision_end"],
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": BLOCKS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": GRID * GRID,
        "deepstack_visual_indexes": [],
    },
}


def write_checkpoint(folder: Path, recurrent_dim: int = RECURRENT_DIM) -> Path:
    """The folder, which serves as target and as draft; ``recurrent_dim``: of the gated delta rule's heads."""
    language = hybrid_checkpoint.make_weights(recurrent_dim, MTP_ADDS)
    tower = {f"model.visual.{name}": weight for name, weight in _tower().items()}
    write(folder, with_heads_of(recurrent_dim, CONFIG), language | tower)
    _write_tokenizer(folder)
    images = {"image_processor_type": "Qwen2VLImageProcessor"}
    videos = {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | images))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR | videos))
    return folder


def _tower() -> dict[str, Tensor]:
    merged = WIDTH * MERGE * MERGE
    weights = {
        "patch_embed.proj.weight": torch.randn(WIDTH, 3, FRAMES, PATCH, PATCH) * (3 * FRAMES * PATCH * PATCH) ** -0.5,
        "patch_embed.proj.bias": torch.zeros(WIDTH),
        "pos_embed.weight": torch.randn(GRID * GRID, WIDTH) * 0.5,
        **_norm("merger.norm", WIDTH),
        **_linear("merger.linear_fc1", merged, merged),
        **_linear("merger.linear_fc2", merged, HIDDEN, scale=3.0),
    }
    for i in range(BLOCKS):
        block = f"blocks.{i}."
        weights |= _norm(f"{block}norm1", WIDTH) | _norm(f"{block}norm2", WIDTH)
        weights |= _linear(f"{block}attn.qkv", WIDTH, 3 * WIDTH) | _linear(f"{block}attn.proj", WIDTH, WIDTH)
        weights |= _linear(f"{block}mlp.linear_fc1", WIDTH, INNER) | _linear(f"{block}mlp.linear_fc2", INNER, WIDTH)
    return weights


def _norm(name: str, size: int) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.ones(size), f"{name}.bias": torch.zeros(size)}


def _linear(name: str, inputs: int, outputs: int, scale: float = 1.0) -> dict[str, Tensor]:
    weight = torch.randn(outputs, inputs) * scale * inputs**-0.5
    return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(outputs)}


def _write_tokenizer(folder: Path) -> None:
    """The tiny model's, with tokens around images."""
    tokenizer = json.loads((TARGET_PATH / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [
        like | {"id": number, "content": name} for name, number in zip(NAMES, SPECIALS.values(), strict=True)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((TARGET_PATH / "tokenizer_config.json").read_text())
    tokens = dict(zip(("vision_bos_token", "vision_eos_token", "image_token", "video_token"), NAMES, strict=True))
    (folder / "chat_template.jinja").write_text(CHAT)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_special_tokens": tokens}))
