"""Structures that conformance tests evaluate models on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Structure(NamedTuple):
    """One frame.

    Attributes
    ----------
    name
        For messages.
    coord
        Positions `(natoms, 3)` [Å].
    atype
        Types `(natoms,)`; −1 is a padding atom.
    box
        Cell vectors as rows `(3, 3)` [Å], or None without periodicity.
    """

    name: str
    coord: np.ndarray
    atype: np.ndarray
    box: np.ndarray | None = None

    def displaced(self, displacements: np.ndarray) -> Structure:
        """Return the structure with displaced atoms `(natoms, 3)` or `(3,)` [Å]."""
        return self._replace(coord=self.coord + displacements)

    def mapped(self, matrix: np.ndarray) -> Structure:
        """Return the structure with every vector multiplied by a matrix `(3, 3)` from the right."""
        box = None if self.box is None else self.box @ matrix
        return self._replace(coord=self.coord @ matrix, box=box)

    def rows(self, rows: np.ndarray) -> Structure:
        """Return the structure with these atoms, in this order."""
        return self._replace(coord=self.coord[rows], atype=self.atype[rows])


def scattered(name: str, natoms: int, ntypes: int, edge: float, seed: int) -> Structure:
    """Return atoms in a cube without periodicity, at least 1.2 Å from each other.

    They have the types in turn.
    """
    random = np.random.default_rng(seed)
    coord = np.zeros((0, 3))
    while len(coord) < natoms:
        position = edge * random.random(3)
        if np.all(np.linalg.norm(coord - position, axis=1) > 1.2):
            coord = np.vstack([coord, position])
    return Structure(name, coord, np.arange(natoms) % ntypes)


def structures(ntypes: int) -> list[Structure]:
    """Return a cluster, a triclinic cell, and a cell smaller than usual cut-offs."""
    tilted = np.array([[1.0, 0.1, 0.0], [-0.2, 1.0, 0.1], [0.1, 0.2, 1.0]])
    triclinic = scattered("triclinic", 6, ntypes, edge=4.0, seed=5)
    small_cell = scattered("small cell", 2, ntypes, edge=1.9, seed=5)
    return [
        scattered("cluster", 7, ntypes, edge=4.0, seed=4),
        triclinic._replace(box=5.2 * tilted),
        small_cell._replace(box=3.1 * tilted),
    ]
