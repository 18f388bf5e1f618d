"""The two curves that matter most, as a PNG."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from milepost.report.lines import lines


def write(path: Path, plan: dict[str, Any]) -> None:
    """Hit rate and throughput over the state slots, a bar from the worst seed to the best."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.2))
    panels = ("hit_rates", "share of prompt tokens reused"), ("output_tps", "output tokens a second")
    for ax, (values, title) in zip(axes, panels, strict=True):
        for kind, line in lines(plan):
            means = [sum(c[values]) / len(c[values]) for c in line]
            low = [m - min(c[values]) for c, m in zip(line, means, strict=True)]
            high = [max(c[values]) - m for c, m in zip(line, means, strict=True)]
            ax.errorbar([c["state_slots"] for c in line], means, (low, high), marker="o", capsize=3, label=kind)
        ax.set(xlabel="state slots", ylabel=title, ylim=(0, None))
        ax.grid(alpha=0.3)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="lower center", ncols=3, frameon=False)
    figure.suptitle(plan["title"])
    figure.tight_layout(rect=(0, 0.03 + 0.035 * -(-len(names) // 3), 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
