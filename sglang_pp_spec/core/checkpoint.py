"""Read from a checkpoint's files, before any model is loaded, whether PP x speculative decoding can use it.

Standard library only. `check_checkpoints` is the list of what must hold:

1. the target's folder has a config and at least one layer per pipeline stage;
2. the target's checkpoint has the input embedding, whole and as wide as the config says. The draft lives on
   the last stage and the embedding's module on the first, so the draft reads it from the file;
3. the draft's folder has a config and weights, made for the target's hidden size and vocabulary.

A folder without safetensors files is left to SGLang's loader: its weights cannot be listed without torch.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Names of the input embedding over model families, most common first.
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.word_embeddings.weight",
    "tok_embeddings.weight",
    "embed_tokens.weight",
    "embed.weight",
)
_EMBEDDING_ENDS = ("embed_tokens.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed.weight")
# An MTP layer brings an embedding of its own, under `layers.<n>.` or a submodule named after the method.
_NOT_THE_TARGETS = re.compile(r"(^|\.)layers\.\d+\.|mtp|nextn|eagle|draft", re.IGNORECASE)

_INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Where multimodal configs keep the language model's numbers.
_TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config")
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


class PreflightFailure(Exception):
    """Something that must be repaired before a server can start: why, and what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True)
class ModelSize:
    """The three numbers of a config that stages and drafts depend on."""

    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, as its file's header describes it."""

    name: str
    file: Path
    dtype: str  # the format's word: "F32", "BF16", "I8", ...
    shape: tuple[int, ...]


def check_checkpoints(target: Path, draft: Path | None, num_stages: int) -> list[str]:
    """One line per fact that holds; the first that does not raises `PreflightFailure`."""
    size = model_size(target)
    lines = [_check_stages(target, size, num_stages), _check_embedding(target, size)]
    if draft is not None:
        lines.append(_check_draft(draft, target, size))
    return lines


def _check_stages(target: Path, size: ModelSize, num_stages: int) -> str:
    if num_stages < 1:
        raise PreflightFailure(f"{num_stages} pipeline stages", "give at least one")
    if num_stages > size.num_layers:
        raise PreflightFailure(
            f"{num_stages} pipeline stages but {target} has only {size.num_layers} layers",
            f"use --pp {size.num_layers} or fewer",
        )
    return f"{size.num_layers} layers over {num_stages} stage{'s' if num_stages > 1 else ''}"


def _check_embedding(target: Path, size: ModelSize) -> str:
    _require_weights(target)
    if not any(target.glob("*.safetensors")):
        return "target has no safetensors files: its input embedding was not looked up"
    found = find_input_embedding(target)
    if found is None:
        raise PreflightFailure(
            f"no input embedding in {target} (looked for {', '.join(EMBEDDING_NAMES)})",
            "use a checkpoint that carries it under one of these names",
        )
    wanted = (size.vocab_size, size.hidden_size)
    if found.shape != wanted:
        raise PreflightFailure(
            f"input embedding {found.name} is {list(found.shape)} {found.dtype}, not {list(wanted)}",
            "use a checkpoint whose embedding is stored whole and unquantized",
        )
    return f"input embedding {found.name} {list(found.shape)} {found.dtype} in {found.file.name}"


def _check_draft(draft: Path, target: Path, target_size: ModelSize) -> str:
    config = read_config(draft)
    _require_weights(draft)
    hidden = _number(config, "target_hidden_size") or _number(config, "hidden_size")
    vocab = _number(config, "vocab_size")
    for name, found, wanted in (
        ("hidden size", hidden, target_size.hidden_size),
        ("vocabulary", vocab, target_size.vocab_size),
    ):
        if found != wanted:
            raise PreflightFailure(
                f"draft {draft} has {name} {found}, target {target} has {wanted}",
                "use the draft that was trained for this target",
            )
    return f"draft fits the target: hidden size {hidden}, vocabulary {vocab}"


# What the files say.


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`, or the language model's part of it where there is one."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise PreflightFailure(f"no folder {folder}", "give the path of a checkpoint")
    if not path.is_file():
        raise PreflightFailure(f"no config.json in {folder}", "give the path of a Hugging Face checkpoint")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise PreflightFailure(f"{path} is not JSON ({error})", "fetch the checkpoint again") from None
    if not isinstance(config, dict):
        raise PreflightFailure(f"{path} is not a JSON object", "fetch the checkpoint again")
    inner: dict[str, Any] = next((config[k] for k in _TEXT_CONFIG_KEYS if isinstance(config.get(k), dict)), {})
    return {**config, **inner}


def model_size(folder: Path) -> ModelSize:
    """Layers, hidden size and vocabulary of a checkpoint."""
    config = read_config(folder)
    numbers = {key: _number(config, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    missing = [key for key, value in numbers.items() if value is None]
    if missing:
        raise PreflightFailure(f"{folder}/config.json has no {', '.join(missing)}", "complete the config")
    return ModelSize(*(value or 0 for value in numbers.values()))


def find_input_embedding(folder: Path) -> StoredTensor | None:
    """The target's input embedding; with an index only the file that holds it is opened."""
    index = folder / _INDEX_NAME
    if index.is_file():
        weight_map = json.loads(index.read_text()).get("weight_map", {})
        name = pick_embedding_name(weight_map)
        if name is not None:
            return read_header(folder / weight_map[name]).get(name)
    tensors = dict(_all_tensors(folder))
    name = pick_embedding_name(tensors)
    return None if name is None else tensors[name]


def pick_embedding_name(names: Iterable[str]) -> str | None:
    """The input embedding among tensor names: a known name, else the shortest that ends like one."""
    present = set(names)
    for candidate in EMBEDDING_NAMES:
        if candidate in present:
            return candidate
    similar = [name for name in present if name.endswith(_EMBEDDING_ENDS) and not _NOT_THE_TARGETS.search(name)]
    return min(similar, key=lambda name: (len(name), name), default=None)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file: 8 bytes little-endian length, then that many bytes of JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        return {
            name: StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, struct.error, ValueError, KeyError, AttributeError) as error:
        raise PreflightFailure(
            f"{file} is not a safetensors file ({error})",
            "fetch it again; a Git LFS pointer is not the file itself",
        ) from None


def _all_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from read_header(file).items()


def _require_weights(folder: Path) -> None:
    if not any(path.suffix in _WEIGHT_SUFFIXES for path in folder.iterdir()):
        raise PreflightFailure(f"no weights in {folder}", "fetch the checkpoint again")


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) else None
