"""Race two forms of Muon on the SO(2) layers of DPA-4: the operator that they apply, the matrix that they store.

    python source/benchmarks/race/so2_operators.py --data race-data --results so2.jsonl --steps 2000 --workers 9
    python source/benchmarks/race/so2_operators.py --table so2.jsonl

For each order m > 0 such a layer stores U and V side by side, [U | V], and multiplies the pair of orders ±m, as one
complex number, by U + iV. `muon_mode: slice` replaces [U | V] by its polar factor. The rule of this file replaces
U + iV by its polar factor instead. Both updates have the same Frobenius norm. Turning the frames of edges multiplies
U + iV by phases; with a phase for each input channel (a unitary matrix in general), only the second update turns
along.

DPA-4 Mini trains with either, with all else equal: the same weights, batches and rates. Each worker is a process. With
NVIDIA's Multi-Process Service, `--pipes` has the pipe directory of each GPU, and the workers take them in turn.
Finished runs are not repeated. `make_water.py`, `make_alloys.py` and `make_molecules.py` make the sets.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

# These scripts are not a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from hosted_step import DPA4, MODELS, import_deepmd_kit
from sets import SETS

from deepmd_muon.optim import MatrixRule, register_rule


@dataclasses.dataclass(frozen=True)
class ComplexOperators(MatrixRule):
    """Orthogonalize U + iV of stored matrices [U | V], each focus alone.

    The polar factor of [[U, V], [−V, U]] is [[A, B], [−B, A]], where A + iB is that of U + iV.

    Attributes
    ----------
    shapes
        Shapes (in, 2 · out · foci) of the stored matrices.
    foci
        Matrices of the layer that the columns hold one after another.
    """

    name = "complex_operators"
    shapes: tuple[tuple[int, int], ...]
    foci: int = 1

    def before(self, directions: Sequence[Tensor], state: Any) -> Sequence[Tensor]:
        """Return the real form (b · foci, 2 · in, 2 · out) of matrices of these shapes."""
        return [self._real_form(u) if self._is_stored(u) else u for u in directions]

    def transform(
        self, polar: Sequence[Tensor], directions: Sequence[Tensor], state: Any
    ) -> tuple[Sequence[Tensor], Any]:
        """Return polar factors in the stored form (b, in, 2 · out · foci)."""
        return [self._stored_form(o) if self._is_real_form(o) else o for o in polar], {}

    def _is_stored(self, x: Tensor) -> bool:
        return tuple(x.shape[1:]) in self.shapes

    def _is_real_form(self, x: Tensor) -> bool:
        return (x.shape[1] // 2, x.shape[2] * self.foci) in self.shapes

    def _real_form(self, x: Tensor) -> Tensor:
        batch, rows, columns = x.shape
        x = x.view(batch, rows, self.foci, columns // self.foci).transpose(1, 2).flatten(0, 1)
        u, v = x.chunk(2, dim=2)
        return torch.cat([x, torch.cat([-v, u], dim=2)], dim=1)

    def _stored_form(self, x: Tensor) -> Tensor:
        rows = x.shape[1] // 2
        upper = x[:, :rows].unflatten(0, (-1, self.foci))  # (b, foci, in, 2 · out)
        return upper.transpose(1, 2).flatten(2)


FORMS = {"slice": [], "complex": [ComplexOperators.name]}


class Job(NamedTuple):
    """A run."""

    set: str
    form: str
    rate: float
    seed: int
    steps: int


def register() -> None:
    """Register the rule for the matrices of DPA-4 Mini, which no other weight has the shapes of."""
    channels = DPA4["channels"]
    degrees = [DPA4["lmax"] - order + 1 for order in range(1, DPA4["mmax"] + 1)]
    register_rule(ComplexOperators(tuple((n * channels, 2 * n * channels) for n in degrees)))


def input_of(job: Job, systems: list[Path], folder: Path) -> dict[str, Any]:
    """Return the input of a run."""
    data = SETS[job.set]
    model = copy.deepcopy(MODELS["mini"])
    model["descriptor"] |= {"rcut": data.rcut, "seed": job.seed}
    model["fitting_net"] = {"neuron": [0], "precision": "float32", "seed": job.seed}
    return {
        "model": {"type_map": list(data.type_map), **model},
        "learning_rate": {"type": "exp", "start_lr": job.rate, "stop_lr": job.rate / 100},
        "loss": {
            "type": "ener",
            "loss_func": "mae",
            "f_use_norm": True,
            "start_pref_e": 20,
            "limit_pref_e": 20,
            "start_pref_f": 20,
            "limit_pref_f": 20,
        },
        "optimizer": {"type": "HybridMuon", "muon_mode": "slice", "rules": FORMS[job.form]},
        "training": {
            "training_data": {
                "systems": [str(path) for path in systems],
                "batch_size": data.batch_size,
            },
            "numb_steps": job.steps,
            "seed": job.seed,
            "disp_freq": max(1, job.steps // 4),
            "save_freq": job.steps,
            "gradient_max_norm": 5.0,
            "enable_tf32": True,
            "save_ckpt": str(folder / "model"),
            "disp_file": str(folder / "lcurve.out"),
        },
    }


def train(job: Job, data: Path) -> dict[str, Any]:
    """Train a potential; return its pooled force errors [eV/Å] and mean energy errors [eV/atom]."""
    import_deepmd_kit()
    register()
    from stability_runs import errors_of, opened, pooled

    from deepmd_muon.cli.main import main as dp
    from deepmd_muon.infer.predictor import Predictor

    sets = SETS[job.set]
    result: dict[str, Any] = job._asdict()
    with TemporaryDirectory() as name:
        folder = Path(name)
        content = input_of(job, sets.systems(data / job.set, "train"), folder)
        path = folder / "input.json"
        path.write_text(json.dumps(content))
        begun = time.monotonic()
        words = ["--pt", "train", str(path), "-o", str(folder / "out.json")]
        if dp([*words, "--skip-neighbor-stat"]):
            raise SystemExit(f"{job} failed")
        result["seconds"] = round(time.monotonic() - begun, 1)
        predictor = Predictor(folder / f"model-{job.steps}.pt")
        for part in ("test", "out"):
            systems = opened(sets.systems(data / job.set, part), sets.type_map)
            errors = errors_of(predictor, systems)
            result[f"{part}_force"] = pooled(errors)
            result[f"{part}_energy"] = statistics.mean(one["energy"] for one in errors.values())
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return result | {"machine": machine, "torch": torch.__version__}


def race(options: argparse.Namespace) -> None:
    """Run what the file of results lacks, each run in a process, until the time is over."""
    begun = time.monotonic()
    rows = read(options.results)
    done = {Job(*(row[field] for field in Job._fields)) for row in rows}
    jobs = [
        Job(name, form, rate, seed, options.steps)
        for rate, seed, name, form in itertools.product(
            options.rates, options.seeds, options.sets, options.forms
        )
    ]
    pipes: queue.Queue[str] = queue.Queue()
    for number in range(options.workers):
        pipes.put(options.pipes[number % len(options.pipes)] if options.pipes else "")

    def work(job: Job) -> None:
        rest = options.seconds - (time.monotonic() - begun)
        pipe = pipes.get()
        service = {"CUDA_MPS_PIPE_DIRECTORY": pipe} if pipe else {}
        words = ["--data", str(options.data), "--results", str(options.results)]
        log = options.results.with_name("-".join(map(str, job)) + ".log")
        try:
            with log.open("w") as file:
                subprocess.run(
                    [sys.executable, __file__, *words, "--job", json.dumps(job)],
                    env={**os.environ, **service},
                    stdout=file,
                    stderr=file,
                    timeout=max(0.1, rest),
                    check=True,
                )
            log.unlink()
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"{job}: {type(error).__name__}, see {log}", flush=True)
        finally:
            pipes.put(pipe)

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(work, [job for job in jobs if job not in done]))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return errors of both forms, and their ratio with the spread over seeds, as a table."""
    cases: dict[Any, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        cases[row["set"], row["rate"], row["steps"]][row["form"]][row["seed"]] = row
    lines = [
        "| set | rate | seeds | test force, slice [meV/Å] | complex / slice | out of distribution | energy |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, rate, _), forms in sorted(cases.items()):
        seeds = sorted(forms["slice"].keys() & forms["complex"].keys())
        if not seeds:
            continue
        force = statistics.mean(1e3 * forms["slice"][seed]["test_force"] for seed in seeds)
        cells = []
        for key in ("test_force", "out_force", "test_energy"):
            logs = [
                math.log(forms["complex"][seed][key] / forms["slice"][seed][key]) for seed in seeds
            ]
            each = ", ".join(f"{math.exp(value):.3f}" for value in logs)
            cells.append(f"{math.exp(statistics.mean(logs)):.3f} ({each})")
        lines.append(f"| {name} | {rate:g} | {len(seeds)} | {force:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Race, train one potential, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("race-data"))
    parser.add_argument("--results", type=Path, default=Path("so2.jsonl"))
    parser.add_argument("--sets", nargs="+", default=["water", "alloys", "molecules"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pipes", nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=1e6, help="end all runs after these")
    parser.add_argument("--job", type=json.loads, help="train this potential")
    parser.add_argument("--table", type=Path, help="print the table of these results")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(read(options.table)))
    elif options.job:
        row = train(Job(*options.job), options.data)
        with options.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    else:
        race(options)


if __name__ == "__main__":
    main()
