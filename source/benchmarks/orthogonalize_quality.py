"""Quality of the polar factor: schedule x precision x form x spectrum, against float64 singular value decompositions.

    python source/benchmarks/orthogonalize_quality.py [--momenta FILE] [--out FILE.csv] [--device cuda]
    python source/benchmarks/orthogonalize_quality.py --sizes 1024x1024,1024x2048 --schedules 8+2,polar-express-5
    python source/benchmarks/orthogonalize_quality.py --worst 20 --sizes 8x8,25x50,64x64 --schedules 8+2

FILE holds matrices by name, or is a checkpoint of a training with HybridMuon, whose momenta are taken. Columns:

noise            share of the update's energy that is not along the matrix's own singular pairs
lowest, highest  of the values that singular values above the schedule's cut-off end at
error            distance to U f(Σ) Vᵀ of the same schedule in float64, along pairs above 1e-3 of the largest, relative
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import platform
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from deepmd_muon.optim.polar import SCHEDULES, Schedule, orthogonalize_matrices
from deepmd_muon.optim.polar.deepmd_kit import GRAM_STEPS, orthogonalize_as_deepmd_kit

BOUND = 0.01  # of the noise, see doc/polar-factor.md
RESOLUTION = 1e-7  # of a float32 input, as a share of its largest singular value

Way = tuple[str, str, str, Schedule, Callable[[Tensor], Tensor]]


def ways(*, square: bool, gram_pays: bool = False, kernels: bool = False) -> Iterator[Way]:
    """Yield schedule, precision, form, the schedule itself and the function of every row."""
    for name, schedule in SCHEDULES.items():
        for precision in ("float32", "float16", "bfloat16"):
            forms = ["standard"]
            forms += ["Gram"] * (precision == "float32" and gram_pays)
            forms += ["kernels"] * (precision == "float16" and kernels)
            for form in forms:

                def run(
                    x: Tensor, name: str = name, precision: str = precision, form: str = form
                ) -> Tensor:
                    gram, flash = form == "Gram", form == "kernels"
                    return orthogonalize_matrices([x], name, precision, gram=gram, flash=flash)[0]

                yield name, precision, form, schedule, run
    polar = Schedule("polar-express (5 steps)", GRAM_STEPS, (0.8, 1.2), 3e-3, "deepmd-kit 3.2.0")
    for gram, schedule in ((False, SCHEDULES["8+2"]), (True, polar)):
        if gram and square:
            continue  # its Gram form is for rectangular matrices

        def peer(x: Tensor, gram: bool = gram) -> Tensor:
            return orthogonalize_as_deepmd_kit([x], gram=gram)[0]

        stored = "stored in float16" if gram else "stored in bfloat16"
        yield schedule.name, stored, "deepmd-kit 3.2.0" + ", Gram" * gram, schedule, peer

    def keller_jordan_bf16(x: Tensor) -> Tensor:
        from torch.optim._muon import _zeropower_via_newtonschulz

        step = SCHEDULES["keller-jordan"].coefficients[0]
        return torch.stack(
            [_zeropower_via_newtonschulz(m.clone(), step, 5, 1e-7).float() for m in x]
        )

    yield (
        "keller-jordan",
        "stored in bfloat16",
        "torch.optim.Muon",
        SCHEDULES["keller-jordan"],
        keller_jordan_bf16,
    )


def synthetic(m: int, n: int, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield named matrices (1, m, n), float32, of known spectra."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(1, m, n, generator=generator, dtype=torch.float64)
    yield f"Gaussian {m}x{n}", gaussian.float()
    u, _, vh = torch.linalg.svd(gaussian, full_matrices=False)
    low = min(m, n)
    spectra = {
        "rank 1": torch.cat([torch.ones(1), torch.zeros(low - 1)]),
        "rank 4": torch.cat([torch.ones(4), torch.zeros(low - 4)]),
        "σ 1…1e-3": torch.logspace(0, -3, low),
        "σ 1…1e-6": torch.logspace(0, -6, low),
    }
    for kind, s in spectra.items():
        yield f"{kind} {m}x{n}", ((u * s.double()) @ vh).float()


def worst(
    sizes: list[tuple[int, int]], seeds: int, schedules: list[str], precisions: list[str]
) -> Iterator[str]:
    """Yield a row for each schedule and precision: the largest noise over sizes, spectra and seeds, and its matrix."""
    for name, precision in itertools.product(schedules, precisions):
        found = []
        for (m, n), seed in itertools.product(sizes, range(seeds)):
            for kind, x in synthetic(m, n, seed):
                done = orthogonalize_matrices([x], name, precision, gram=False, flash=False)[0]
                found.append((measure(decompose(x), done, SCHEDULES[name])[0], kind))
        noise, kind = max(found)
        beyond = sum(noise > BOUND for noise, _ in found)
        yield f"| {name} | {precision} | {noise:.1e} | {kind} | {beyond} of {len(found)} |"


def stored(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a file or the momenta of a checkpoint."""
    content = torch.load(file, weights_only=True, map_location="cpu")
    if "optimizer" in content:
        saved = content["optimizer"]
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        content = {
            names[i]: values["momentum_buffer"]
            for i, values in saved["state"].items()
            if "momentum_buffer" in values
        }
    for name, x in content.items():
        yield name.removeprefix("atomic_model."), x.reshape(-1, *x.shape[-2:]).float()


Decomposition = tuple[Tensor, Tensor, Tensor]


def decompose(x: Tensor) -> Decomposition:
    """Return U, singular values up to a factor, and Vᵀ, in float64."""
    x = x.double().cpu()
    return tuple(
        torch.linalg.svd(x / x.abs().amax(dim=(-2, -1), keepdim=True), full_matrices=False)
    )


def measure(
    decomposition: Decomposition, o: Tensor, schedule: Schedule
) -> tuple[float, float, float, float]:
    """Return noise fraction, lowest and highest value above the cut-off, and relative error; worst of the batch."""
    (u, s, vh), o = decomposition, o.double().cpu()
    relative = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    along = torch.einsum("bij,bik,bkj->bj", u, o, vh.mT)
    kept = torch.where(s > RESOLUTION * s[:, :1], along, 0.0)
    noise = 1.0 - kept.square().sum(-1) / o.square().sum(dim=(-2, -1))
    reached = along[relative > schedule.cutoff]
    expected = torch.tensor(schedule(relative.flatten().tolist()), dtype=torch.float64).reshape(
        relative.shape
    )
    inside = (s > 1e-3 * s[:, :1]).double()
    difference = (
        (u.mT @ o @ vh.mT - torch.diag_embed(expected)) * inside[:, :, None] * inside[:, None, :]
    )
    error = (
        difference.square().sum(dim=(-2, -1)).sqrt() / (expected * inside).square().sum(-1).sqrt()
    )
    return noise.max().item(), reached.min().item(), reached.max().item(), error.max().item()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--momenta",
        type=Path,
        help="matrices by name, or a checkpoint of a training with HybridMuon",
    )
    parser.add_argument("--sizes", default="64x64,25x50,64x256", help="of the synthetic matrices")
    parser.add_argument("--schedules", help="which to measure; default: all, and the peers")
    parser.add_argument("--precisions", default="float32,float16,bfloat16", help="of the schedules")
    parser.add_argument(
        "--worst",
        type=int,
        metavar="SEEDS",
        help="only the largest noise, over so many seeds (CPU)",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the CSV here, too")
    args = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes.split(",")]
    cases = [case for m, n in sizes for case in synthetic(m, n)]
    cases += list(stored(args.momenta)) if args.momenta else []
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__}, {device}, {date.today()}")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("matrix", "schedule", "precision", "form", "noise", "lowest", "highest", "error")
    )
    wanted = args.schedules.split(",") if args.schedules else [*SCHEDULES]
    if args.worst:
        print(
            "| schedule | precision | largest noise | matrix | above 1 % |",
            "|---|---|---|---|---|",
            sep="\n",
        )
        print(*worst(sizes, args.worst, wanted, args.precisions.split(",")), sep="\n")
        return
    for kind, x in cases:
        decomposition = decompose(x)
        for name, precision, form, schedule, run in ways(
            square=x.shape[1] == x.shape[2],
            gram_pays=max(x.shape[1:]) >= 2 * min(x.shape[1:]),
            kernels=args.device == "cuda",
        ):
            if precision.startswith("stored"):
                left_out = args.schedules is not None
            else:
                left_out = name not in wanted or precision not in args.precisions.split(",")
            if left_out:
                continue
            noise, low, high, error = measure(decomposition, run(x.to(args.device)), schedule)
            figures = (f"{noise:.1e}", f"{low:.3f}", f"{high:.3f}", f"{error:.1e}")
            writer.writerow((kind, name, precision, form, *figures))
    print(text.getvalue())
    if args.out:
        args.out.write_text(text.getvalue(), encoding="utf-8")


if __name__ == "__main__":
    main()
