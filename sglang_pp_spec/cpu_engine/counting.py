"""Counts of messages and host waits (see benchmark/relay_budget.py)."""


def register(registry, settings) -> None:
    """Nothing yet."""
