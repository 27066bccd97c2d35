"""Make a larger training part for the race's water set: ``python make_water_large.py --out race-data --workers N``.

One round of active learning, after ``make_water.py``. A potential that is trained on the small set draws frames by
Langevin dynamics at its two temperatures, with the example's time step, friction and masses, from many training frames.
A walk that leaves water (see `is_water`) ends; the last frame before, to 10 fs, is taken too, and dynamics goes on from
another training frame. The example's own tight GFN1-xTB calculation labels the frames. Training: the small set's frames
and these; test and out of distribution: those of the small set.

The stages draw, label and write can run apart, by ``--stages``: each walker and each block of labels is a file below
``OUT/water_large_work``, and those that exist are not computed again. Labels take one to two seconds a frame and core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator
from sampling import argument_parser, concatenated, read_system, save, summary, write_checksums

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "water_xtb"
sys.path.insert(0, str(EXAMPLE))

# The example is not a package: its script is imported by the path above.
from make_data import HYDROGEN_MASS, as_system, dynamics, labelled, set_momenta  # noqa: E402
from write_system import LabelledSystem, write_npy  # noqa: E402

STAGES = ("draw", "label", "write")
POTENTIAL = (
    "water",
    "se_e2_a",
    "hybrid_muon",
    0.00864,
    2,
    3000,
)  # the race's key of the run that draws
TEMPERATURES = (300.0, 350.0)  # K
WALKERS, FRAMES = 12, 50  # walkers a temperature, frames a walker
SPACING, CHECKED = 20, 5  # time steps between two frames, and between two looks at the geometry
SEED = 20261122
BLOCK = 5  # frames that are labelled into one file
BONDS = (0.7, 1.4)  # Å, of a molecule's own O–H
CONTACTS = {("O", "O"): 2.1, ("O", "H"): 1.2, ("H", "H"): 1.0}  # Å, the shortest between molecules


def contacts(positions: np.ndarray, length: float) -> dict[tuple[str, str], float]:
    """Return the shortest distance [Å] between molecules for each pair of elements; atoms O, H, H in a cubic cell."""
    vectors = positions[:, None] - positions[None]
    vectors -= length * np.round(vectors / length)
    distance = np.sqrt((vectors**2).sum(axis=-1))
    molecule = np.arange(len(positions)) // 3
    distance[molecule[:, None] == molecule[None]] = np.inf
    oxygen = np.arange(len(positions)) % 3 == 0
    of = {"O": oxygen, "H": ~oxygen}
    return {(a, b): float(distance[np.ix_(of[a], of[b])].min()) for a, b in CONTACTS}


def bond_lengths(positions: np.ndarray) -> np.ndarray:
    """Return the O–H distances [Å] within molecules, which are whole, as dynamics does not wrap them."""
    molecules = positions.reshape(-1, 3, 3)
    found: np.ndarray = np.linalg.norm(molecules[:, 1:] - molecules[:, :1], axis=-1)
    return found


def is_water(positions: np.ndarray, length: float) -> bool:
    """Say whether all molecules are whole, see `BONDS`, and none are on top of each other, see `CONTACTS`."""
    bonds, found = bond_lengths(positions), contacts(positions, length)
    whole = BONDS[0] <= bonds.min() and bonds.max() <= BONDS[1]
    return bool(whole and all(found[pair] >= least for pair, least in CONTACTS.items()))


@dataclass(frozen=True)
class Walker:
    """A series of walks at one temperature.

    Attributes
    ----------
    temperature
        In K.
    number
        Among those at this temperature.
    starts
        Training frames, where its walks begin, one after the other.
    """

    temperature: float
    number: int
    starts: Sequence[Atoms]

    def draw(self, calculator: Calculator, frames: int) -> tuple[list[np.ndarray], int]:
        """Return positions of so many frames, centred in the cell, and how many walks ended early."""
        rng = np.random.default_rng([SEED, round(self.temperature), self.number])
        found: list[np.ndarray] = []
        ended = 0
        while len(found) < frames:
            if ended > 10 * frames:
                raise RuntimeError(
                    f"{ended} walks left water and gave {len(found)} frames; train the potential longer"
                )
            atoms = self.starts[ended % len(self.starts)].copy()
            atoms.set_masses(np.where(atoms.numbers == 1, HYDROGEN_MASS, atoms.get_masses()))
            atoms.calc = calculator
            set_momenta(atoms, self.temperature, rng)
            walk, whole = self._walk(atoms, frames - len(found), rng)
            found += walk
            ended += not whole
        return found[:frames], ended

    def _walk(
        self, atoms: Atoms, frames: int, rng: np.random.Generator
    ) -> tuple[list[np.ndarray], bool]:
        """Return the frames of a walk, and whether it stayed in water."""
        md = dynamics(atoms, self.temperature, rng)
        found: list[np.ndarray] = []
        for step in range(CHECKED, frames * SPACING + 1, CHECKED):
            before = centred(atoms)
            md.run(CHECKED)
            if not is_water(atoms.positions, atoms.cell[0, 0]):
                # what is taken already, or where the walk began, is not taken again
                return found if step % SPACING == CHECKED else [*found, before], False
            if step % SPACING == 0:
                found.append(centred(atoms))
        return found, True


def centred(atoms: Atoms) -> np.ndarray:
    """Return positions with their mean in the middle of the cell, where float32 is finest, as the example does."""
    found: np.ndarray = (
        atoms.positions - atoms.positions.mean(axis=0) + 0.5 * np.diagonal(atoms.cell.array)
    )
    return found


def walkers(small: Path) -> list[Walker]:
    """Return the walkers; the N-th starts from every twelfth training frame of its temperature, from the N-th on."""
    frames = {t: read_system(small / "train" / f"{t:g}K") for t in TEMPERATURES}
    return [Walker(t, k, frames[t][k::WALKERS]) for k in range(WALKERS) for t in TEMPERATURES]


def draw_one(walker: Walker, potential: Path, work: Path) -> str:
    """Let a walker draw its frames, unless it has, and say what it found."""
    import torch

    from deepmd_muon.infer import DeepPotCalculator

    path = work / "drawn" / f"{walker.temperature:g}K_{walker.number:02d}.npz"
    if path.exists():
        return f"{path.name} exists"
    torch.set_num_threads(1)
    found, ended = walker.draw(DeepPotCalculator(potential, device="cpu"), FRAMES)
    save(
        path,
        coord=np.array(found, dtype=np.float32),
        length=walker.starts[0].cell[0, 0],
        ended=ended,
    )
    return f"{path.name}: {len(found)} frames, {ended} walks left water"


def train_potential(small: Path, path: Path) -> None:
    """Train the potential that draws, a run of the race."""
    import race
    import torch
    from contest import Arena
    from results import Key

    key = Key(*POTENTIAL)
    arena = Arena(key.set, key.model, key.seed, key.steps, small, torch.device("cpu"))
    kept = path.parent / "kept"
    for result in race.train([key], lambda _: arena, float("inf"), kept):
        print(race.line(result), flush=True)
    next(kept.glob("*.pt")).replace(path)


def block_files(work: Path) -> dict[Path, tuple[Path, slice]]:
    """Return the files of labels, with the file of frames and the frames in it that each labels."""
    return {
        work / "labels" / f"{drawn.stem}_{first:02d}.npz": (drawn, slice(first, first + BLOCK))
        for first in range(0, FRAMES, BLOCK)
        for drawn in sorted((work / "drawn").glob("*.npz"))
    }


def label_block(path: Path, drawn: Path, chosen: slice, until: float) -> str:
    """Label a block of frames, unless it is or the time is over, and say what was done."""
    if path.exists() or time.time() > until:
        return f"{path.name} {'exists' if path.exists() else 'is left'}"
    system = as_system([labelled(atoms, 0.0, 0, ()) for atoms in frames_of(drawn, chosen)])
    single = {
        "coord": system.coord.astype(np.float32),
        "force": system.force.astype(np.float32),
    }  # as they are stored
    save(path, **single, energy=system.energy, virial=system.virial)
    return f"{path.name}: {summary(system)}"


def frames_of(drawn: Path, chosen: slice) -> list[Atoms]:
    """Return frames that a walker has drawn."""
    with np.load(drawn) as arrays:
        coord, length = arrays["coord"][chosen].astype(float), float(arrays["length"])
    return [Atoms("OHH" * (len(x) // 3), positions=x, cell=[length] * 3, pbc=True) for x in coord]


def labels_of(work: Path, temperature: float) -> LabelledSystem:
    """Return all labelled frames of a temperature."""
    systems = []
    for path, (drawn, chosen) in sorted(block_files(work).items()):
        if not drawn.name.startswith(f"{temperature:g}K_") or not path.exists():
            continue
        cells = np.array([atoms.cell.array for atoms in frames_of(drawn, chosen)])
        with np.load(path) as arrays:
            labels = dict(arrays)
        atype = np.tile([0, 1, 1], labels["coord"].shape[1] // 3)
        systems.append(LabelledSystem(atype=atype, type_map=("O", "H"), box=cells, **labels))
    return concatenated(systems)


def write(work: Path, small: Path, out: Path) -> None:
    """Write the set: the small one, and what was drawn and labelled."""
    for part in ("train", "test", "out"):
        shutil.copytree(small / part, out / part, dirs_exist_ok=True)
    for temperature in TEMPERATURES:
        system = labels_of(work, temperature)
        name = f"drawn_{temperature:g}K"
        write_npy(out / "train" / name, system)
        print(f"{out.name}/train/{name}: {summary(system)}; {geometry(system)}", flush=True)
    print(write_checksums(out))


def geometry(system: LabelledSystem) -> str:
    """Say how water frames look: bonds, and how near molecules come to each other."""
    bonds = np.array([bond_lengths(x) for x in system.coord])
    nearest = [contacts(x, box[0, 0]) for x, box in zip(system.coord, system.box, strict=True)]
    shortest = ", ".join(
        f"{a}…{b} {min(found[a, b] for found in nearest):.2f}" for a, b in CONTACTS
    )
    return f"O–H {bonds.mean():.4f} ± {bonds.std():.4f} ({bonds.min():.2f} to {bonds.max():.2f}) Å, shortest {shortest} Å"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument(
        "--potential", type=Path, help="draws; otherwise one is trained, which takes minutes"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no block of labels after these"
    )
    return parser.parse_args()


def main() -> None:
    """Draw, label and write."""
    args = arguments()
    small, out, work = (args.out / name for name in ("water", "water_large", "water_large_work"))
    until = time.time() + args.seconds
    potential = args.potential or work / "potential.pt"
    if "draw" in args.stages and not potential.exists():
        train_potential(small, potential)
    # A forked process would inherit torch's threads in an unknown state
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        if "draw" in args.stages:
            for said in pool.map(partial(draw_one, potential=potential, work=work), walkers(small)):
                print(said, flush=True)
        if "label" in args.stages:
            blocks = block_files(work).items()
            jobs = [pool.submit(label_block, path, *source, until) for path, source in blocks]
            for job in jobs:
                print(job.result(), flush=True)
    if "write" in args.stages:
        write(work, small, out)


if __name__ == "__main__":
    main()
