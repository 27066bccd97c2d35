"""Structures that conformance tests evaluate models on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Structure(NamedTuple):
    """One frame.

    Attributes
    ----------
    coord
        Positions `(natoms, 3)` [Å].
    atype
        Types `(natoms,)`; −1 is a padding atom.
    box
        Cell vectors as rows `(3, 3)` [Å], or None without periodicity.
    """

    coord: np.ndarray
    atype: np.ndarray
    box: np.ndarray | None = None

    def moved(self, atom: int, axis: int, distance: float) -> Structure:
        """Return the structure with one coordinate displaced [Å]."""
        coord = self.coord.copy()
        coord[atom, axis] += distance
        return self._replace(coord=coord)

    def mapped(self, matrix: np.ndarray) -> Structure:
        """Return the structure with every vector multiplied by a matrix `(3, 3)` from the right."""
        return self._replace(
            coord=self.coord @ matrix, box=None if self.box is None else self.box @ matrix
        )


def scattered(natoms: int, ntypes: int, edge: float, seed: int, *, apart: float = 1.2) -> Structure:
    """Return atoms in a cube without periodicity, types in turn, every two at least `apart` [Å] from each other."""
    random, chosen = np.random.default_rng(seed), np.zeros((0, 3))
    while len(chosen) < natoms:
        x = edge * random.random(3)
        if np.all(np.linalg.norm(chosen - x, axis=1) > apart):
            chosen = np.vstack([chosen, x])
    return Structure(chosen, np.arange(natoms) % ntypes)


def structures(ntypes: int) -> dict[str, Structure]:
    """Return a cluster, a triclinic cell, and a cell smaller than usual cut-offs."""
    tilted = np.array([[1.0, 0.1, 0.0], [-0.2, 1.0, 0.1], [0.1, 0.2, 1.0]])
    periodic = {}
    for name, natoms, edge in (("triclinic", 6, 5.2), ("small cell", 2, 3.1)):
        inside = scattered(natoms, ntypes, edge - 1.2, 5)
        periodic[name] = Structure(inside.coord, inside.atype, edge * tilted)
    return {"cluster": scattered(7, ntypes, 4.0, 4), **periodic}
