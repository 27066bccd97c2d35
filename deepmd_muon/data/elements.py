"""Order of element names, for type maps that come from data."""

from __future__ import annotations

from collections.abc import Iterable

_ELEMENTS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y "
    "Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re "
    "Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds "
    "Rg Cn Nh Fl Mc Lv Ts Og"
)
#: Atomic number of every element.
NUMBERS = {name: number for number, name in enumerate(_ELEMENTS.split(), start=1)}


def by_atomic_number(names: Iterable[str]) -> tuple[str, ...]:
    """Return names sorted by atomic number, each once; those that are not elements follow in alphabetical order."""
    return tuple(sorted(set(names), key=lambda name: (NUMBERS.get(name, len(NUMBERS) + 1), name)))
