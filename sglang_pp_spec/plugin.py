"""The entry points SGLang loads in every process; without their switch they import nothing and change nothing."""

from __future__ import annotations

import os


def load() -> None:
    """Entry point ``pp_spec``: on with SGLANG_ENABLE_PP_SPEC=1."""
    if os.environ.get("SGLANG_ENABLE_PP_SPEC", "").lower() in ("", "0", "false", "no", "n", "f", "off"):
        return
    settings = _settings()
    from .host.install import install

    install(settings)


def load_cpu_engine() -> None:
    """Entry point ``pp_spec_cpu_engine``: on with SGLANG_PP_SPEC_CPU_ENGINE=1, with or without ``pp_spec``."""
    if os.environ.get("SGLANG_PP_SPEC_CPU_ENGINE", "").lower() in ("", "0", "false", "no", "n", "f", "off"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    from .cpu_engine import delays, hooks, planning

    settings = _settings()
    hooks.register(HookRegistry)
    delays.register(HookRegistry, settings)
    planning.register(HookRegistry, settings)
    if settings.count:
        from .cpu_engine import counting_hooks

        counting_hooks.register(HookRegistry, settings)


def load_colocated() -> None:
    """Entry point ``pp_spec_colocated``: all stages on GPU 0 with SGLANG_PP_SPEC_COLOCATED=1, for development."""
    if os.environ.get("SGLANG_PP_SPEC_COLOCATED", "").lower() in ("", "0", "false", "no", "n", "f", "off"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .colocated import hooks

    if _settings().colocated:
        hooks.register(HookRegistry, HookType.AROUND)


def _settings():
    """This process's settings; SGLang swallows every exception of a plugin but ``SystemExit``."""
    from .core.settings import Settings

    try:
        return Settings.from_environment(os.environ)
    except ValueError as error:
        raise SystemExit(f"sglang_pp_spec: {error}") from error
