"""Pipeline-parallel speculative decoding for SGLang: a plugin, off unless SGLANG_ENABLE_PP_SPEC=1."""

__version__ = "0.1.0"
