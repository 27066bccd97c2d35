"""Systems that differ from the others of a model in units, in the sign of forces, or in types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.checks.pair_fit import Agreement, PairFit
from deepmd_muon.data.checks.units import ENERGY_UNITS, explain
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System

# Other systems that a system is compared with.
_REFERENCES = 8
# Forces of good systems have 0.3 to 2 times the size that others predict, if the correlation is at
# least this.
_SMALLEST_FACTOR = 0.25
_LARGEST_FACTOR = 4.0
_CORRELATED = 0.8
# Correlations of forces that show swapped types: at most the first with types as they are, the
# second when swapped.
_WRONG = 0.5
_RIGHT = 0.8
# Share of the forces from distances that the other system has: 1.0 in swapped liquids and alloys,
# 0.5 at most if cells are strained by a fifth, which makes forces fit by chance.
_KNOWN = 0.9
# Energy per atom [eV] away from the others with the same elements: tungsten's cohesive energy is
# 8.9 eV.
_FAR_ENERGY = 20.0
# Rounds of the fit by least absolute deviations.
_ROUNDS = 30


class FittedSystem(NamedTuple):
    """A system and a sample of its frames."""

    system: System
    frames: Frames
    fit: PairFit | None  # the pair potential of the frames; None without a usable one


def differing_systems(fitted: Sequence[FittedSystem]) -> list[str]:
    """Return a sentence for every system that the majority of the others contradicts.

    Only systems with the same type map are compared: elsewhere a type has another number.
    """
    by_type_map: dict[tuple[str, ...] | None, list[FittedSystem]] = {}
    for entry in fitted:
        by_type_map.setdefault(entry.system.type_map, []).append(entry)
    sentences = []
    for alike in by_type_map.values():
        sentences += _differing_forces(alike)
        sentences += _differing_energies(alike)
    return sentences


def _differing_forces(alike: Sequence[FittedSystem]) -> list[str]:
    """Compare the forces of each system with the potentials of other systems."""
    fits = [(entry.system, entry.fit) for entry in alike if entry.fit is not None]
    sentences = []
    for k, (system, fit) in enumerate(fits):
        references = [reference for n, (_, reference) in enumerate(fits) if n != k]
        if references:
            references = references[:: -(-len(references) // _REFERENCES)]
        sentences += [
            f"{system.name}: {problem}" for problem in _force_problems(system, fit, references)
        ]
    return sentences


def _force_problems(system: System, fit: PairFit, references: Sequence[PairFit]) -> Iterator[str]:
    """Compare with the potentials of others, with types as they are, and swapped."""
    agreements = [fit.agreement(reference) for reference in references]
    odd = [agreement.factor for agreement in agreements if _has_odd_factor(agreement)]
    n_compared = sum(agreement.correlation != 0 for agreement in agreements)
    if len(odd) > n_compared / 2 and len(odd) > 1:
        of_forces = {
            words.replace("energies", "forces"): value
            for words, value in ENERGY_UNITS.items()
            if "energies" in words or "sign" in words
        }
        yield explain("forces", "the forces of the other systems", float(np.median(odd)), of_forces)
        return

    types = sorted({kind for pair in fit.kinds for kind in pair})
    for a, b in combinations(types, 2):
        swap = list(range(types[-1] + 1))
        swap[a] = b
        swap[b] = a
        votes = [
            _fits_only_swapped(fit, reference, agreement, swap)
            for reference, agreement in zip(references, agreements, strict=True)
            if agreement.correlation != 0
        ]
        if sum(votes) > len(votes) / 2:
            names = system.type_map or [str(kind) for kind in range(types[-1] + 1)]
            yield (
                f"forces fit those of the other systems with {names[a]} and {names[b]} swapped "
                "only; check type.raw and type_map.raw"
            )


def _has_odd_factor(agreement: Agreement) -> bool:
    usual = _SMALLEST_FACTOR < agreement.factor < _LARGEST_FACTOR
    return abs(agreement.correlation) > _CORRELATED and not usual


def _fits_only_swapped(
    fit: PairFit, reference: PairFit, unswapped: Agreement, swap: Sequence[int]
) -> bool:
    """Whether forces fit the potential of another system, but only with swapped types."""
    return (
        unswapped.correlation < _WRONG
        and fit.agreement(reference, swap).correlation > _RIGHT
        and fit.covered(reference, swap) > _KNOWN
    )


def _differing_energies(alike: Sequence[FittedSystem]) -> list[str]:
    """Compare energies per atom with a sum over elements that fits most systems."""
    labeled = [entry for entry in alike if entry.frames.present("energy").any()]
    if len(labeled) < 3:
        return []
    ntypes = max(int(entry.frames.atype.max(initial=0)) + 1 for entry in labeled)
    shares = []  # of the types in the atoms of each system
    energies = []  # per atom [eV]
    for entry in labeled:
        assert entry.frames.energy is not None
        present = entry.frames.present("energy")
        counts = entry.frames.type_counts(ntypes)[present]
        natoms = counts.sum(axis=1)
        shares.append((counts / natoms[:, None]).mean(axis=0))
        energies.append((entry.frames.energy[present] / natoms).mean())
    x = np.array(shares)  # (nsystems, ntypes)
    y = np.array(energies)  # (nsystems,)
    if len(labeled) < 2 * np.linalg.matrix_rank(x) + 1:
        return []  # every system could have elements with energies that no other system shows

    # Least absolute deviations by iteratively reweighted least squares.
    weight = np.ones(len(y))
    for _ in range(_ROUNDS):
        element_energies = np.linalg.lstsq(x * weight[:, None], y * weight, rcond=None)[0]
        residual = y - x @ element_energies
        weight = 1 / np.sqrt(np.maximum(np.abs(residual), 1e-3))
    far = np.flatnonzero(np.abs(residual) > _FAR_ENERGY)
    if len(far) * 2 >= len(y):
        return []
    sentences = []
    for k in far:
        expected = y[k] - residual[k]
        sentences.append(
            f"{labeled[k].system.name}: the energy is {y[k]:.4g} eV per atom where other systems "
            f"lead to {expected:.4g} (factor {y[k] / expected:.3g}); are unit and method the same?"
        )
    return sentences
