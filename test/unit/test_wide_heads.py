"""The tiny model with wide heads, which stands in for it where a backend has no kernels for narrow ones."""

import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from sglang_pp_spec.tiny import TARGET_PATH, problems

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "pp"))
from wide_heads import widened


def test_the_model_with_wide_heads_says_what_the_tiny_model_says(tmp_path):
    tokens = torch.tensor([list(problems.prompt(problems.held_out(1, seed=3)[0].question).encode())])
    with torch.no_grad():
        narrow, wide = (
            LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
            for folder in (TARGET_PATH, widened(TARGET_PATH, tmp_path / "target"))
        )
    assert tokens.shape[1] > 40
    assert torch.equal(narrow.argmax(-1), wide.argmax(-1))
    torch.testing.assert_close(narrow, wide, atol=0.25, rtol=0)  # scaled queries are rounded to bfloat16 again
