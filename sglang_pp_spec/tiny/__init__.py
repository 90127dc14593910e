"""Where the tiny test checkpoints lie: a byte-level Llama for word problems, and its EAGLE heads."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

#: Hugging Face checkpoint of the target (`LlamaForCausalLM`), with its tokenizer.
TARGET_PATH: Path = _HERE / "target"

#: Hugging Face checkpoint of the draft (`LlamaForCausalLMEagle`), trained on the target's hidden states.
DRAFT_PATH: Path = _HERE / "draft"

#: Hugging Face checkpoint of the EAGLE-3 draft (`LlamaForCausalLMEagle3`), fed by three of the target's layers.
DRAFT_EAGLE3_PATH: Path = _HERE / "draft_eagle3"
