"""Fitting nets: the contract between their folders and the energy model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from deepmd_muon.model.structures import Structures


class Fitting(Protocol):
    """A `torch.nn.Module`, built as `cls(settings, type_map, dim_in, mixed_types, seed)`.

    `settings` is the frozen dataclass of its section, `dim_in` the length of the descriptor;
    `mixed_types` requests one net for all types; `seed` counts if the settings have none.
    """

    def __call__(
        self, descriptor: Tensor, type_counts: tuple[int, ...], *, force: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return atomic energies `(nreal,)` [eV], float64, and dE/dD like `descriptor`.

        dE/dD is None without `force`. Atoms are sorted by type; `type_counts` says how many there
        are of each, on the host.
        """


@runtime_checkable
class Conditioned(Protocol):
    """A fitting net that may read frame and atomic parameters next to the descriptor.

    Its call takes the result of `parameters_of` as `parameters`, unless that is None.
    """

    def parameters_of(self, structures: Structures) -> Tensor | None:
        """Return the parameters of every sorted atom `(nreal, number)`; None without any.

        Raises
        ------
        ModelError
            If the batch lacks parameters that the net reads.
        """

    def set_parameter_statistics(self, name: str, mean: Tensor, deviation: Tensor) -> None:
        """Standardise the parameters "fparam" or "aparam" by these values `(number of them,)`."""
