"""Section `loss` of type `ener_spin`: which errors count, and how much; torch-free."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from deepmd_muon.loss.ener.settings import (
    EnerLossSettings,
    counts,
    limit_prefactor,
    some_term,
    start_prefactor,
)
from deepmd_muon.loss.settings import LossSettings, Quantity
from deepmd_muon.section import Foreign, Rule
from deepmd_muon.setting import Needs, setting

_PREFACTORS = tuple(
    f"{end}_pref_{term}" for term in ("e", "fr", "fm", "v", "ae") for end in ("start", "limit")
)
_MAGNETIC = "magnetic force (force_mag.npy)"


@dataclasses.dataclass(frozen=True)
class EnerSpinLossSettings(LossSettings):
    """Errors of a model that reads spins; prefactors follow the learning rate."""

    type: ClassVar[str] = "ener_spin"
    needs_spins: ClassVar[bool] = True

    start_pref_e: float = start_prefactor(0.02, "e", "energy")
    limit_pref_e: float = limit_prefactor(1.0, "e", "energy")
    start_pref_fr: float = start_prefactor(1000.0, "fr", "force")
    limit_pref_fr: float = limit_prefactor(1.0, "fr", "force")
    start_pref_fm: float = start_prefactor(10000.0, "fm", _MAGNETIC)
    limit_pref_fm: float = limit_prefactor(10.0, "fm", _MAGNETIC)
    start_pref_v: float = start_prefactor(0.0, "v", "virial")
    limit_pref_v: float = limit_prefactor(0.0, "v", "virial")
    start_pref_ae: float = start_prefactor(0.0, "ae", "atomic energy (atom_ener.npy)")
    limit_pref_ae: float = limit_prefactor(0.0, "ae", "atomic energy (atom_ener.npy)")
    loss_func: Literal["mse", "mae"] = setting(
        "mse", doc="Mean squared ('mse') or mean absolute ('mae') errors."
    )
    intensive_ener_virial: bool = setting(
        False,
        needs=(
            Needs(("loss_func",), lambda loss_func: loss_func == "mse", "loss_func 'mse'"),
            counts("e", "v"),
        ),
        doc=(
            "Divide the squared errors of energy and virial by the squared number of atoms instead "
            "of the number."
        ),
    )

    rules: ClassVar[tuple[Rule, ...]] = (Rule(_PREFACTORS, some_term),)
    foreign: ClassVar[dict[str, Foreign]] = {
        # deepmd-kit accepts these and reads none of them.
        "start_pref_pf": Foreign("a force term with atomic prefactors", (0,)),
        "limit_pref_pf": Foreign("a force term with atomic prefactors", (0,)),
        "relative_f": Foreign("relative errors of forces", (None,)),
        "enable_atom_ener_coeff": Foreign("coefficients of atomic energies", (False,)),
    }

    @property
    def without_magnetic(self) -> EnerLossSettings | None:
        """The terms without the magnetic force; None if only that counts."""
        if not any(map(self._has, ("e", "fr", "v", "ae"))):
            return None
        return EnerLossSettings(
            start_pref_e=self.start_pref_e,
            limit_pref_e=self.limit_pref_e,
            start_pref_f=self.start_pref_fr,
            limit_pref_f=self.limit_pref_fr,
            start_pref_v=self.start_pref_v,
            limit_pref_v=self.limit_pref_v,
            start_pref_ae=self.start_pref_ae,
            limit_pref_ae=self.limit_pref_ae,
            loss_func=self.loss_func,
            intensive_ener_virial=self.intensive_ener_virial,
        )

    @property
    def has_magnetic(self) -> bool:
        """Whether the magnetic force counts."""
        return self._has("fm")

    def _has(self, term: str) -> bool:
        """Return whether a term counts."""
        return bool(getattr(self, f"start_pref_{term}") and getattr(self, f"limit_pref_{term}"))

    def obstacle_to(self, quantity: Quantity) -> str | None:
        """Return why training does not lower the error of a quantity, None if it does."""
        ener = self.without_magnetic
        if ener is None:
            return "needs a term besides the magnetic force"
        obstacle = ener.obstacle_to(quantity)
        return obstacle and obstacle.replace("_pref_f ", "_pref_fr ")
