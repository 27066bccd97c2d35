"""Check that the data have the labels that the loss needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from deepmd_muon.loss.interface import Loss


class Labelled(Protocol):
    """The labels that a system should have."""

    @property
    def name(self) -> str:
        """Its path."""

    @property
    def labels(self) -> frozenset[str]:
        """Names of the labels that some of its frames have."""


class LabelCheck(NamedTuple):
    """Differences: sentences for the log, and sentences that should stop a run."""

    warnings: tuple[str, ...]
    errors: tuple[str, ...]


def check_labels(loss: Loss, systems: Iterable[Labelled]) -> LabelCheck:
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
        A warning for each term that some systems have no labels for. An error when no system has energies though the
        loss compares them, and for each system that has labels for no term, as steps on it would teach nothing.
    """
    every = [(system.name, system.labels) for system in systems]
    warnings: list[str] = []
    errors: list[str] = []
    for term in loss.terms:
        files = " and ".join(f"{label}.npy" for label in sorted(term.labels))
        without = [name for name, found in every if not term.labels <= found]
        if len(without) < len(every):
            if without:
                named = ", ".join(without[:3]) + (", …" if len(without) > 3 else "")
                warnings.append(
                    f"{len(without)} of {len(every)} systems have no {files} and no part in {term.settings}: {named}"
                )
        elif term.essential:
            errors.append(
                f"no system has {files}, without which a model has no energies: "
                f"add it, or set {term.settings} to 0 to train without"
            )
        else:
            warnings.append(f"no system has {files}: {term.settings} have no effect")
    needed = [term.labels for term in loss.terms]
    errors += [
        f"system {name} has no label that the loss compares with: its terms need "
        f"{' or '.join(' + '.join(sorted(labels)) for labels in needed)}, "
        f"it has {', '.join(sorted(found)) or 'none'}; leave it out or change the prefactors"
        for name, found in every
        if not any(labels <= found for labels in needed)
    ]
    return LabelCheck(tuple(warnings), tuple(errors))
