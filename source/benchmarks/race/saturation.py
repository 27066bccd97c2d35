"""Print how long the inputs of a model's matrices are, and how large their outputs, along the first steps of a run.

    python source/benchmarks/race/saturation.py --data race-data --sets molecules water --models dpa1 \
        --contestants adamw=0.0015 hybrid_muon_adam_10=0.00864 --at 0 20 100

A step changes what a matrix returns by about rate · length of its input, so long inputs saturate an activation in a
few steps. Only products with a whole matrix are seen, on a CPU, over the test part.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# These scripts are not a package; they and a test import one another by this path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from contest import Arena, Run
from race import contestant_of, folder_of
from results import Key, pool
from sets import MODELS, SETS

SATURATED = 2.5  # tanh has a slope of 0.03 there
PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}  # place of the left factor


class Products(TorchDispatchMode):
    """Records products with named matrices.

    Parameters
    ----------
    matrices
        By name.

    Attributes
    ----------
    sums
        Of each matrix met: rows, squared length of the rows, elements of the products, their squares, and those beyond
        `SATURATED`.
    """

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {(matrix.data_ptr(), matrix.shape, matrix.stride()): name for name, matrix in matrices.items()}
        self.sums: dict[str, list[float]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute, and record a product."""
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            left, right = args[PRODUCTS[func] : PRODUCTS[func] + 2]
            name = self._names.get((right.data_ptr(), right.shape, right.stride()))
            if name is not None:
                self._add(name, left, out)
        return out

    def _add(self, name: str, left: Tensor, out: Tensor) -> None:
        found = len(left), left.square().sum(), out.numel(), out.square().sum(), (out.abs() > SATURATED).sum()
        sums = self.sums.setdefault(name, [0.0] * len(found))
        for place, value in enumerate(found):
            sums[place] += float(value)


def report(run: Run) -> list[str]:
    """Return a line with the error on the test part and one for each matrix."""
    matrices = {name: p.detach() for name, p in run.model.named_parameters() if p.dim() == 2 and min(p.shape) > 1}
    with torch.no_grad(), Products(matrices) as products:
        error = pool(run.errors("test"))["force"]
    key = run.key
    lines = [f"{key.set} {key.model} {key.contestant} {key.rate:g}, step {run.done}: force error {error:.4f} eV/Å"]
    for name, (rows, squares, elements, products_squared, beyond) in products.sums.items():
        size = math.sqrt(products_squared / elements)
        share = f"{100 * beyond / elements:.0f} % beyond {SATURATED}"
        lines.append(f"  {name}: inputs {math.sqrt(squares / rows):.3g} long, outputs {size:.3g}, {share}")
    return lines


def main(given: Sequence[str] | None = None) -> None:
    """Train each run up to the last step of `--at`, and print reports on the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("race-data"), help="holds the sets that make_*.py wrote")
    parser.add_argument("--water", type=Path, help="DeePMD's water example, for the set dft_water")
    parser.add_argument("--sets", nargs="+", choices=SETS, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, required=True)
    parser.add_argument("--contestants", nargs="+", type=contestant_of, required=True, metavar="NAME=RATE,…")
    parser.add_argument("--steps", type=int, default=3000, help="length of the schedule")
    parser.add_argument("--at", type=int, nargs="+", default=[0], help="steps with a report")
    args = parser.parse_args(given)
    for name in args.sets:
        for model in args.models:
            arena = Arena(name, model, 1, args.steps, folder_of(name, args), torch.device("cpu"))
            for contestant, rates in args.contestants:
                for rate in rates:
                    run = Run(Key(name, model, contestant, rate, 1, args.steps), arena)
                    for step in sorted(args.at):
                        while run.done < step:
                            run.advance()
                        print("\n".join(report(run)), flush=True)
                    run.close()


if __name__ == "__main__":
    main()
