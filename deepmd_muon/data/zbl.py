"""The screened repulsion of nuclei by Ziegler, Biersack and Littmark (ZBL).

    E(r) = e²/(4π ε₀) · Z₁ Z₂ / r · φ(r / a)
    φ(x) = Σ_k A_k exp(−D_k x)
    a = 0.4685 Å / (Z₁^0.23 + Z₂^0.23)

It is given as a table for `use_srtab`, and as labelled dimers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepmd_muon.data.elements import NUMBERS
from deepmd_muon.data.errors import DataError, TypeMapError
from deepmd_muon.data.stores.memory import MemoryStore
from deepmd_muon.data.system import System

# e²/(4π ε₀) [eV Å] (CODATA 2018).
_COULOMB = 14.3996454785
# A_k, D_k, and the numbers of a: The Stopping and Range of Ions in Solids (Pergamon, 1985).
_AMPLITUDES = np.array([0.18175, 0.50986, 0.28022, 0.02817])
_DECAYS = np.array([3.19980, 0.94229, 0.40290, 0.20162])
_LENGTH = 0.46850  # [Å]
_POWER = 0.23
# Of a table: many times what interpolation between rows needs, and less than a second of work.
_MAX_ROWS = 1_000_000


def zbl(first: str, second: str, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return energies [eV] and their slopes [eV/Å] of two elements at distances `(n,)` above 0 [Å].

    Raises
    ------
    TypeMapError
        When a name is not an element.
    """
    unknown = [name for name in (first, second) if name not in NUMBERS]
    if unknown:
        raise TypeMapError(
            f"{unknown[0]!r} is not an element, so that its repulsion is unknown; "
            "give element symbols"
        )
    charge_1 = NUMBERS[first]
    charge_2 = NUMBERS[second]
    length = _LENGTH / (charge_1**_POWER + charge_2**_POWER)
    terms = _AMPLITUDES * np.exp(-_DECAYS * distance[:, None] / length)  # (n, 4)
    screening = terms.sum(1)
    screening_slope = -(terms * _DECAYS).sum(1) / length
    bare = _COULOMB * charge_1 * charge_2 / distance
    return bare * screening, bare * (screening_slope - screening / distance)


def table_of(names: Sequence[str], step: float, begin: float, end: float) -> np.ndarray:
    """Return a table for `use_srtab`.

    Its columns are distances [Å] and energies of the pairs 0-0, 0-1, … of the type map [eV]. The
    first distance and the distance between rows are `step` [Å]. Between `begin` and `end` [Å] a
    quintic polynomial takes energies smoothly to 0.

    Raises
    ------
    DataError
        When the distances do not grow from above 0.
    """
    if not 0.0 < step < begin < end:
        raise DataError(
            f"distances must grow from step over begin to end; "
            f"found {step:g}, {begin:g} and {end:g} Å"
        )
    if not end / step < _MAX_ROWS:
        raise DataError(
            f"a table has at most {_MAX_ROWS} rows; "
            f"found an end of {end:g} Å and a step of {step:g} Å"
        )
    distance = step * np.arange(1, int(np.ceil(end / step)) + 2)
    u = np.clip((distance - begin) / (end - begin), 0.0, 1.0)
    switch = np.where(u < 1.0, 1.0 - u**3 * (10.0 - 15.0 * u + 6.0 * u**2), 0.0)
    pairs = [(a, b) for k, a in enumerate(names) for b in names[k:]]
    return np.stack([distance, *(switch * zbl(a, b, distance)[0] for a, b in pairs)], axis=1)


Label = Callable[[str, str, np.ndarray], dict[str, np.ndarray]]
"""Takes two elements and positions (nframes, 6) [Å]; returns arrays of a set by deepmd-kit's names.

They have `coord`, for frames that the function has not left out.
"""


def zbl_forces(first: str, second: str, coord: np.ndarray) -> dict[str, np.ndarray]:
    """Return dimers along x labelled with ZBL's forces alone.

    ZBL has no energy of free atoms, which energies of other methods contain: training takes the
    forces.
    """
    _, slope = zbl(first, second, coord[:, 3])
    force = np.zeros_like(coord)
    force[:, 0] = slope
    force[:, 3] = -slope
    return {"coord": coord, "force": force}


def dimers_of(
    names: Sequence[str], begin: float, end: float, count: int, label: Label = zbl_forces
) -> list[System]:
    """Return labelled dimers of every pair of elements, without cell; `label` may leave some out.

    Raises
    ------
    DataError
        When the distances do not grow from above 0.
    """
    if not 0.0 < begin < end or count < 2:
        raise DataError(
            f"dimers need 2 distances or more that grow from above 0; "
            f"found {count}, {begin:g} to {end:g} Å"
        )
    systems = []
    for k, a in enumerate(names):
        for b in names[k:]:
            coord = np.zeros((count, 6))
            coord[:, 3] = np.linspace(begin, end, count)
            store = MemoryStore(f"dimers of {a} and {b}", [a, b], [label(a, b, coord)], pbc=False)
            systems.append(System(store, list(names)))
    return systems
