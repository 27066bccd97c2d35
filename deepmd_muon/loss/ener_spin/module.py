"""The `ener_spin` loss: the `ener` loss, and the errors of magnetic forces."""

from __future__ import annotations

import torch
from torch import Tensor

from deepmd_muon.loss.ener.module import Counted, EnergyLoss, Prediction, TermValue
from deepmd_muon.loss.ener_spin.settings import EnerSpinLossSettings
from deepmd_muon.loss.interface import ComparedAtoms, Labels, Term


class SpinEnergyLoss:
    """Weighted errors of energy, force, magnetic force and virial.

    The terms without magnetic forces are those of `EnergyLoss`; its term f is called fr here. The
    term fm is ⟨ΔM²⟩, or ⟨|ΔM|⟩ with `mae`, where M are magnetic forces and ⟨⟩ is the mean over the
    components of all magnetic atoms of the batch. It is 0 in a batch without any.

    Parameters
    ----------
    settings
        The section `loss`.
    type_map
        Names of the types by number.
    """

    def __init__(self, settings: EnerSpinLossSettings, type_map: tuple[str, ...]) -> None:
        self.settings = settings
        ener = settings.without_magnetic
        self._ener = None if ener is None else EnergyLoss(ener, type_map)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms that count."""
        terms = []
        for term in self._ener.terms if self._ener else ():
            if term.metric.endswith("_f"):
                settings = term.settings.replace("_pref_f", "_pref_fr")
                term = term._replace(metric=_renamed(term.metric), settings=settings)
            terms.append(term)
        if self.settings.has_magnetic:
            magnetic = Term(
                metric=self._magnetic_metric,
                labels=frozenset({"force_mag"}),
                settings="loss/start_pref_fm and loss/limit_pref_fm",
            )
            terms.append(magnetic)
        return tuple(terms)

    @property
    def needs_force(self) -> bool:
        """Whether the model has to predict forces."""
        return self.settings.has_magnetic or (self._ener is not None and self._ener.needs_force)

    @property
    def needs_virial(self) -> bool:
        """Whether the model has to predict the virial."""
        return self._ener is not None and self._ener.needs_virial

    @property
    def _magnetic_metric(self) -> str:
        """Name of the error of magnetic forces."""
        return "rmse_fm" if self.settings.loss_func == "mse" else "mae_fm"

    def __call__(
        self,
        prediction: Prediction,
        label: Labels,
        lr_fraction: float | Tensor,
        atoms: ComparedAtoms,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics, see `Loss`.

        `prediction` further has `force_mag (nframes, natoms, 3)` and `mask_mag (nframes, natoms)`,
        `label` has `force_mag`.
        """
        metrics: dict[str, Tensor] = {}
        if self._ener is None:
            # Connected to the parameters, so that backward works on every rank.
            loss = 0.0 * prediction["energy"].sum()
        else:
            loss, metrics = self._ener(prediction, label, lr_fraction, atoms)
            metrics = {_renamed(name): error for name, error in metrics.items()}
        if self.settings.has_magnetic:
            magnetic = self._magnetic_force(prediction, label, atoms)
            if magnetic is None:
                metrics[self._magnetic_metric] = loss.new_full((), torch.nan).detach()
            else:
                limit = self.settings.limit_pref_fm
                prefactor = limit + (self.settings.start_pref_fm - limit) * lr_fraction
                loss = loss + prefactor * magnetic.loss
                metrics[self._magnetic_metric] = magnetic.error.detach()
        metrics["rmse"] = loss.detach().sqrt()
        return loss, metrics

    def _magnetic_force(
        self, prediction: Prediction, label: Labels, atoms: ComparedAtoms
    ) -> TermValue | None:
        """Compare the magnetic forces of magnetic atoms; None without their label."""
        target = label.get("force_mag")
        if target is None:
            return None
        # The mask of `atoms` is for the other terms.
        magnetic_atoms = atoms._replace(mask=prediction["mask_mag"])
        counted = Counted.of(prediction["energy"], label, magnetic_atoms)
        counted = counted.with_label(label.get("find_force_mag"))
        force = prediction["force_mag"]
        error = target.reshape(force.shape) - force
        if self.settings.loss_func == "mae":
            return counted.term_over_atoms(error.abs())
        square = counted.term_over_atoms(error * error)
        return TermValue(square.loss, square.error.sqrt())


def _renamed(metric: str) -> str:
    """Return the name of a metric of `EnergyLoss` in this loss: rmse_f becomes rmse_fr."""
    return f"{metric}r" if metric.endswith("_f") else metric
