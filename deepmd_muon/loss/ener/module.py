"""The `ener` loss in torch's operations, which define the results of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from deepmd_muon.coverage import Coverage
from deepmd_muon.loss.ener.settings import LABELS, EnerLossSettings, Name
from deepmd_muon.loss.interface import ComparedAtoms, Labels, Term
from deepmd_muon.model.nn import triton_support

Prediction: TypeAlias = Mapping[str, Tensor]

# ----- when the kernels are used -----------------------------------------------------------------

# One program adds up all errors. With more force components, torch's many programs are faster.
_MOST_COMPONENTS = 1 << 16
_KERNEL_TERMS = frozenset({"e", "f", "v"})
#: Settings that the kernels read, or that change only terms which they do not have.
KERNEL_COVERAGE = Coverage(
    frozenset(
        {
            *(f"{end}_pref_{term}" for term in ("e", "f", "v") for end in ("start", "limit")),
            *(f"{end}_pref_{term}" for term in ("ae", "pf") for end in ("start", "limit")),
            "intensive_ener_virial",
            "enable_atom_ener_coeff",  # acts where a batch has the coefficients
            "use_default_pf",
            "huber_delta",  # acts with `use_huber`, which is not covered
        }
    ),
    {"loss_func": ("mse",), "use_huber": (False,), "f_use_norm": (False,), "relative_f": (None,)},
)


# ----- means over the frames and atoms that count ------------------------------------------------


class TermValue(NamedTuple):
    """What a term contributes to the loss before its prefactor, and the error that is reported."""

    loss: Tensor
    error: Tensor


class Counted(NamedTuple):
    """The frames and atoms that a mean counts.

    Attributes
    ----------
    per_atom
        1/N of each frame `(nframes,)`; a number if all frames have N atoms.
    atoms
        Types of all atoms, and the mask of those that count.
    frames
        True for frames that have the label `(nframes,)`; None for all.
    weights
        Weights of all frames in the loss `(nframes,)`; None if all are 1. Errors that are shown
        have none.
    """

    per_atom: Tensor | float
    atoms: ComparedAtoms
    frames: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, energy: Tensor, label: Labels, atoms: ComparedAtoms) -> Counted:
        """Return the atoms and frames of a batch with energies `(nframes,)`."""
        per_atom: Tensor | float = 1.0 / atoms.natoms
        if atoms.mask is not None:
            per_atom = 1.0 / atoms.mask.sum(1).to(torch.float64).clamp(min=1.0)
        weights = label.get("weight")
        if weights is not None:
            has_weight = label.get("find_weight")
            if has_weight is not None:
                weights = torch.where(has_weight, weights, 1.0)
            weights = weights.reshape(energy.shape)
        return cls(per_atom=per_atom, atoms=atoms, weights=weights)

    def with_label(self, frames: Tensor | None) -> Counted:
        """Return the same atoms, of these frames."""
        return self._replace(frames=frames)

    @property
    def is_everything(self) -> bool:
        """Whether all atoms of all frames count alike."""
        return self.frames is None and self.atoms.mask is None and self.weights is None

    def weigh(self, values: Tensor) -> Tensor:
        """Multiply the values of each frame by its weight."""
        if self.weights is None:
            return values
        return values * self.weights.reshape(-1, *(1 for _ in values.shape[1:]))

    def mean_over_atoms(self, values: Tensor) -> Tensor:
        """Return the mean of `(nframes, natoms, components)`."""
        mask = self.atoms.mask
        if self.frames is None:
            return values.mean() if mask is None else _weighted_mean(values, mask)
        frames = self.frames.unsqueeze(1)  # (nframes, 1)
        if mask is None:
            return _weighted_mean(values, frames.expand(values.shape[:2]))
        return _weighted_mean(values, frames & mask)

    def mean_over_frames(self, values: Tensor) -> Tensor:
        """Return the mean of `(nframes, components)`."""
        return values.mean() if self.frames is None else _weighted_mean(values, self.frames)

    def term_over_atoms(self, values: Tensor) -> TermValue:
        """Return the mean of `(nframes, natoms, components)`, weighted for the loss."""
        error = self.mean_over_atoms(values)
        loss = error if self.weights is None else self.mean_over_atoms(self.weigh(values))
        return TermValue(loss, error)

    def term_over_frames(self, values: Tensor) -> TermValue:
        """Return the mean of `(nframes, components)`, weighted for the loss."""
        error = self.mean_over_frames(values)
        loss = error if self.weights is None else self.mean_over_frames(self.weigh(values))
        return TermValue(loss, error)


def _weighted_mean(values: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of the elements that count; `counts` lacks the last axis of `values`."""
    weight = counts.to(values.dtype).unsqueeze(-1)
    # If no frame has the label, nothing counts: 0, not 0/0.
    number = (weight.sum() * values.shape[-1]).clamp(min=1.0)
    return (values * weight).sum() / number


def _frames_with_both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the frames that have two labels; None stands for all frames."""
    if one is None:
        return other
    return one if other is None else one & other


def _huber(error: Tensor, delta: float) -> Tensor:
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error * error, delta * (size - 0.5 * delta))


# ----- the loss ----------------------------------------------------------------------------------


class EnergyLoss:
    """Weighted errors of energy, force and virial.

    A term counts when both its prefactors are above 0, as in DeePMD; its weight is
    limit + (start − limit)·lr/start_lr. Per frame of N atoms, with ⟨⟩ the mean over frames,
    components or atoms:

    - `mse`: e ⟨ΔE²⟩/N, f ⟨ΔF²⟩, v ⟨ΔW²⟩/N (with `intensive_ener_virial` 1/N² in both),
      ae ⟨ΔE_i²⟩, pf ⟨p_i ΔF²⟩
    - `mae`: e ⟨|ΔE|⟩/N, f ⟨|ΔF|⟩, v ⟨|ΔW|⟩/N, ae ⟨|ΔE_i|⟩, pf ⟨p_i |ΔF|⟩
    - `use_huber` (with `mse`): the Huber function of ΔE/N, ΔF, ΔW/N, ΔE_i

    The errors of a frame are multiplied by its weight, if it has one (label `weight`); ⟨⟩ divides by
    the number of frames, not by the sum of weights. Errors that are shown have no weights.

    `f_use_norm` takes |ΔF_i| of an atom instead of its components, `relative_f` divides ΔF_i by
    |F_i| + `relative_f`, `enable_atom_ener_coeff` compares Σ c_i E_i instead of the energy.

    Parameters
    ----------
    settings
        The section `loss`.
    type_map
        Names of the types by number; the terms treat all types alike.
    """

    def __init__(self, settings: EnerLossSettings, type_map: tuple[str, ...]) -> None:
        self.settings = settings
        self.type_map = type_map
        # Every step reads these two.
        self._active = settings.names
        self._covered_by_kernels = _KERNEL_TERMS.issuperset(
            settings.names
        ) and not KERNEL_COVERAGE.uncovered(settings)
        # In this order the terms are summed and the columns of lcurve.out written.
        compare: dict[Name, Callable[[Prediction, Labels, Counted], TermValue | None]] = {
            "e": self._energy,
            "f": self._force,
            "pf": self._prefactored_force,
            "v": self._virial,
            "ae": self._atomic_energy,
        }
        self._compare = {term: compare[term] for term in compare if term in self._active}

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms that count."""
        return tuple(
            Term(
                metric=self._metric(term),
                labels=self.settings.needed_labels(term),
                settings=f"loss/start_pref_{term} and loss/limit_pref_{term}",
                essential=term == "e",
            )
            for term in self._active
        )

    @property
    def needs_force(self) -> bool:
        """Whether the model has to predict forces."""
        return "f" in self._active or "pf" in self._active

    @property
    def needs_virial(self) -> bool:
        """Whether the model has to predict the virial."""
        return "v" in self._active

    def __call__(
        self,
        prediction: Prediction,
        label: Labels,
        lr_fraction: float | Tensor,
        atoms: ComparedAtoms,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics, see `Loss`; on a GPU the usual loss is one kernel.

        Metrics are `rmse_e` and `rmse_v` per atom, `rmse_f`, `rmse_ae`, `rmse_pf`, or `mae_…`, and
        `rmse`.
        """
        if (
            isinstance(lr_fraction, Tensor)
            and triton_support.usable(prediction["energy"].device)
            and self.fits_kernels(prediction, label)
        ):
            from deepmd_muon.loss.ener import kernels

            return kernels.evaluate(self.settings, prediction, label, lr_fraction, atoms)
        return self.compare(prediction, label, lr_fraction, atoms)

    def fits_kernels(self, prediction: Prediction, labels: Labels) -> bool:
        """Return whether the kernels have all terms and settings of the loss, and are faster."""
        if not self._covered_by_kernels or labels.get("weight") is not None:
            return False
        if self.settings.enable_atom_ener_coeff and labels.get("atom_ener_coeff") is not None:
            return False
        quantities = [LABELS[term] for term in self._active]
        if any(labels.get(quantity) is None for quantity in quantities):
            return False
        return max(prediction[quantity].numel() for quantity in quantities) <= _MOST_COMPONENTS

    def compare(
        self,
        prediction: Prediction,
        label: Labels,
        lr_fraction: float | Tensor,
        atoms: ComparedAtoms,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics by torch's operations."""
        energy = prediction["energy"]
        counted = Counted.of(energy, label, atoms)
        loss: Tensor | None = None
        metrics: dict[str, Tensor] = {}
        for term, compare in self._compare.items():
            value = compare(prediction, label, counted)
            if value is None:  # no label
                metrics[self._metric(term)] = energy.new_full((), torch.nan)
                continue
            weighted = self._prefactor(term, lr_fraction) * value.loss
            loss = weighted if loss is None else loss + weighted
            metrics[self._metric(term)] = value.error.detach()
        if loss is None:
            # Connected to the parameters, so that backward works on every rank.
            loss = 0.0 * energy.sum()
        metrics["rmse"] = loss.detach().sqrt()
        return loss, metrics

    def _metric(self, term: Name) -> str:
        prefix = "rmse" if self.settings.loss_func == "mse" else "mae"
        return f"{prefix}_{term}"

    def _prefactor(self, term: Name, lr_fraction: float | Tensor) -> float | Tensor:
        """Return the weight of a term when the learning rate is `lr_fraction` of its start."""
        start: float = getattr(self.settings, f"start_pref_{term}")
        limit: float = getattr(self.settings, f"limit_pref_{term}")
        return limit + (start - limit) * lr_fraction

    def _huber_delta(self, quantity: int) -> float:
        """Return where the Huber function of energy (0), force (1) or virial (2) turns linear."""
        delta = self.settings.huber_delta
        return float(delta[quantity] if isinstance(delta, tuple) else delta)

    # ----- one method a term ---------------------------------------------------------------------

    def _energy(self, prediction: Prediction, label: Labels, counted: Counted) -> TermValue | None:
        target = label.get("energy")
        if target is None:
            return None
        energy = prediction["energy"]
        coefficients = label.get("atom_ener_coeff")
        if self.settings.enable_atom_ener_coeff and coefficients is not None:
            weighted_sum = (coefficients * prediction["atom_energy"]).sum(1)
            has_coefficients = label.get("find_atom_ener_coeff")
            if has_coefficients is None:
                energy = weighted_sum
            else:
                energy = torch.where(has_coefficients, weighted_sum, energy)
        return self._extensive(
            energy.unsqueeze(1),
            target.reshape(energy.shape).unsqueeze(1),
            counted.with_label(label.get("find_energy")),
            delta=self._huber_delta(0),
        )

    def _virial(self, prediction: Prediction, label: Labels, counted: Counted) -> TermValue | None:
        target = label.get("virial")
        if target is None:
            return None
        virial = prediction["virial"]
        return self._extensive(
            virial,
            target.reshape(virial.shape),
            counted.with_label(label.get("find_virial")),
            delta=self._huber_delta(2),
        )

    def _extensive(
        self, predicted: Tensor, target: Tensor, counted: Counted, *, delta: float
    ) -> TermValue:
        """Compare a quantity `(nframes, components)` that grows with the number of atoms."""
        per_atom = counted.per_atom
        intensive = self.settings.intensive_ener_virial
        is_plain = self.settings.is_plain and counted.frames is None and counted.weights is None
        if is_plain and isinstance(per_atom, float):
            # The usual case in three kernels.
            mean = mse_loss(predicted, target)
            loss = mean * (per_atom * per_atom if intensive else per_atom)
            return TermValue(loss, mean.detach().sqrt() * per_atom)
        error = predicted - target
        if isinstance(per_atom, Tensor):
            per_atom = per_atom.unsqueeze(1)  # (nframes, 1)
        error_per_atom = error * per_atom
        if self.settings.loss_func == "mae":
            return counted.term_over_frames(error_per_atom.abs())
        square = counted.term_over_frames(error_per_atom * error_per_atom)
        if self.settings.use_huber:
            loss = counted.mean_over_frames(counted.weigh(_huber(error_per_atom, delta)))
        elif intensive:
            loss = square.loss
        else:
            loss = counted.mean_over_frames(counted.weigh(error_per_atom * error))
        return TermValue(loss, square.error.sqrt())

    def _force(self, prediction: Prediction, label: Labels, counted: Counted) -> TermValue | None:
        target = label.get("force")
        if target is None:
            return None
        counted = counted.with_label(label.get("find_force"))
        force = prediction["force"]
        is_plain = self.settings.is_plain and self.settings.relative_f is None
        if is_plain and counted.is_everything:
            mean = mse_loss(force, target.reshape(force.shape))  # one kernel instead of three
            return TermValue(mean, mean.detach().sqrt())
        error = self._force_error(force, target)
        if self.settings.f_use_norm:
            size = torch.linalg.vector_norm(error, dim=-1, keepdim=True)
        else:
            size = error
        if self.settings.loss_func == "mae":
            return counted.term_over_atoms(size.abs())
        square = counted.term_over_atoms(error * error)
        if self.settings.use_huber:
            loss = counted.mean_over_atoms(counted.weigh(_huber(size, self._huber_delta(1))))
        else:
            loss = square.loss
        return TermValue(loss, square.error.sqrt())

    def _force_error(self, force: Tensor, target: Tensor) -> Tensor:
        """Return the errors of forces `(nframes, natoms, 3)`, relative ones if so set."""
        target = target.reshape(force.shape)
        error = target - force
        if self.settings.relative_f is None:
            return error
        length: Tensor = torch.linalg.vector_norm(target, dim=-1, keepdim=True)
        return error / (length + self.settings.relative_f)

    def _prefactored_force(
        self, prediction: Prediction, label: Labels, counted: Counted
    ) -> TermValue | None:
        target = label.get("force")
        weights = label.get("atom_pref")
        has_weights = label.get("find_atom_pref")
        if target is None or (weights is None and not self.settings.use_default_pf):
            return None
        is_mae = self.settings.loss_func == "mae"
        error = self._force_error(prediction["force"], target)
        power = error.abs() if is_mae else error * error
        if weights is not None:
            weights = weights.reshape(error.shape[:2])
            if has_weights is not None and self.settings.use_default_pf:
                # Frames without weights count with weight 1.
                weights = torch.where(has_weights.unsqueeze(1), weights, 1.0)
                has_weights = None
            power = power * weights.unsqueeze(-1)
        frames = _frames_with_both(label.get("find_force"), has_weights)
        mean = counted.with_label(frames).term_over_atoms(power)
        shown = mean.error if is_mae else mean.error.sqrt()
        if frames is not None:
            shown = torch.where(frames.any(), shown, torch.nan)
        return TermValue(mean.loss, shown)

    def _atomic_energy(
        self, prediction: Prediction, label: Labels, counted: Counted
    ) -> TermValue | None:
        target = label.get("atom_ener")
        if target is None:
            return None
        counted = counted.with_label(label.get("find_atom_ener"))
        energy = prediction["atom_energy"]
        error = (target.reshape(energy.shape) - energy).unsqueeze(-1)
        if self.settings.loss_func == "mae":
            return counted.term_over_atoms(error.abs())
        square = counted.term_over_atoms(error * error)
        if self.settings.use_huber:
            loss = counted.mean_over_atoms(counted.weigh(_huber(error, self._huber_delta(0))))
        else:
            loss = square.loss
        return TermValue(loss, square.error.sqrt())
