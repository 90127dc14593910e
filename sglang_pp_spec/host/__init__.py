"""The SGLang half: one file per seam. Only this package and the CPU engine import sglang."""
