"""The cost model against measurements: kernels of linear layers, and whole servers.

    python bench/cost_model.py [--tables FOLDER] [--json]

FOLDER holds AIConfigurator's tables as `gdn_h100_sxm.csv.gz` and so on; without it only servers are compared. Factors
come from a random half of each table, errors are of the other half. Servers: each is predicted by a fit to the others.
What follows the tables are the constants of milepost/sim/roofline.py.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from milepost.core.gpus import HARDWARE, Gpu
from milepost.sim import fit, roofline
from milepost.sim.fit import Fitted, Point

B200, B300, H200 = HARDWARE["b200"], HARDWARE["b300"], HARDWARE["h200"]
MI300X = Gpu("mi300x", 192 * 10**9, 5.3e12, 1307e12, 64e9)  # from memory, unverified
TABLES = Path(__file__).parents[2] / "shared" / "traces" / "aic-measured"
FAMILIES = {"gdn": "GDN", "kda": "KDA", "mamba2": "Mamba-2"}

GUESS = "lengths 1k/1k assumed"
SHARE_GPT = "ShareGPT lengths (220/200) assumed"
MTP = "drafts by MTP, which the model does not know"
AMD = "another vendor's GPU and software"


def points() -> list[Point]:
    """TPOT of hybrids on servers: two public records (SGLang 0.5.9, 0.5.10), and SGLang's cookbook (May 2026)."""
    qwen, next80, nano, kimi = "qwen3.5-397b", "qwen3-next-80b", "nemotron-3-nano", "kimi-linear-48b"
    made = [
        Point("397B B200", qwen, B200, 4, "fp8", 1024, 1024, 32, 13.80e-3),
        Point("397B B300", qwen, B300, 4, "fp8", 1024, 1024, 32, 15.16e-3),
        Point("Nano B200", nano, B200, 1, "fp8", 1024, 1024, 256, 21.7e-3),
        Point("Nano B200", nano, B200, 1, "bfloat16", 1024, 1024, 256, 43.3e-3),
        Point("Super H200", "nemotron-3-super", H200, 4, "bfloat16", 1024, 1024, 256, 75.0e-3, note=GUESS),
    ]
    for batch, tpot in ((1, 6.19e-3), (100, 50.9e-3)):
        made.append(Point("Next 8 B200", next80, B200, 8, "bfloat16", 220, 200, batch, tpot, note=SHARE_GPT))
    for batch, tpot in ((1, 6.19e-3), (16, 13.6e-3), (100, 38.6e-3)):
        made.append(Point("Coder-Next 2 B200", next80, B200, 2, "bfloat16", 1024, 1024, batch, tpot, note=GUESS))
    for batch, tpot in ((1, 5.32e-3), (16, 10.75e-3), (100, 29.6e-3)):
        made.append(Point("Kimi-Linear MI300X", kimi, MI300X, 4, "bfloat16", 1024, 1024, batch, tpot, False, AMD))
    for batch, tpot in ((1, 3.96e-3), (100, 26.2e-3)):
        made.append(Point("397B 8 H200", qwen, H200, 8, "bfloat16", 1024, 1024, batch, tpot, False, MTP))
    return made


def first_tokens(points: list[Point]) -> dict[str, tuple[float, float]]:
    """Seconds to the first token, measured and predicted without queueing: one step with the prompt. Fitted nowhere."""
    measured = {
        ("Next 8 B200", 1): 0.128,
        ("Nano B200", 256): 0.173,
        ("397B B200", 32): 0.795,
        ("397B B300", 32): 0.279,
    }
    found = {}
    for p in points:
        seen = measured.pop((p.system, p.batch), None)
        if seen is not None:
            cost = roofline.roofline(p.model, p.gpu, roofline.Layout(p.tp), weights=p.weights)
            others = [p.prompt + p.output // 2] * (p.batch - 1)
            found[f"{p.system}, batch {p.batch}"] = seen, cost.seconds([(0, p.prompt)], others, 1)
    return found


def kernels(folder: Path) -> list[Fitted]:
    fits = []
    for gpu in HARDWARE.values():
        for family in FAMILIES:
            fits += fit.fit_table(folder / f"{family}_{gpu.name}_sxm.csv.gz", gpu)
    return fits


def constants(fits: list[Fitted]) -> dict[str, dict[str, float]]:
    found = {}
    for gpu in HARDWARE:
        for family in FAMILIES.values():
            some = [one for one in fits if (one.gpu, one.family) == (gpu, family)]
            found[f"{gpu} {family}"] = {k: float(f"{v:.3g}") for k, v in asdict(fit.kernels_of(some)).items()}
    return found


def speed() -> float:
    """Microseconds of a call: 48 contexts, 100 tokens, GLM-5.3-Flash on two H200."""
    cost, contexts = roofline.roofline("glm-5.3-flash", "h200", roofline.Layout(2)), list(range(60_000, 108_000, 1_000))
    start = perf_counter()
    for _ in range(5_000):
        cost.seconds([], contexts, 100)
    return (perf_counter() - start) / 5_000 * 1e6


def show_kernels(fits: list[Fitted], console: Console) -> None:
    table = Table("GPU", "family", "phase", "kernel", "rows", "median", "90 %", "in 10 %", "bias", ">32k: median, bias")
    for one in fits:
        e, far = one.held_out, one.beyond
        cells = [f"{e.points}", f"{e.median:.1%}", f"{e.ninth:.1%}", f"{e.within_tenth:.0%}", f"{e.bias:+.1%}"]
        beyond = f"{far.median:.1%}, {far.bias:+.1%}" if far else ""
        table.add_row(one.gpu, one.family, one.phase, one.kernel[:32], *cells, beyond)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    console = Console(width=150)
    fits = kernels(args.tables) if args.tables.exists() else []
    measured = points()
    served = fit.fit_served([p for p in measured if p.fitted])
    guesses = {"prior": [fit.predict(p, roofline.PRIORS) for p in measured]}
    guesses["fitted"] = [fit.predict(p, served) for p in measured]
    guesses["left out"] = fit.left_out(measured)
    ratios = [p.tpot / g for p, g in zip(measured, guesses["left out"], strict=True) if p.fitted]
    result = {
        "kernels": [asdict(one) for one in fits],
        "fitted_kernels": constants(fits) if fits else {},
        "servers": [{**asdict(p), **{k: v[i] for k, v in guesses.items()}} for i, p in enumerate(measured)],
        "served": {name: getattr(served, name) for name in fit.LEARNT},
        "measured_over_left_out": {q: float(np.quantile(ratios, q / 100)) for q in (0, 10, 50, 90, 100)},
        "first_token_s: measured, predicted": first_tokens(measured),
        "microseconds_a_call": speed(),
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    show_kernels(fits, console)
    table = Table("server", "weights", "batch", "measured ms", *guesses, "left out: error", "in 25 %", "note")
    for i, p in enumerate(measured):
        error = guesses["left out"][i] / p.tpot - 1
        cells = [f"{1e3 * v[i]:.1f}" for v in guesses.values()]
        inside = "yes" if abs(error) <= 0.25 else "NO"
        table.add_row(p.system, p.weights, f"{p.batch}", f"{1e3 * p.tpot:.1f}", *cells, f"{error:+.0%}", inside, p.note)
    console.print(table)
    for name in [*list(result)[-4:], "fitted_kernels"]:
        console.print(name, result[name])


if __name__ == "__main__":
    main()
