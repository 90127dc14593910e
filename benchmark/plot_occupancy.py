"""What did every stage do when, with this plugin and with SGLang's built-in?

    python -m benchmark.schedule --pp 4 --slots 4 --repeat 1 --occupancy FOLDER
    python -m benchmark.plot_occupancy FOLDER/ours FOLDER/builtin occupancy.png

One row per stage, one bar per busy span, both runs on the same time scale: the same requests on the same model, ours
above the built-in. Colours tell slots apart; drafting is hatched, prefill is pale. Held fixed by the recording run,
see ``benchmark.schedule``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from .occupancy import Span, read_spans, slots_of, utilisation
from .report import emit

COLOURS = ("#2a78b8", "#e07b39", "#3d9a6c", "#a85a9c", "#c9a227", "#5b6f86", "#b8434e", "#6bb5c9")
PALE, FULL = 0.45, 1.0
BAR_HEIGHT = 0.78


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Draw the picture, print utilisations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", help="folder of busy spans")
    parser.add_argument("builtin", help="folder of busy spans")
    parser.add_argument("out", help="picture to write, .png or .svg")
    parser.add_argument("--seconds", type=float, help="show only so much from the start")
    options = parser.parse_args(argv)
    runs = {"sglang_pp_spec": read_spans(options.ours), "SGLang 0.5.23 built-in": read_spans(options.builtin)}
    draw(runs, options.out, options.seconds)
    result = {name: {"seconds": _duration(spans), "utilisation": utilisation(spans)} for name, spans in runs.items()}
    emit(result | {"picture": options.out})
    return result


def draw(runs: dict[str, list[Span]], out: str, seconds: float | None = None) -> None:
    """One panel per run, first on top."""
    num_stages = 1 + max(span.stage for spans in runs.values() for span in spans)
    end = seconds or max(map(_duration, runs.values()))
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 11, "hatch.linewidth": 1.1})
    height = 1.5 + len(runs) * (0.75 + 0.42 * num_stages)
    figure, panels = plt.subplots(len(runs), 1, sharex=True, figsize=(12, height), dpi=100)
    for panel, (name, spans) in zip(panels, runs.items(), strict=True):
        _draw_run(panel, name, spans, num_stages, end)
    panels[-1].set_xlabel("seconds since the first forward")
    num_slots = max(len(set(slots_of(spans).values())) for spans in runs.values())
    figure.legend(handles=_legend(num_slots), loc="upper center", ncols=num_slots + 2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.42 / height))
    figure.savefig(out)
    plt.close(figure)


def _draw_run(panel, name: str, spans: Sequence[Span], num_stages: int, end: float) -> None:
    origin, slots, shares = spans[0].start, slots_of(spans), utilisation(spans)
    for span in spans:
        panel.broken_barh(
            [(span.start - origin, span.seconds)],
            (span.stage - BAR_HEIGHT / 2, BAR_HEIGHT),
            facecolor=COLOURS[slots[span.requests] % len(COLOURS)],
            alpha=FULL if span.is_decode else PALE,
            edgecolor="white",
            hatch=None if span.is_step else "////",
            linewidth=0.6,
        )
    panel.set_title(f"{name}: {_duration(spans):.1f} s", loc="left", fontsize=12, fontweight="bold")
    panel.set_xlim(0, end)
    panel.set_ylim(num_stages - 0.45, -0.55)
    panel.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    panel.set_facecolor("#f2f2f0")
    panel.tick_params(left=False, bottom=False)
    panel.spines[:].set_visible(False)
    for stage, share in enumerate(shares):
        panel.text(1.008, stage, f"{share:.0%} busy", transform=panel.get_yaxis_transform(), va="center")


def _legend(num_slots: int) -> list[Patch]:
    slots = [Patch(facecolor=COLOURS[slot % len(COLOURS)], label=f"slot {slot}") for slot in range(num_slots)]
    pale = Patch(facecolor="#777777", alpha=PALE, label="prefill")
    draft = Patch(facecolor="#777777", edgecolor="white", hatch="////", label="draft")
    return [*slots, draft, pale]


def _duration(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)


if __name__ == "__main__":
    main()
