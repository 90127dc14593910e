"""Preflight of checkpoints, on folders of a few hundred bytes."""

import json
import struct
from pathlib import Path

import pytest

from sglang_pp_spec.core.checkpoint import (
    EMBEDDING_NAMES,
    PreflightFailure,
    StoredTensor,
    check_checkpoints,
    find_input_embedding,
    model_size,
    pick_embedding_name,
    read_header,
)

VOCAB, HIDDEN, LAYERS = 16, 8, 4
CONFIG = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB}
EMBEDDING = {"model.embed_tokens.weight": ("F32", [VOCAB, HIDDEN])}


def write_safetensors(file: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A header alone: its readers look at nothing else."""
    entries = {n: {"dtype": d, "shape": s, "data_offsets": [0, 0]} for n, (d, s) in tensors.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def make_checkpoint(folder: Path, config=CONFIG, tensors=EMBEDDING) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture
def target(tmp_path):
    return make_checkpoint(tmp_path / "target")


def failure(*arguments) -> PreflightFailure:
    with pytest.raises(PreflightFailure) as caught:
        check_checkpoints(*arguments)
    assert caught.value.reason and caught.value.fix
    return caught.value


def test_a_matching_pair_gives_one_line_per_fact(target, tmp_path):
    draft = make_checkpoint(tmp_path / "draft", CONFIG | {"num_hidden_layers": 1}, {"fc.weight": ("F32", [8, 16])})
    lines = check_checkpoints(target, draft, 2)
    assert len(lines) == 3
    assert "4 layers over 2 stages" in lines[0]
    assert "model.embed_tokens.weight [16, 8] F32" in lines[1]
    assert "hidden size 8, vocabulary 16" in lines[2]


def test_a_target_without_a_separate_draft_needs_no_draft_folder(target):
    assert len(check_checkpoints(target, None, LAYERS)) == 2


def test_more_stages_than_layers_are_refused_with_the_largest_number(target):
    assert "--pp 4" in failure(target, None, LAYERS + 1).fix


def test_no_stages_are_refused(target):
    assert "0 pipeline stages" in failure(target, None, 0).reason


@pytest.mark.parametrize(
    "key, value, word", [("hidden_size", 9, "hidden size 9"), ("vocab_size", 17, "vocabulary 17")]
)
def test_a_draft_of_another_target_is_refused(target, tmp_path, key, value, word):
    draft = make_checkpoint(tmp_path / "draft", CONFIG | {key: value})
    assert word in failure(target, draft, 2).reason


def test_a_narrow_draft_that_names_the_targets_hidden_size_is_taken(target, tmp_path):
    draft = make_checkpoint(tmp_path / "draft", CONFIG | {"hidden_size": 4, "target_hidden_size": HIDDEN})
    assert "hidden size 8" in check_checkpoints(target, draft, 2)[-1]


def test_a_folder_that_is_not_there_is_named(target, tmp_path):
    assert "no folder" in failure(target, tmp_path / "nowhere", 2).reason
    assert "nowhere" in failure(tmp_path / "nowhere", None, 2).reason


def test_a_draft_without_config_or_without_weights_is_refused(target, tmp_path):
    draft = make_checkpoint(tmp_path / "draft")
    (draft / "model.safetensors").unlink()
    assert "no weights" in failure(target, draft, 2).reason
    (draft / "config.json").unlink()
    assert "no config.json" in failure(target, draft, 2).reason


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_refused(target, text):
    (target / "config.json").write_text(text)
    assert "config.json" in failure(target, None, 2).reason


def test_a_config_without_layers_is_refused(target):
    (target / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": 16}))
    assert "num_hidden_layers" in failure(target, None, 2).reason


def test_a_target_without_an_input_embedding_is_refused(tmp_path):
    target = make_checkpoint(tmp_path / "target", tensors={"lm_head.weight": ("F32", [VOCAB, HIDDEN])})
    assert "no input embedding" in failure(target, None, 2).reason


def test_a_packed_embedding_is_refused_with_its_shape(tmp_path):
    target = make_checkpoint(tmp_path / "target", tensors={"embed.weight": ("I32", [VOCAB, HIDDEN // 8])})
    assert "[16, 1] I32" in failure(target, None, 2).reason


def test_a_checkpoint_without_safetensors_is_left_to_the_loader(target):
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    assert "not looked up" in check_checkpoints(target, None, 2)[1]


def test_a_git_lfs_pointer_is_recognised_as_no_file(target):
    (target / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "Git LFS" in failure(target, None, 2).fix


@pytest.mark.parametrize("size", [0, 4, 20])
def test_a_truncated_file_is_refused(target, size):
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "not a safetensors file" in failure(target, None, 2).reason


def test_with_an_index_only_the_owning_file_is_read(target):
    write_safetensors(target / "b.safetensors", EMBEDDING)
    (target / "model.safetensors").write_bytes(b"unreadable")
    weight_map = {"model.embed_tokens.weight": "b.safetensors", "lm_head.weight": "model.safetensors"}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert find_input_embedding(target).file.name == "b.safetensors"


def test_the_header_gives_shapes_and_types_without_metadata(target):
    file = target / "model.safetensors"
    name = "model.embed_tokens.weight"
    assert read_header(file) == {name: StoredTensor(name, file, "F32", (VOCAB, HIDDEN))}


@pytest.mark.parametrize("name", EMBEDDING_NAMES)
def test_every_known_name_is_found_beside_other_tensors(name):
    assert pick_embedding_name(["lm_head.weight", name, "model.layers.0.mlp.up_proj.weight"]) == name


def test_an_unknown_prefix_is_found_by_its_end():
    names = ["model.vision.deep.embed_tokens.weight", "model.text.embed_tokens.weight", "lm_head.weight"]
    assert pick_embedding_name(names) == "model.text.embed_tokens.weight"


@pytest.mark.parametrize(
    "name", ["model.layers.61.embed_tokens.weight", "mtp.embed_tokens.weight", "model.NextN.embed.weight"]
)
def test_the_embedding_of_a_draft_layer_is_never_taken_for_the_targets(name):
    assert pick_embedding_name([name]) is None


def test_a_multimodal_config_is_read_at_its_language_model(tmp_path):
    folder = make_checkpoint(tmp_path / "vl", {"hidden_size": 999, "text_config": CONFIG})
    assert model_size(folder).hidden_size == HIDDEN
