"""Random structures on which `dp freeze` and `dp compress` compare a file with its model.

A full neighbour list leaves out the farthest neighbours. If two of these are equally far, rounding
and the order of the list decide which one stays, and both choices are right. The two images of an
atom on opposite sides of another one can be equally far, and those on opposite sides of itself
always are. So a structure here either has a list with room for every neighbour (`random_crystal`),
or at most one image of an atom near another atom (`random_cluster`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepmd_muon.data import build_neighbors
from deepmd_muon.data.neighbors.lists import group_limits
from deepmd_muon.model import EnergyModel

VOLUME_PER_ATOM = 10.0  # [Å³], about that of water and of copper
_CRYSTAL_POINTS = 3  # along each cell vector
_GROWTH = 1.1  # factor of a cell with more neighbours than the lists hold
_UNLIMITED = np.iinfo(np.int32).max


class Structure(NamedTuple):
    """The arguments of `Predictor.predict` for one frame.

    Attributes
    ----------
    coord
        Positions (natoms, 3) [Å].
    box
        Cell vectors (3, 3) [Å], or None.
    atype
        Types (natoms,).
    fparam, aparam
        Frame parameters (numb_fparam,) and atomic parameters (natoms, numb_aparam); None if the
        model reads none.
    """

    coord: np.ndarray
    box: np.ndarray | None
    atype: np.ndarray
    fparam: np.ndarray | None = None
    aparam: np.ndarray | None = None

    def for_program(self) -> tuple[np.ndarray | None, ...]:
        """Return the arguments of `Program.forward` in their order, without the axis of frames."""
        return self.coord, self.atype, self.box, self.fparam, self.aparam


def random_structures(model: EnergyModel, seed: int = 0, points: int = 4) -> list[Structure]:
    """Return the structures on which a frozen file is compared with its model.

    Clusters have points³ atoms.
    """
    random = np.random.default_rng(seed)
    return [
        random_crystal(random, model),
        random_crystal(random, model),
        random_cluster(random, model, periodic=True, points=points),
        random_cluster(random, model, periodic=False, points=points),
    ]


def structures_with_close_atoms(
    model: EnergyModel, closest: float, seed: int = 0
) -> list[Structure]:
    """Return structures; all but the first have two atoms at 0.4, 0.8, … 2 times `closest` [Å]."""
    random = np.random.default_rng(seed)
    structures = [random_crystal(random, model)]
    for number in range(1, 6):
        cluster = random_cluster(random, model, periodic=number % 2 == 0, points=3)
        direction = random.normal(size=3)
        bond = 0.4 * number * closest * direction / np.linalg.norm(direction)
        cluster.coord[-1] = cluster.coord[0] + bond
        structures.append(cluster)
    return structures


def random_crystal(random: np.random.Generator, model: EnergyModel) -> Structure:
    """Return atoms that fill a triclinic cell, as densely as the neighbour lists allow.

    An atom may have several images near another atom, or near itself.
    """
    in_reach = 4.0 / 3.0 * np.pi * model.rcut**3
    volume = max(VOLUME_PER_ATOM, in_reach / (sum(model.sel) + 1))
    box = _random_cell(random, _CRYSTAL_POINTS, volume)
    fractions = _jittered_grid(random, _CRYSTAL_POINTS)
    atype = random.integers(model.ntypes, size=len(fractions))
    while not _lists_hold(model, fractions @ box, box, atype):
        box *= _GROWTH
    return _with_parameters(random, model, Structure(fractions @ box, box, atype))


def random_cluster(
    random: np.random.Generator, model: EnergyModel, *, periodic: bool, points: int
) -> Structure:
    """Return points³ atoms of ordinary density, without a cell or in one wider than two cut-offs.

    Neighbour lists may be too short for them. In a cell that would be smaller than the cluster, the
    atoms fill it.
    """
    filled = _random_cell(random, points, VOLUME_PER_ATOM)
    coord = (_jittered_grid(random, points) - 0.5) @ filled
    box = None
    if periodic:
        heights = 1.0 / np.linalg.norm(np.linalg.inv(filled), axis=0)
        box = filled * max(1.0, 2.1 * model.rcut / heights.min())
    atype = random.integers(model.ntypes, size=len(coord))
    return _with_parameters(random, model, Structure(coord, box, atype))


def _random_cell(random: np.random.Generator, points: int, volume: float) -> np.ndarray:
    """Return vectors `(3, 3)` [Å] of a cell for points³ atoms, at about a volume [Å³] for each."""
    edge = points * volume ** (1 / 3)
    cell: np.ndarray = edge * (np.eye(3) + random.uniform(-0.1, 0.1, size=(3, 3)))
    return cell


def _jittered_grid(random: np.random.Generator, points: int) -> np.ndarray:
    """Return positions in units of the cell `(points³, 3)`, a grid with random shifts."""
    grid = np.stack(np.meshgrid(*[np.arange(points)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    fractions: np.ndarray = (grid + random.uniform(-0.2, 0.2, size=grid.shape)) / points
    return fractions


def _lists_hold(model: EnergyModel, coord: np.ndarray, box: np.ndarray, atype: np.ndarray) -> bool:
    """Return whether the model's lists, also of shorter cut-offs, have room for all neighbours."""
    inner = model.neighbors.inner
    everything = build_neighbors(
        coord,
        box,
        atype,
        model.rcut,
        sel=None,
        by_type=model.by_type,
        ntypes=model.ntypes,
        inner=[(radius, _UNLIMITED) for radius, _ in inner],
    )
    if np.any(everything.sections > group_limits(model.sel, model.by_type, model.ntypes)):
        return False
    limits = np.array([limit for _, limit in inner], dtype=np.int64)
    return bool(np.all(everything.inner <= limits[:, None]))


def _with_parameters(
    random: np.random.Generator, model: EnergyModel, structure: Structure
) -> Structure:
    """Return the structure with parameters spread like those of the training data."""
    drawn: dict[str, np.ndarray] = {}
    for name, leading in (("fparam", ()), ("aparam", (len(structure.coord),))):
        mean = getattr(model.atomic_model.fitting_net, f"{name}_avg", None)
        if mean is None:
            continue
        inverse = getattr(model.atomic_model.fitting_net, f"{name}_inv_std").double().cpu().numpy()
        normal = random.normal(size=(*leading, len(inverse)))
        drawn[name] = mean.double().cpu().numpy() + normal / inverse
    return structure._replace(**drawn)
