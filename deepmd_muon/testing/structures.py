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
        box = None if self.box is None else self.box @ matrix
        return self._replace(coord=self.coord @ matrix, box=box)


def scattered(natoms: int, ntypes: int, edge: float, seed: int) -> Structure:
    """Return atoms in a cube without periodicity, at least 1.2 Å from each other.

    They have the types in turn.
    """
    random = np.random.default_rng(seed)
    coord = np.zeros((0, 3))
    while len(coord) < natoms:
        position = edge * random.random(3)
        if np.all(np.linalg.norm(coord - position, axis=1) > 1.2):
            coord = np.vstack([coord, position])
    return Structure(coord, np.arange(natoms) % ntypes)


def structures(ntypes: int) -> dict[str, Structure]:
    """Return a cluster, a triclinic cell, and a cell smaller than usual cut-offs."""
    tilted = np.array([[1.0, 0.1, 0.0], [-0.2, 1.0, 0.1], [0.1, 0.2, 1.0]])

    def periodic(natoms: int, edge: float) -> Structure:
        atoms = scattered(natoms, ntypes, edge - 1.2, 5)
        return atoms._replace(box=edge * tilted)

    return {
        "cluster": scattered(7, ntypes, 4.0, 4),
        "triclinic": periodic(6, 5.2),
        "small cell": periodic(2, 3.1),
    }
