"""The common base of the settings of all losses; torch-free."""

from __future__ import annotations

from typing import ClassVar, Literal

from deepmd_muon.section import Section

Quantity = Literal["energy", "force", "virial"]


class LossSettings(Section):
    """Base of the section `loss` of every type."""

    #: Whether the model has to predict magnetic forces.
    needs_spins: ClassVar[bool] = False

    def obstacle_to(self, quantity: Quantity) -> str | None:
        """Return why training does not lower the error of a quantity, None if it does.

        A run that keeps its best checkpoint by this error asks for it.
        """
        return None
