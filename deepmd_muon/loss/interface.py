"""The interface between the trainer and a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Labels: TypeAlias = "Mapping[str, Tensor | None]"


class ComparedAtoms(NamedTuple):
    """The atoms of the frames that a loss compares.

    Attributes
    ----------
    atype
        Types `(nframes, natoms)`, int64: positions in the type map, −1 for padding.
    mask
        True for atoms that count `(nframes, natoms)`: real atoms of types with an energy. None if
        all count.
    """

    atype: Tensor
    mask: Tensor | None = None

    @property
    def natoms(self) -> int:
        """Atoms in a frame, padding included."""
        return self.atype.shape[1]


class Term(NamedTuple):
    """A part of a loss that compares one quantity.

    Attributes
    ----------
    metric
        Name of its error among the metrics, a column of `lcurve.out`. Errors of several batches are
        averaged as squares where the name begins with "rmse", else as they are.
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
    """A loss; a registered class follows this protocol, and is built as `cls(settings, type_map)`.

    `settings` is the frozen dataclass of its section, `type_map` the names of the types by number.
    """

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
        atoms: ComparedAtoms,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compare a prediction with its labels.

        A captured step records the call: it must neither read from the device nor copy tensors from
        the host.

        Parameters
        ----------
        prediction
            `energy (nframes,)` and `atom_energy (nframes, natoms)` [eV], and if needed
            `force (nframes, natoms, 3)` [eV/Å] and `virial (nframes, 9)` [eV]. Models that read
            spins add `force_mag (nframes, natoms, 3)` and `mask_mag (nframes, natoms)`, true for
            magnetic atoms.
        label
            The same quantities as `energy`, `force`, `force_mag`, `virial`, `atom_ener`, further
            `atom_pref` and `atom_ener_coeff (nframes, natoms)`, and `weight (nframes,)`, which
            multiplies what a frame adds to the loss. Missing or None contributes nothing. Where
            only some frames have a label, `find_energy` etc., bool (nframes,), says which: the
            others have no weight in its term, but must hold finite numbers.
        lr_fraction
            lr/start_lr.
        atoms
            Their types, and which of them count.

        Returns
        -------
        tuple
            The loss, and detached metrics: the error of each term under its name, NaN where a label
            is missing, and `rmse`, the root of the loss. Without any label the loss is 0 and so is
            its gradient.
        """
