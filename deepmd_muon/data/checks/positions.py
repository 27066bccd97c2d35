"""Signs of wrong units, orders and cells in the positions of a sample.

Distances are compared with covalent radii.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.checks.sample import Sample, fractions_of
from deepmd_muon.data.checks.words import frame_words
from deepmd_muon.data.elements import COVALENT_RADII
from deepmd_muon.data.frames import Frames, evenly_spread, nearest_images

# Shortest distance between atoms [Å]: H2 has 0.74.
_SHORTEST = 0.6
# Without elements, the shortest distances of positions in Å are below this [Å].
_LONGEST = 4.0
# Distances over the sum of covalent radii: bonds have 0.9 to 1.1, contacts of metals and salts up
# to 1.3. Outside of these limits atoms are too close or too far apart.
_CLOSE = 0.5
_APART = 1.5
# Frames with close atoms are named one by one if they are at most this share of the sample.
_FEW = 0.25
# Coordinates so many cell lengths outside of the cell are probably in other units than the cell.
_CELLS = 50.0
_NOBLE = frozenset(("He", "Ne", "Ar", "Kr", "Xe", "Rn"))


def position_problems(sample: Sample) -> Iterator[str]:
    """Yield what is wrong with positions and cells; nothing else is worth a look then."""
    frames = sample.frames
    if frames.box is not None:
        size = np.abs(frames.box).max(axis=(1, 2))
        flat = np.abs(np.linalg.det(frames.box)) <= 1e-9 * size**3
        if flat.any():
            where = frame_words(sample.numbers[np.flatnonzero(flat)])
            yield f"a cell has no volume ({where}); a system without a cell needs a file nopbc"
            return
        outside = np.abs(fractions_of(frames)).max(axis=(1, 2))
        if outside.max() > _CELLS:
            yield (
                f"atoms lie {outside.max():.0f} cell lengths away from the cell in frame "
                f"{sample.numbers[outside.argmax()]}; box and coord must be in Å"
            )
            return

    names = sample.system.type_map
    closest = closest_atoms(frames, names)
    shortest = float(closest.distance.min())
    ratio = float(closest.ratio.min())
    has_radii = np.isfinite(ratio)
    close = np.flatnonzero((closest.distance < _SHORTEST) | (closest.ratio < _CLOSE))
    if 0 < len(close) <= _FEW * frames.nframes:
        yield (
            f"atoms are {closest.distance[close].min():.3g} Å apart in "
            f"{frame_words(sample.numbers[close])} of those looked at; remove such frames"
        )
    elif len(close):
        yield f"atoms are {shortest:.3g} Å apart; {_remedy(sample, names)}"
    elif np.isfinite(shortest) and _is_too_far(sample, shortest, ratio):
        bonds = f", {ratio:.2f} times the sum of covalent radii" if has_radii else ""
        yield (
            f"the closest atoms are {shortest:.3g} Å apart{bonds}; positions and cells must be "
            "in Å (multiply by 0.529 if they are in Bohr)"
        )
    elif has_radii and frames.box is not None and ratio < 0.8:
        transposed = replace(frames, box=frames.box.transpose(0, 2, 1))
        if closest_atoms(transposed, names).ratio.min() > max(1.15 * ratio, 0.8):
            yield (
                f"atoms are {shortest:.3g} Å apart, and further with the transposed cell; rows of "
                "box are the cell vectors"
            )


def _is_too_far(sample: Sample, shortest: float, ratio: float) -> bool:
    """Whether even the closest atoms are too far apart for positions in Å.

    If a type has no covalent radius, such as Fe1, the closest atoms may be of that type. Noble
    gases may be dilute.
    """
    names = sample.system.type_map
    types = [kind for kind in np.unique(sample.frames.atype).tolist() if kind >= 0]
    elements = {names[kind] for kind in types} if names is not None else {""}
    if elements <= COVALENT_RADII.keys() - _NOBLE:
        return ratio > _APART
    return shortest > _LONGEST and not elements <= _NOBLE


def _remedy(sample: Sample, names: Sequence[str] | None) -> str:
    """Say which change of units makes the distances ordinary."""
    for words, frames in _changed_units(sample.frames):
        closest = closest_atoms(frames, names)
        ratio = closest.ratio.min()
        has_radii = np.isfinite(ratio)
        if has_radii and 0.8 < ratio < _APART:
            return f"positions must be in Å ({words})"
        if not has_radii and _SHORTEST < closest.distance.min() < _LONGEST:
            return f"positions must be in Å ({words})"
    return "positions must be in Å (nm would look like this); remove frames in which atoms overlap"


def _changed_units(frames: Frames) -> Iterator[tuple[str, Frames]]:
    """Yield changes of positions and cells, in words and made, the likeliest first."""
    coord = frames.coord
    box = frames.box
    if box is None:
        yield "nm? multiply coord by 10", replace(frames, coord=coord * 10)
        return
    if np.ptp(coord, axis=1).max() <= 1.05:
        words = "fractional positions? coord must be Cartesian"
        yield words, replace(frames, coord=coord @ box)
    yield "nm with a cell in Å? multiply coord by 10", replace(frames, coord=coord * 10)
    nanometres = replace(frames, coord=coord * 10, box=box * 10)
    yield "nm? multiply coord and box by 10", nanometres
    bohr = replace(frames, coord=coord * 0.529177)
    yield "Bohr with a cell in Å? multiply coord by 0.529", bohr
    transposed = replace(frames, box=box.transpose(0, 2, 1))
    yield "a transposed cell? rows of box are the cell vectors", transposed


class ClosestAtoms(NamedTuple):
    """The least distances of the frames, (nframes,) each."""

    distance: np.ndarray  # [Å]; infinite without pairs
    ratio: np.ndarray  # over the sum of covalent radii; infinite without known radii


def closest_atoms(frames: Frames, names: Sequence[str] | None) -> ClosestAtoms:
    """Compare up to 64 atoms of each frame with all its atoms.

    `names` are the elements of the types. Noble gases have no covalent radii here.
    """
    radii = [np.nan if name in _NOBLE else COVALENT_RADII.get(name, np.nan) for name in names or ()]
    radius = np.array([*radii, np.nan])  # by type; the last one is for types without a name
    distances = np.full(frames.nframes, np.inf)
    ratios = np.full(frames.nframes, np.inf)
    if frames.box is not None:
        inverse = np.linalg.inv(frames.box)
        # Rounded fractions give the nearest image up to half of the cell's least height. Primitive
        # cells are smaller than that.
        exact = 0.5 / np.sqrt((inverse**2).sum(axis=1)).max(axis=1)
    for k in range(frames.nframes):
        real = frames.atype[k] >= 0
        coord = frames.coord[k][real]
        types = np.minimum(frames.atype[k][real], len(radius) - 1)
        rows = _evenly_spread(len(coord))
        apart = (coord[rows, None] - coord).reshape(-1, 3)
        if frames.box is not None:
            apart = nearest_images(apart, frames.box[k])
        distance = np.sqrt(np.einsum("pc,pc->p", apart, apart)).reshape(len(rows), len(coord))
        itself = np.arange(len(rows)), rows
        distance[itself] = np.inf
        if frames.box is not None and not distance.min(initial=np.inf) < exact[k]:
            distance = _least_lengths(apart, frames.box[k]).reshape(distance.shape)
            distance[itself] = np.inf
        distances[k] = distance.min(initial=np.inf)
        ratio = distance / (radius[types[rows], None] + radius[types])
        ratios[k] = np.fmin.reduce(ratio, axis=None, initial=np.inf)  # ignores NaN
    return ClosestAtoms(distances, ratios)


def _least_lengths(vectors: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return the least lengths of vectors `(npairs, 3)` over the 27 nearest images of a cell."""
    squares = np.full(len(vectors), np.inf)
    for image in product((-1.0, 0.0, 1.0), repeat=3):
        image_vectors = vectors + image @ box
        np.minimum(squares, np.einsum("pc,pc->p", image_vectors, image_vectors), out=squares)
    return np.asarray(np.sqrt(squares))


@lru_cache(maxsize=4)  # the frames of a system have the same number of atoms
def _evenly_spread(natoms: int) -> np.ndarray:
    """Return the numbers of 64 atoms, spread evenly; of all atoms if there are fewer."""
    return evenly_spread(natoms, 64)[:natoms]
