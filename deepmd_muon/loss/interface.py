"""The interface between the trainer and a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Labels: TypeAlias = "Mapping[str, Tensor | None]"


class Term(NamedTuple):
    """A part of a loss that compares one quantity.

    Attributes
    ----------
    metric
        Name of its error among the metrics, a column of `lcurve.out`. Errors of several batches are averaged as
        squares where the name begins with "rmse", else as they are.
    labels
        Labels without which it compares nothing; names of files of a system.
    settings
        The settings that switch it off, as messages name them.
    essential
        Whether a run needs some of its labels.
    """

    metric: str
    labels: frozenset[str]
    settings: str
    essential: bool = False


class Loss(Protocol):
    """A loss, built from its settings; a registered class follows this protocol."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms that count."""

    @property
    def needs_force(self) -> bool:
        """Whether the model has to predict forces."""

    @property
    def needs_virial(self) -> bool:
        """Whether the model has to predict the virial."""

    def __call__(
        self,
        prediction: Mapping[str, Tensor],
        label: Labels,
        lr_fraction: float | Tensor,
        natoms: int,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compare a prediction with its labels; nothing is read back from the device.

        Parameters
        ----------
        prediction
            `energy (nframes,)`, `atom_energy (nframes, natoms)` [eV], `force (nframes, natoms, 3)` [eV/Å],
            `virial (nframes, 9)` [eV]; only those that are needed.
        label
            The same quantities as `energy`, `force`, `virial`, `atom_ener`, further `atom_pref` and
            `atom_ener_coeff (nframes, natoms)`. Missing or None contributes nothing. Where only some frames have a
            label, `find_energy` etc., bool (nframes,), says which: the others have no weight in its term, but must
            hold finite numbers.
        lr_fraction
            lr/start_lr.
        natoms
            Atoms in a frame.
        mask
            True for real atoms `(nframes, natoms)` when frames carry padding.

        Returns
        -------
        tuple
            The loss, and detached metrics: the error of each term under its name, NaN where a label is missing, and
            `rmse`, the root of the loss. Without any label the loss is 0 and so is its gradient.
        """
