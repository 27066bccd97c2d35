"""Systems that differ from the others of the same model: in units, in the sign of forces, or in their types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from deepmd_muon.data.checks.pair_fit import PairFit
from deepmd_muon.data.checks.units import ENERGY_UNITS, explain
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System

Looked = tuple[System, Frames, "PairFit | None"]
# Systems that another one is compared with.
_REFERENCES = 8
# Forces of good systems have 0.3 to 2 times what others predict, where the correlation is so large.
_FACTORS, _CORRELATED = (0.25, 4.0), 0.8
# Correlations of forces with types as they are, and swapped.
_WRONG, _RIGHT = 0.5, 0.8
# Share of the forces from distances that the other system has: 1.0 in swapped liquids and alloys, 0.5 at most where
# cells are strained by a fifth, whose forces then fit by chance.
_KNOWN = 0.9
# Energy per atom [eV] away from the others with the same elements: tungsten's cohesive energy is 8.9 eV.
_ENERGY = 20.0
_ROUNDS = 30  # of the least absolute deviations


def differing_systems(looked: Sequence[Looked]) -> list[str]:
    """Return a sentence for every system that the majority of the others contradicts.

    Only systems with the same type map are compared: elsewhere a type has another number.
    """
    of_map: dict[tuple[str, ...] | None, list[Looked]] = {}
    for one in looked:
        of_map.setdefault(one[0].type_map, []).append(one)
    return [sentence for alike in of_map.values() for sentence in _differing(alike)]


def _differing(looked: Sequence[Looked]) -> list[str]:
    """Return the sentences about systems with one type map."""
    found = []
    fitted = [(system, fit) for system, _, fit in looked if fit is not None]
    for k, (system, fit) in enumerate(fitted):
        others = [other for n, (_, other) in enumerate(fitted) if n != k]
        others = others[:: -(-len(others) // _REFERENCES)] if others else []
        found += [f"{system.name}: {sentence}" for sentence in _of_forces(system, fit, others)]
    return found + _of_energies([(system, frames) for system, frames, _ in looked])


def _of_forces(system: System, fit: PairFit, others: Sequence[PairFit]) -> Iterator[str]:
    """Compare with the potentials of the others, with types as they are, and swapped."""
    seen = [fit.agreement(other) for other in others]
    odd = [
        f
        for f, correlation in seen
        if abs(correlation) > _CORRELATED and not _FACTORS[0] < f < _FACTORS[1]
    ]
    compared = sum(correlation != 0 for _, correlation in seen)
    if len(odd) > compared / 2 and len(odd) > 1:
        units = {
            words: value
            for words, value in ENERGY_UNITS.items()
            if "energies" in words or "sign" in words
        }
        of_forces = {words.replace("energies", "forces"): value for words, value in units.items()}
        yield explain("forces", "the forces of the other systems", float(np.median(odd)), of_forces)
        return
    types = sorted({t for kind in fit.kinds for t in kind})
    for a, b in combinations(types, 2):
        swap = list(range(types[-1] + 1))
        swap[a], swap[b] = b, a
        votes = [
            as_it_is < _WRONG
            and fit.agreement(other, swap)[1] > _RIGHT
            and fit.covered(other, swap) > _KNOWN
            for other, (_, as_it_is) in zip(others, seen, strict=True)
            if as_it_is != 0
        ]
        if sum(votes) > len(votes) / 2:
            names = system.type_map or [str(t) for t in range(types[-1] + 1)]
            yield (
                f"forces fit those of the other systems with {names[a]} and {names[b]} swapped only; check type.raw "
                "and type_map.raw"
            )


def _of_energies(looked: Sequence[tuple[System, Frames]]) -> list[str]:
    """Compare energies per atom with a sum over elements that fits most systems."""
    looked = [(system, frames) for system, frames in looked if frames.present("energy").any()]
    ntypes = max((int(frames.atype.max(initial=0)) + 1 for _, frames in looked), default=0)
    if len(looked) < 3:
        return []
    shares, energies = [], []
    for _, frames in looked:
        assert frames.energy is not None
        here = frames.present("energy")
        counts = frames.type_counts(ntypes)[here]
        shares.append((counts / counts.sum(axis=1, keepdims=True)).mean(axis=0))
        energies.append((frames.energy[here] / counts.sum(axis=1)).mean())
    x, y = np.array(shares), np.array(energies)
    if len(looked) < 2 * np.linalg.matrix_rank(x) + 1:
        return []  # every system could have elements of its own energy
    weight = np.ones(len(y))
    for _ in range(_ROUNDS):
        rest = y - x @ np.linalg.lstsq(x * weight[:, None], y * weight, rcond=None)[0]
        weight = 1 / np.sqrt(np.maximum(np.abs(rest), 1e-3))
    far = np.flatnonzero(np.abs(rest) > _ENERGY)
    if len(far) * 2 >= len(y):
        return []
    return [
        f"{looked[k][0].name}: the energy is {y[k]:.4g} eV per atom where other systems lead to {y[k] - rest[k]:.4g} "
        f"(factor {y[k] / (y[k] - rest[k]):.3g}); are unit and method the same?"
        for k in far
    ]
