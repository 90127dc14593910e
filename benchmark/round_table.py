"""The results of benchmark.gpu_round as Markdown tables: an arm a row, a batch size a column.

python -m benchmark.round_table benchmark/results/gpu_round_1gpu_round.json [MORE.json ...]

Several results are one table, which is for arms that were measured one after the other on the same machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

APART = 1.05  # runs of a cell whose times differ by more than this are shown

Arms = Mapping[str, Mapping[str, Mapping[str, Any]]]


def main(argv: Sequence[str] | None = None) -> None:
    """Print what a result holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON of benchmark.gpu_round")
    print("\n\n".join(tables(arms_of(parser.parse_args(argv).results))))


def arms_of(results: Sequence[Path], wanted: Sequence[str] = ()) -> dict[str, Mapping[str, Mapping[str, Any]]]:
    """The arms of all ``results``; ValueError if two of them have the same one.

    ``wanted`` arms alone may be in several results: the first one counts.
    """
    arms: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for result in results:
        found = json.loads(result.read_text())["arms"]
        if wanted:
            found = {name: found[name] for name in wanted if name in found and name not in arms}
        if twice := sorted(set(arms) & set(found)):
            raise ValueError(f"{', '.join(twice)} in more than one result")
        arms |= found
    return arms


def tables(arms: Arms) -> list[str]:
    """Rounds, and prompts of ``--long-prompt`` tokens if they were measured."""
    found = [markdown(arms, "ms a round (of device time)", _round)]
    if any("tpot_ms" in one for sizes in arms.values() for one in sizes.values()):
        found.append(markdown(arms, "TTFT ms / TPOT ms / tokens per s", _long_prompt))
    return found


def markdown(arms: Arms, what: str, cell: Callable[[Mapping[str, Any]], str]) -> str:
    """One table; ``-`` where an arm has no such batch size."""
    sizes = sorted({size for one in arms.values() for size in one}, key=int)
    rows = [[f"`{name}`", *(cell(one[size]) if size in one else "-" for size in sizes)] for name, one in arms.items()]
    header = [what, *(f"bs {size}" for size in sizes)]
    lines = [header, ["---", *["---:"] * len(sizes)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _round(one: Mapping[str, Any]) -> str:
    cell = f"{one['ms_per_round']:.1f} ({one['ms_per_round'] / one['device_ms_per_round']:.2f} x)"
    shortest, longest = min(one["ms_all"]), max(one["ms_all"])
    return f"{cell}, {shortest:.1f} to {longest:.1f}" if longest > APART * shortest else cell


def _long_prompt(one: Mapping[str, Any]) -> str:
    if "tpot_ms" not in one:
        return "-"
    return f"{one['ttft_ms']:.0f} / {one['tpot_ms']:.1f} / {one['tokens_per_s']:.0f}"


if __name__ == "__main__":
    main()
