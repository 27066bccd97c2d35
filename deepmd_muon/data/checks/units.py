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
    "forces in eV/Bohr (multiply them by 1.89), or all in Hartree (energies by 27.21, forces by 51.42)": 1.88973,
    "forces of the opposite sign: they must be −dE/dx": -1.0,
}
#: The same for positions, whose unit distances between known elements show, too: both must speak for it.
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
# Numbers of the nine above the diagonal.
_OFF_DIAGONAL = {1: "xy", 2: "xz", 5: "yz"}
#: Places of the nine numbers of a virial that was written in another order.
VIRIAL_ORDERS: dict[str, list[int]] = {
    **{
        f"the axes in the order {''.join('xyz'[k] for k in axes)}": [
            3 * axes[k // 3] + axes[k % 3] for k in range(9)
        ]
        for axes in permutations(range(3))
        if axes != (0, 1, 2)
    },
    # xy, xz and yz are numbers 1, 2 and 5 of the nine.
    **{
        f"{_OFF_DIAGONAL[a]}, {_OFF_DIAGONAL[b]} and {_OFF_DIAGONAL[c]} in place of xy, xz and yz": [
            *(0, a, b),
            *(a, 4, c),
            *(b, c, 8),
        ]
        for a, b, c in permutations(_OFF_DIAGONAL)
        if (a, b, c) != tuple(_OFF_DIAGONAL)
    },
}
_WITHIN = 1.45  # factors are known so well


def explain(labels: str, compared: str, factor: float, known: Mapping[str, float]) -> str:
    """Return a sentence with a factor and the units that would cause it."""
    away = {
        words: abs(np.log(value / factor)) for words, value in known.items() if value * factor > 0
    }
    nearest = sorted(
        (distance, words) for words, distance in away.items() if distance < np.log(_WITHIN)
    )
    causes = " or ".join(f"{words} (would be {known[words]:.4g})" for _, words in nearest[:3])
    return f"{labels} are {factor:.3g} times what {compared} imply; {causes or 'check units and signs of all labels'}"
