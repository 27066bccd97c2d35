"""Draw the pictures of doc/optimizer.md: what becomes of singular values, and noise by schedule and precision.

python source/benchmarks/draw_optimizer.py --momenta source/tests/optim/force_field_momenta.pt --out doc/images
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from orthogonalize_quality import decompose, measure, ways

from deepmd_muon.optim.polar import SCHEDULES, orthogonalize
from deepmd_muon.optim.polar.deepmd_kit import orthogonalize_as_deepmd_kit


def draw_schedules(file: Path) -> None:
    """Draw what each schedule makes of a relative singular value."""
    sigma = torch.logspace(-6, 0, 600, dtype=torch.float64).tolist()
    figure, axes = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
    for name, schedule in SCHEDULES.items():
        axes.semilogx(sigma, schedule(sigma), label=f"{name} ({len(schedule.coefficients)} steps)")
    axes.axhline(1.0, color="gray", linewidth=0.5)
    axes.set(xlabel="singular value / Frobenius norm, before", ylabel="after", ylim=(0, 1.3))
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(file, dpi=110)


def draw_spectra(name: str, x: torch.Tensor, file: Path) -> None:
    """Draw singular values of a momentum before, and of its update for three precisions."""
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    before = torch.linalg.svdvals(x.double())
    axes.semilogy(before / before[0], "k", label="momentum, relative")
    updates = {
        "8+2, fp32": orthogonalize(x, precision="float32"),
        "8+2, fp16 operands, fp32 iterate": orthogonalize(x, precision="float16"),
        "8+2, iterate stored in bf16": orthogonalize_as_deepmd_kit([x[None]], gram=False)[0][0],
    }
    for (label, o), style in zip(updates.items(), ("-", "--", ":"), strict=True):
        axes.semilogy(torch.linalg.svdvals(o.double()).clamp_min(1e-12), style, label=label)
    axes.set(xlabel="index", ylabel="singular value", ylim=(1e-9, 3), title=f"{name}, {x.shape[0]}×{x.shape[1]}")
    axes.title.set_fontsize(8)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)


def draw_noise(name: str, x: torch.Tensor, file: Path) -> None:
    """Draw the noise fraction of every way to orthogonalize one momentum."""
    labels, values, decomposition = [], [], decompose(x[None])
    for schedule_name, precision, form, schedule, run in ways(square=x.shape[0] == x.shape[1]):
        noise = measure(decomposition, run(x[None]), schedule)[0]
        peer = "" if form.startswith(("standard", "Gram")) else f" — {form}"
        labels.append(f"{schedule_name}, {precision}{peer or (', Gram' if form.startswith('Gram') else '')}")
        values.append(max(noise, 1e-9))
    figure, axes = plt.subplots(figsize=(6.6, 4.6), layout="constrained")
    colors = ["#6b6b6b" if "—" in label else "#d1651a" for label in labels]  # ours as in `dp show lcurve`
    axes.barh(labels[::-1], values[::-1], color=colors[::-1], log=True)
    axes.axvline(0.01, color="gray", linestyle="--")
    axes.set(xlabel="noise fraction of the update", xlim=(1e-9, 2))
    figure.suptitle(f"{name}, {x.shape[0]}×{x.shape[1]}", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--momenta", type=Path, required=True, help="matrices by name")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stored = torch.load(args.momenta, weights_only=True)
    momenta = {name.removeprefix("atomic_model."): x for name, x in stored.items()}
    square = next((name, x) for name, x in momenta.items() if x.shape[0] == x.shape[1])
    draw_schedules(args.out / "schedules.png")
    draw_spectra(*square, args.out / "spectra.png")
    draw_noise(*square, args.out / "noise.png")


if __name__ == "__main__":
    main()
