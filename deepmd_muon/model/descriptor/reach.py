"""The radii between which the influence of a neighbour falls to 0."""

from __future__ import annotations

from typing import NamedTuple


class Reach(NamedTuple):
    """The radii of the switch [Å]."""

    rcut: float  # where the switch ends
    rcut_smth: float  # where it starts
    protection: float = 0.0  # `env_protection`, added to distances in denominators
