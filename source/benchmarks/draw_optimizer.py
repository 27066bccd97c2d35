"""Draw the pictures of doc/polar-factor.md: what becomes of singular values, and noise by schedule and precision.

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
from deepmd_muon.show.palette import OPTIMIZERS

# Other implementations by the names of `orthogonalize_quality.ways`.
PEERS = {"deepmd-kit": "deepmd-kit's HybridMuon", "torch.optim.Muon": "torch.optim.Muon"}


def draw_schedules(file: Path) -> None:
    """Draw what each schedule makes of a relative singular value."""
    sigma = torch.logspace(-6, 0, 600, dtype=torch.float64).tolist()
    figure, axes = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
    for name, schedule in SCHEDULES.items():
        axes.semilogx(sigma, schedule(sigma), label=f"{name} ({len(schedule.coefficients)} steps)")
    axes.axhline(1.0, color="gray", linewidth=0.5)
    axes.set(
        xlabel="singular value of the momentum / its Frobenius norm",
        ylabel="singular value of the update",
    )
    axes.set_ylim(0, 1.3)
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
    axes.set(
        xlabel="number of the singular value", ylabel="singular value (no unit)", ylim=(1e-9, 3)
    )
    axes.set_title(f"{name}, {x.shape[0]}×{x.shape[1]}", fontsize=8)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)


def draw_noise(name: str, x: torch.Tensor, file: Path) -> None:
    """Draw the noise fraction of every way to orthogonalize one momentum."""
    labels, values, colors, decomposition = [], [], [], decompose(x[None])
    for schedule_name, precision, form, schedule, run in ways(square=x.shape[0] == x.shape[1]):
        noise = measure(decomposition, run(x[None]), schedule)[0]
        labels.append(f"{schedule_name}, {precision}{', Gram' if form.startswith('Gram') else ''}")
        peer = next(
            (title for start, title in PEERS.items() if form.startswith(start)), "HybridMuon"
        )
        values.append(max(noise, 1e-9))
        colors.append(OPTIMIZERS[peer])
    figure, axes = plt.subplots(figsize=(6.6, 4.6), layout="constrained")
    axes.barh(range(len(labels)), values, color=colors, log=True)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.axvline(0.01, color="gray", linestyle="--")
    axes.set(
        xlabel="noise fraction of the update (no unit; at least 1e-9 is drawn)", xlim=(3e-10, 2)
    )
    drawn = [title for title, color in OPTIMIZERS.items() if color in colors]
    handles = [plt.Rectangle((0, 0), 1, 1, color=OPTIMIZERS[title]) for title in drawn]
    figure.legend(
        handles, drawn, loc="outside lower center", ncols=len(drawn), frameon=False, fontsize=8
    )
    figure.suptitle(f"{name}, {x.shape[0]}×{x.shape[1]}", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Draw all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
