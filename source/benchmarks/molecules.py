"""Compare batches, uses of free atoms and descriptors for molecules, each an input `dp init` could write.

`python source/benchmarks/molecules.py FOLDER --sets small six --seeds 1 2` makes the sets by
GFN2-xTB (tblite), trains each variant and prints validation errors. A set whose all.xyz is there
is not made again. The tables are in doc/molecules.md.

`--equal-seconds` first times each variant alone on the first set, and then also trains it for the
seconds that the first variant takes. `--json` receives a line for each run.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.io import write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

from deepmd_muon.data import System, open_systems

# Molecules of each set, and frames of each.
_SETS = {
    "small": ("H2O CH4 NH3 CH3OH C2H6 HCN H2CO CO2 N2H4 C2H4", 40),
    "ethanol": ("CH3CH2OH", 300),
    "six": ("CH3CH2OH CH3SH CH3CHO CH3CN CH3Cl CF4 HCOOH CH3NO2 C3H8 CH2SCH2", 40),
    "bpa": ("", 0),  # the training frames of race/make_bpa.py, converted to all.xyz
}
_MULTIPLICITY = {"H": 2, "C": 3, "N": 4, "O": 3, "F": 2, "S": 3, "Cl": 2}
_VARIANTS = (
    "auto",
    "mix",
    "mix-drop",
    "mix-atom_ener",
    "mix-atom_ener-davg_zero",
    "mix-dpa1",
    "mix-dpa1-sel120",
    "mix-attention",
    "mix-attention-sel120",
    "auto-dpa1",
    "auto-attention",
    "auto-attention-sel120",
)
_COMMON = ("seed", "rcut", "rcut_smth", "precision")  # settings of both descriptors
_DPA1 = {
    "type": "dpa1",
    "sel": "auto",
    "neuron": [16, 32, 64],
    "axis_neuron": 8,
    "tebd_dim": 8,
    "tebd_input_mode": "concat",
    "type_one_side": True,
    "attn_layer": 0,
    "smooth_type_embedding": True,
    "set_davg_zero": True,
}
# As `dp init` writes DPA-1.
_ATTENTION = {"attn": 64, "attn_layer": 2, "attn_dotr": True, "normalize": True, "temperature": 1.0}
_TIMED_STEPS = 600
_DP = (sys.executable, "-m", "deepmd_muon")


class Rates(NamedTuple):
    """Scales of the section `optimizer`."""

    lr_adjust_coeff: float
    adam_lr_ratio: float


@dataclass(frozen=True)
class Run:
    """A training: its set, variant, seed, length, and HybridMuon's rates if they are not the default."""

    set: str
    variant: str
    seed: int
    steps: int
    rates: Rates | None = None


@dataclass(frozen=True)
class Result:
    """Last validation errors: force [eV/Å], energy [eV/atom]; milliseconds a step; the rates it had."""

    force: float
    energy: float
    step: float
    used: Rates


def main() -> None:
    """Print the force and energy error of every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="+", choices=_SETS, default=list(_SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--variants", nargs="+", choices=_VARIANTS, default=_VARIANTS[:4])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    parser.add_argument("--equal-seconds", action="store_true")
    parser.add_argument(
        "--rates",
        nargs=2,
        type=float,
        metavar=Rates._fields,
        help="scales in the input; by default it omits both",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in options.sets:
        folder = options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "all.xyz").exists():
            write(folder / "all.xyz", make_frames(name), format="extxyz")
        if not (folder / "input.json").exists():
            command = [*_DP, "init", "all.xyz", "--steps", str(options.steps)]
            subprocess.run([*command, "--descriptor", "se_e2_a"], cwd=folder, check=True)
    lengths = {
        options.steps: [(name, variant) for name in options.sets for variant in options.variants]
    }
    if options.equal_seconds:
        timed = {
            variant: train(options.folder, Run(options.sets[0], variant, 0, _TIMED_STEPS)).step
            for variant in options.variants
        }
        print("ms a step:", timed, flush=True)
        for variant in options.variants[1:]:
            steps = round(options.steps * timed[options.variants[0]] / timed[variant])
            lengths.setdefault(steps, []).extend((name, variant) for name in options.sets)
    rates = Rates(*options.rates) if options.rates else None
    runs = [
        Run(name, variant, seed, steps, rates)
        for seed in options.seeds
        for steps, pairs in lengths.items()
        for name, variant in pairs
    ]

    def report(run: Run) -> None:
        result = train(options.folder, run)
        print(
            f"{run.set:8} {run.variant:22} {run.seed} {run.steps:6} steps "
            f"{result.force:.4f} eV/Å {result.energy:.4f} eV/atom {result.step:.2f} ms",
            flush=True,
        )
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(run) | asdict(result)) + "\n")

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(report, runs))


def make_frames(name: str) -> list[Atoms]:
    """Return frames of dynamics at 500 K, and a free atom of each element, with MACE's names."""
    from tblite.ase import TBLite  # sets that are there need no tblite

    molecules, nframes = _SETS[name]
    frames = []
    elements: set[str] = set()
    for seed, formula in enumerate(molecules.split()):
        atoms = molecule(formula)
        elements |= set(atoms.get_chemical_symbols())
        atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
        random = np.random.default_rng(seed)
        MaxwellBoltzmannDistribution(atoms, temperature_K=1000, rng=random)
        dynamics = Langevin(
            atoms, 0.5 * units.fs, temperature_K=500, friction=0.02 / units.fs, rng=random
        )
        dynamics.run(100)
        for _ in range(nframes):
            dynamics.run(20)
            frames.append(_labelled(atoms, formula))
    for element in sorted(elements):
        atom = Atoms(element)
        atom.calc = TBLite(method="GFN2-xTB", verbosity=0, multiplicity=_MULTIPLICITY[element])
        frames.append(_labelled(atom, "IsolatedAtom"))
    return frames


def _labelled(atoms: Atoms, config_type: str) -> Atoms:
    frame = Atoms(atoms.get_chemical_symbols(), atoms.get_positions())
    frame.info["REF_energy"] = float(atoms.get_potential_energy())
    frame.info["config_type"] = config_type
    frame.arrays["REF_forces"] = atoms.get_forces() if len(atoms) > 1 else np.zeros((1, 3))
    return frame


def train(top: Path, run: Run) -> Result:
    """Train a variant of the input of `dp init`."""
    folder = top / run.set
    variant = run.variant
    content: dict[str, Any] = copy.deepcopy(json.loads((folder / "input.json").read_text()))
    model = content["model"]
    training = content["training"]
    for section in (model["descriptor"], model["fitting_net"], training):
        section["seed"] = run.seed
    systems = open_systems(str((folder / "split" / "train").resolve()))
    if "dpa1" in variant or "attention" in variant:
        descriptor = {name: model["descriptor"][name] for name in _COMMON}
        model["descriptor"] = {**descriptor, **_DPA1}
    if "attention" in variant:
        model["descriptor"] |= _ATTENTION
    if "sel120" in variant:
        model["descriptor"]["sel"] = 120
    if "davg_zero" in variant:
        model["descriptor"]["set_davg_zero"] = True
    with_atoms = "drop" not in variant and "atom_ener" not in variant
    kept = [system for system in systems if system.natoms > 1 or with_atoms]
    training["training_data"]["systems"] = [system.name for system in kept]
    training["training_data"]["batch_size"] = "auto" if variant.startswith("auto") else "mix:32"
    training["validation_data"] |= {
        "systems": [str((folder / "split" / "valid").resolve())],
        "batch_size": "auto",
        "numb_btch": "all",
    }
    training |= {
        "numb_steps": run.steps,
        "disp_freq": max(1, run.steps // 4),
        "save_freq": run.steps,
        "jsonl_file": "log.jsonl",
    }
    if "atom_ener" in variant:
        energies = _free_energies(systems)
        model["fitting_net"]["atom_ener"] = [energies[name] for name in model["type_map"]]
    place = folder / f"{variant}-{run.seed}-{run.steps}"
    if run.rates is not None:
        content["optimizer"] |= run.rates._asdict()
        place = place.with_name(f"{place.name}-{'-'.join(map(str, run.rates))}")
    place.mkdir(exist_ok=True)
    (place / "input.json").write_text(json.dumps(content, indent=2))
    subprocess.run(
        [*_DP, "--pt", "train", "input.json"],
        cwd=place,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=(place / "log").open("w"),
    )
    lines = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    last = lines[-1]
    seconds = last["time"] - lines[-2]["time"]
    optimizer = json.loads((place / "out.json").read_text())["optimizer"]
    return Result(
        force=last["rmse_f_val"],
        energy=last["rmse_e_val"],
        step=1e3 * seconds / (last["step"] - lines[-2]["step"]),
        used=Rates(*(optimizer[name] for name in Rates._fields)),
    )


def _free_energies(systems: list[System]) -> dict[str, float]:
    energies = {}
    for system in systems:
        if system.natoms == 1:
            frame = system.frames([0])
            assert system.type_map is not None
            assert frame.energy is not None
            energies[system.type_map[frame.atype[0, 0]]] = float(frame.energy[0])
    return energies


if __name__ == "__main__":
    main()
