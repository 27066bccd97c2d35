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
        A warning for each term that some systems have no labels for. An error when no system has
        energies though the loss compares them, and for each system that has labels for no term, as
        steps on it would teach nothing.
    """
    labels_of = {system.name: system.labels for system in systems}
    warnings: list[str] = []
    errors: list[str] = []
    for term in loss.terms:
        files = " and ".join(f"{label}.npy" for label in sorted(term.labels))
        unlabelled = [name for name, labels in labels_of.items() if not term.labels <= labels]
        if not unlabelled:
            continue
        if len(unlabelled) < len(labels_of):
            warnings.append(
                f"{len(unlabelled)} of {len(labels_of)} systems have no {files} and no part in "
                f"{term.settings}: {_first_three(unlabelled)}"
            )
        elif term.essential:
            errors.append(
                f"no system has {files}, without which a model has no energies: "
                f"add it, or set {term.settings} to 0 to train without"
            )
        else:
            warnings.append(f"no system has {files}: {term.settings} have no effect")

    alternatives = [term.labels for term in loss.terms]
    needed = " or ".join(" + ".join(sorted(labels)) for labels in alternatives)
    for name, labels in labels_of.items():
        if not any(alternative <= labels for alternative in alternatives):
            errors.append(
                f"system {name} has no label that the loss compares with: its terms need {needed}, "
                f"it has {', '.join(sorted(labels)) or 'none'}; "
                "leave it out or change the prefactors"
            )
    return LabelCheck(warnings=tuple(warnings), errors=tuple(errors))


def _first_three(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 3 else [*names[:3], "…"])
