"""Compare batches and uses of free atoms for small molecules, each an input `dp init` could write.

`python source/benchmarks/molecules.py FOLDER --sets small six --seeds 1 2` makes the sets by
GFN2-xTB (tblite), trains each variant and prints validation errors. The tables are in
doc/molecules.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.io import write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from tblite.ase import TBLite

from deepmd_muon.data import System, open_systems

# Molecules of each set, and frames of each.
_SETS = {
    "small": ("H2O CH4 NH3 CH3OH C2H6 HCN H2CO CO2 N2H4 C2H4", 40),
    "ethanol": ("CH3CH2OH", 300),
    "six": ("CH3CH2OH CH3SH CH3CHO CH3CN CH3Cl CF4 HCOOH CH3NO2 C3H8 thiooxirane", 40),
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


def main() -> None:
    """Print the force and energy error of every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="+", choices=_SETS, default=list(_SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--variants", nargs="+", choices=_VARIANTS, default=_VARIANTS[:4])
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()
    for name in options.sets:
        folder = options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "input.json").exists():
            write(folder / "all.xyz", make_frames(name), format="extxyz")
            command = ["dp", "init", "all.xyz", "--steps", str(options.steps)]
            subprocess.run([*command, "--descriptor", "se_e2_a"], cwd=folder, check=True)
        for seed in options.seeds:
            for variant in options.variants:
                force, energy = train(folder, variant, seed)
                print(f"{name:8} {variant:14} {seed} {force:.4f} eV/Å {energy:.4f} eV/atom")


def make_frames(name: str) -> list[Atoms]:
    """Return frames of dynamics at 500 K, and a free atom of each element, with MACE's names."""
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


def train(folder: Path, variant: str, seed: int) -> tuple[float, float]:
    """Train a variant of the input of `dp init`; return its last validation errors."""
    content: dict[str, Any] = copy.deepcopy(json.loads((folder / "input.json").read_text()))
    model = content["model"]
    training = content["training"]
    for section in (model["descriptor"], model["fitting_net"], training):
        section["seed"] = seed
    systems = open_systems(str((folder / "split" / "train").resolve()))
    if "dpa1" in variant:
        descriptor = {name: model["descriptor"][name] for name in _COMMON}
        model["descriptor"] = {**descriptor, **_DPA1}
    if "sel120" in variant:
        model["descriptor"]["sel"] = 120
    if "davg_zero" in variant:
        model["descriptor"]["set_davg_zero"] = True
    with_atoms = "drop" not in variant and "atom_ener" not in variant
    kept = [system for system in systems if system.natoms > 1 or with_atoms]
    training["training_data"]["systems"] = [system.name for system in kept]
    training["training_data"]["batch_size"] = "auto" if variant == "auto" else "mix:32"
    training["validation_data"] |= {
        "systems": [str((folder / "split" / "valid").resolve())],
        "batch_size": "auto",
        "numb_btch": "all",
    }
    training |= {"disp_freq": training["numb_steps"], "save_freq": training["numb_steps"]}
    if "atom_ener" in variant:
        energies = _free_energies(systems)
        model["fitting_net"]["atom_ener"] = [energies[name] for name in model["type_map"]]
    place = folder / f"{variant}-{seed}"
    place.mkdir(exist_ok=True)
    (place / "input.json").write_text(json.dumps(content, indent=2))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        ["dp", "--pt", "train", "input.json"],
        cwd=place,
        check=True,
        env=environment,
        stderr=(place / "log").open("w"),
    )
    lines = (place / "lcurve.out").read_text().splitlines()
    (titles,) = (line.split()[1:] for line in lines if line.startswith("#") and "step" in line)
    last = dict(zip(titles, map(float, lines[-1].split()), strict=True))
    return last["rmse_f_val"], last["rmse_e_val"]


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
