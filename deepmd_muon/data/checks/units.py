"""Factors by which labels in other units, or of another meaning, differ from those in eV and Å."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations

import numpy as np

#: Energy over −F·dx for inputs whose energies, forces or positions are in other units.
ENERGY_UNITS: dict[str, float] = {
    "energies in kcal/mol: divide them by 23.06": 23.0605,
    "energies in kJ/mol: divide them by 96.49": 96.4853,
    "energies in Hartree: multiply them by 27.21": 1 / 27.2114,
    "energies in Rydberg: multiply them by 13.61": 1 / 13.6057,
    "energies in meV: divide them by 1000": 1000.0,
    "forces in kcal/mol/Å: divide them by 23.06": 1 / 23.0605,
    "forces in kJ/mol/Å: divide them by 96.49": 1 / 96.4853,
    "forces in Hartree/Bohr: multiply them by 51.42": 51.4221,
    "forces in Rydberg/Bohr: multiply them by 25.71": 25.7110,
    "forces in eV/Bohr (multiply them by 1.89), or all in Hartree (energies by 27.21, forces by "
    "51.42)": 1.88973,
    "forces of the opposite sign: they must be −dE/dx": -1.0,
}
#: The same for positions, whose unit distances between known elements show, too: both must speak
#: for it.
POSITION_UNITS: dict[str, float] = {
    "positions in Bohr: multiply them by 0.529": 0.529177,
    "positions in nm: multiply them by 10": 10.0,
}
_GPA = 160.21766  # GPa of 1 eV/Å³
#: Virial over what forces imply, as functions of the volume [Å³].
VIRIAL_UNITS: dict[str, Callable[[float], float]] = {
    "virials of the opposite sign: they must be −volume · stress": lambda volume: -1.0,
    "stress in eV/Å³ in place of the virial: multiply it by −volume": lambda volume: -1 / volume,
    "pressure in eV/Å³ in place of the virial: multiply it by the volume": lambda volume: (
        1 / volume
    ),
    "stress in GPa in place of the virial: multiply it by −volume/160.2": lambda volume: (
        -_GPA / volume
    ),
    "stress in kbar in place of the virial: multiply it by −volume/1602": lambda volume: (
        -10 * _GPA / volume
    ),
    "pressure in kbar in place of the virial: multiply it by volume/1602": lambda volume: (
        10 * _GPA / volume
    ),
    "virials in kcal/mol: divide them by 23.06": lambda volume: 23.0605,
    "virials in Hartree: multiply them by 27.21": lambda volume: 1 / 27.2114,
    "forces in kcal/mol/Å: divide them by 23.06": lambda volume: 1 / 23.0605,
    "forces in Hartree/Bohr: multiply them by 51.42": lambda volume: 51.4221,
    "forces of the opposite sign, too: they must be −dE/dx": lambda volume: -1.0,
}


def _virial_orders() -> dict[str, list[int]]:
    """Return the places of the nine numbers of a virial that was written in another order."""
    orders = {}
    for axes in permutations(range(3)):
        if axes != (0, 1, 2):
            names = "".join("xyz"[axis] for axis in axes)
            order = [3 * axes[k // 3] + axes[k % 3] for k in range(9)]
            orders[f"the axes in the order {names}"] = order
    off_diagonal = {1: "xy", 2: "xz", 5: "yz"}  # by number of the nine
    for a, b, c in permutations(off_diagonal):
        if (a, b, c) != tuple(off_diagonal):
            names = f"{off_diagonal[a]}, {off_diagonal[b]} and {off_diagonal[c]}"
            orders[f"{names} in place of xy, xz and yz"] = [0, a, b, a, 4, c, b, c, 8]
    return orders


#: Places of the nine numbers of a virial, by what is unusual about their order.
VIRIAL_ORDERS = _virial_orders()

# Factors are known within this factor.
_WITHIN = 1.45


def explain(labels: str, compared: str, factor: float, causes: Mapping[str, float]) -> str:
    """Return a sentence with a factor and the units that would cause it."""
    away = {
        words: abs(np.log(value / factor)) for words, value in causes.items() if value * factor > 0
    }
    likely = sorted(
        (distance, words) for words, distance in away.items() if distance < np.log(_WITHIN)
    )
    named = " or ".join(f"{words} (would be {causes[words]:.4g})" for _, words in likely[:3])
    if not named:
        named = "check units and signs of all labels"
    return f"{labels} are {factor:.3g} times what {compared} imply; {named}"
