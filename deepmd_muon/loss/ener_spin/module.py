"""The `ener_spin` loss: the `ener` loss, and the errors of magnetic forces."""

from __future__ import annotations

import torch
from torch import Tensor

from deepmd_muon.loss.ener.module import Counted, EnergyLoss, Prediction, TermValue
from deepmd_muon.loss.ener_spin.settings import EnerSpinLossSettings
from deepmd_muon.loss.interface import ComparedAtoms, Labels, Term


class SpinEnergyLoss:
    """Weighted errors of energy, force, magnetic force and virial.

    The terms without magnetic forces are those of `EnergyLoss`; its force is called fr here. The
    term fm is ⟨ΔM²⟩, or ⟨|ΔM|⟩ with `mae`. ⟨⟩ is the mean over the components of all magnetic atoms
    of the batch. It is 0 in a batch without any.

    Parameters
    ----------
    settings
        The section `loss`.
    type_map
        Names of the types by number.
    """

    def __init__(self, settings: EnerSpinLossSettings, type_map: tuple[str, ...]) -> None:
        self.settings = settings
        others = settings.without_magnetic
        self._others = None if others is None else EnergyLoss(others, type_map)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms that count."""
        terms = [
            term._replace(
                metric=_renamed(term.metric), settings=term.settings.replace("_pref_f", "_pref_fr")
            )
            if term.metric.endswith("_f")
            else term
            for term in (self._others.terms if self._others else ())
        ]
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
        return self.settings.has_magnetic or (self._others is not None and self._others.needs_force)

    @property
    def needs_virial(self) -> bool:
        """Whether the model has to predict the virial."""
        return self._others is not None and self._others.needs_virial

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
        if self._others is None:
            # Connected to the parameters, so that backward works on every rank.
            loss = 0.0 * prediction["energy"].sum()
        else:
            loss, metrics = self._others(prediction, label, lr_fraction, atoms)
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
        # Instead of `atoms.mask`, which has the atoms that the other terms compare.
        magnetic_atoms = ComparedAtoms(atoms.atype, prediction["mask_mag"])
        counted = Counted.of(prediction["energy"], label, magnetic_atoms)
        counted = counted.with_label(label.get("find_force_mag"))
        force = prediction["force_mag"]
        error = target.reshape(force.shape) - force
        if self.settings.loss_func == "mae":
            return counted.term_over_atoms(error.abs())
        square = counted.term_over_atoms(error * error)
        return TermValue(square.loss, square.error.sqrt())


def _renamed(metric: str) -> str:
    """Return the name of a metric of `EnergyLoss` in this loss."""
    return f"{metric}r" if metric.endswith("_f") else metric
