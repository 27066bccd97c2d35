"""Whether the data have what the loss compares with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from deepmd_muon.loss.ener import EnergyLoss


class Labelled(Protocol):
    """What is asked of a system."""

    @property
    def name(self) -> str:
        """Where it lies."""

    @property
    def labels(self) -> frozenset[str]:
        """Names of the labels that some of its frames have."""


class LabelCheck(NamedTuple):
    """What does not fit: sentences for the log, and sentences that should stop a run."""

    warnings: tuple[str, ...]
    errors: tuple[str, ...]


def check_labels(loss: EnergyLoss, systems: Iterable[Labelled]) -> LabelCheck:
    """Compare the terms of a loss with the labels of the systems it shall be trained on.

    Parameters
    ----------
    loss
        The loss.
    systems
        Training systems.

    Returns
    -------
    LabelCheck
        A warning for each term that no system has labels for; an error for each system that has labels for no term,
        as steps on it would teach nothing, or one error when no term is switched on at all.
    """
    terms = loss.terms
    if not terms:
        return LabelCheck((), ("every term of the loss has a prefactor of 0 at its start or limit: nothing to learn",))
    every = [(system.name, system.labels) for system in systems]
    needed = {term: loss.needed_labels(term) for term in terms}
    warnings = tuple(
        f"no system has {' and '.join(f'{label}.npy' for label in sorted(labels))}: "
        f"loss/start_pref_{term} and loss/limit_pref_{term} have no effect"
        for term, labels in needed.items()
        if not any(labels <= found for _, found in every)
    )
    errors = tuple(
        f"system {name} has no label that the loss compares with: its terms need "
        f"{' or '.join(' + '.join(sorted(labels)) for labels in needed.values())}, "
        f"it has {', '.join(sorted(found)) or 'none'}; leave it out or change the prefactors"
        for name, found in every
        if not any(labels <= found for labels in needed.values())
    )
    return LabelCheck(warnings, errors)
