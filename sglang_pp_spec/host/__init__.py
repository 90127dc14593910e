"""The SGLang half: one file per seam. ``core`` and ``server`` import none of SGLang."""
