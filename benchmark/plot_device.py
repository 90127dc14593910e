"""When did the GPUs of a pipeline run something, and when did they wait?

    python -m benchmark.gpu_round --arms builtin,ours_sync,ours --excerpt-ms 80 --json ROUND.json ...
    python -m benchmark.plot_device ROUND.json [MORE.json ...] --out device.png --arms builtin,ours_sync,ours

One panel per arm, of the first result that has it; one row per stage or GPU, on the same time scale: kernels and
copies (NCCL's excepted, which mostly wait) as the PyTorch profiler recorded them in the middle of a run at the first
batch size. The profiler slows the host, so gaps are longer here than without it; the title says how long a round
takes without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .round_table import arms_of

COLOURS = ("#2a78b8", "#e07b39", "#3d9a6c", "#a85a9c")
BAR_HEIGHT = 0.78
TITLES = {
    "ours": "sglang_pp_spec, with overlap",
    "ours_sync": "sglang_pp_spec, --disable-overlap-schedule",
    "builtin": "SGLang 0.5.23 built-in",
    "ours_mps": "sglang_pp_spec, with overlap, MPS",
    "builtin_mps": "SGLang 0.5.23 built-in, MPS",
    "tp_all_overlap": "one stage on all GPUs, SGLang's overlap",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON of benchmark.gpu_round with excerpts")
    parser.add_argument("--out", required=True, help="picture to write, .png or .svg")
    parser.add_argument("--arms", default="builtin,ours_sync,ours")
    options = parser.parse_args(argv)
    names = options.arms.split(",")
    found = arms_of(options.results, names)
    draw({name: excerpt_of(found[name]) for name in names}, options.out)


def excerpt_of(arm: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The batch size of an arm whose device spans were kept, with its size."""
    kept = [(size, one) for size, one in arm.items() if "device_spans_ms" in one]
    if len(kept) != 1:
        raise SystemExit("no excerpt in this result: record it with --excerpt-ms")
    return kept[0][1] | {"batch_size": kept[0][0]}


def draw(arms: dict[str, dict[str, Any]], out: str) -> None:
    """One panel per arm."""
    num_stages = max(len(one["device_spans_ms"]) for one in arms.values())
    end = min(max(spans[-1][1] for spans in one["device_spans_ms"]) for one in arms.values())
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 11})
    figure, panels = plt.subplots(
        len(arms), 1, sharex=True, squeeze=False, figsize=(12, 0.9 + len(arms) * (0.6 + 0.4 * num_stages)), dpi=100
    )
    for panel, (name, one) in zip(panels[:, 0], arms.items(), strict=True):
        _draw_arm(panel, TITLES.get(name, name), one, end, row="GPU" if name.startswith("tp") else "stage")
    panels[-1, 0].set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)


def _draw_arm(panel, title: str, one: dict[str, Any], end: float, row: str) -> None:
    stages = one["device_spans_ms"]
    for stage, spans in enumerate(stages):
        bars = [(begin, finish - begin) for begin, finish in spans]
        panel.broken_barh(
            bars, (stage - BAR_HEIGHT / 2, BAR_HEIGHT), facecolor=COLOURS[stage % len(COLOURS)], linewidth=0
        )
    panel.set_title(
        f"{title}: {one['ms_per_round']:.2f} ms a round at batch size {one['batch_size']}, of which the devices "
        f"need {one['device_ms_per_round']:.2f}",
        loc="left",
        fontsize=11,
    )
    panel.set_xlim(0, end)
    panel.set_ylim(len(stages) - 0.45, -0.55)
    panel.set_yticks(range(len(stages)), [f"{row} {i}" for i in range(len(stages))])
    panel.set_facecolor("#f2f2f0")
    panel.tick_params(left=False, bottom=False)
    panel.spines[:].set_visible(False)


if __name__ == "__main__":
    main()
