"""The `ener` loss in torch's operations, which define the results of its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch

from deepmd_muon.coverage import Coverage
from deepmd_muon.loss.ener.settings import LABELS, EnerLossSettings, Name
from deepmd_muon.loss.interface import Labels, Term
from deepmd_muon.model.nn import triton_support

# One program adds up all errors: with more force components, torch's many programs are faster.
_MOST = 1 << 16
# The terms that the kernels have, and the settings of any value that they read or that change only other terms.
_KERNEL_TERMS = frozenset({"e", "f", "v"})
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
_Found: TypeAlias = tuple[torch.Tensor, torch.Tensor] | None
"""Contribution to the loss and the error to report, or None without a label."""


class _Counted(NamedTuple):
    """Weights of a term: 1/N of each frame, the real atoms, and the frames that have the label (None: all)."""

    per_atom: torch.Tensor | float
    mask: torch.Tensor | None
    present: torch.Tensor | None

    def mean(self, error: torch.Tensor) -> torch.Tensor:
        """Mean of `(nframes, natoms, components)` over the real atoms of the frames that count."""
        if self.present is None:
            return error.mean() if self.mask is None else _weighted_mean(error, self.mask)
        frames = self.present.unsqueeze(1)
        return _weighted_mean(
            error, frames.expand(error.shape[:2]) if self.mask is None else frames & self.mask
        )

    def mean_square(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Mean square of the difference of `(nframes, natoms, components)`, as `mean` counts."""
        if self.present is None and self.mask is None:
            return torch.nn.functional.mse_loss(found, wanted)  # fewer kernels
        error = found - wanted
        return self.mean(error * error)

    def mean_of_frames(self, error: torch.Tensor) -> torch.Tensor:
        """Mean of `(nframes, components)` over the frames that count."""
        return error.mean() if self.present is None else _weighted_mean(error, self.present)


def fits_kernels(
    settings: EnerLossSettings, prediction: Mapping[str, torch.Tensor], labels: Labels
) -> bool:
    """Return whether the kernels have all terms and settings of the loss, and the size pays."""
    terms = settings.names
    if not _covered_by_kernels(settings):
        return False
    weighted = settings.enable_atom_ener_coeff and labels.get("atom_ener_coeff") is not None
    names = [LABELS[term] for term in terms]
    given = [labels.get(name) is not None for name in names]
    return not weighted and all(given) and max(prediction[name].numel() for name in names) <= _MOST


@functools.lru_cache(maxsize=64)  # asked in every step
def _covered_by_kernels(settings: EnerLossSettings) -> bool:
    return _KERNEL_TERMS.issuperset(settings.names) and not KERNEL_COVERAGE.uncovered(settings)


def _weighted_mean(error: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean over the elements that count; `counts` lacks the last axis."""
    weight = counts.to(error.dtype).unsqueeze(-1)
    # Two labels that no frame has together count nothing: 0, not 0/0.
    return (error * weight).sum() / (weight.sum() * error.shape[-1]).clamp(min=1.0)


def _both(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Frames that count for both; None stands for all."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _huber(error: torch.Tensor, delta: float) -> torch.Tensor:
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error * error, delta * (size - 0.5 * delta))


class EnergyLoss:
    """Weighted errors of energy, force and virial.

    A term counts when both its prefactors are above 0, as in DeePMD; its weight is
    limit + (start − limit)·lr/start_lr. Per frame of N atoms, with ⟨⟩ the mean over frames, components or atoms:

    - `mse`: e ⟨ΔE²⟩/N, f ⟨ΔF²⟩, v ⟨ΔW²⟩/N (with `intensive_ener_virial` 1/N² in both), ae ⟨ΔE_i²⟩, pf ⟨p_i ΔF²⟩
    - `mae`: e ⟨|ΔE|⟩/N, f ⟨|ΔF|⟩, v ⟨|ΔW|⟩/N, ae ⟨|ΔE_i|⟩, pf ⟨p_i |ΔF|⟩
    - `use_huber` (with `mse`): the Huber function of ΔE/N, ΔF, ΔW/N, ΔE_i

    `f_use_norm` takes |ΔF_i| of an atom in place of its components, `relative_f` divides ΔF_i by
    |F_i| + `relative_f`, `enable_atom_ener_coeff` compares Σ c_i E_i in place of the energy.

    Parameters
    ----------
    settings
        The section `loss`.
    """

    def __init__(self, settings: EnerLossSettings) -> None:
        self.settings = settings
        self._active = settings.names  # read in every step

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms that count."""
        return tuple(
            Term(
                self._metric(term),
                self.settings.needed_labels(term),
                f"loss/start_pref_{term} and loss/limit_pref_{term}",
                essential=term == "e",
            )
            for term in self._active
        )

    @property
    def needs_force(self) -> bool:
        """Whether the model has to predict forces."""
        return bool({"f", "pf"} & {*self._active})

    @property
    def needs_virial(self) -> bool:
        """Whether the model has to predict the virial."""
        return "v" in self._active

    def _metric(self, term: Name) -> str:
        return f"{'rmse' if self.settings.loss_func == 'mse' else 'mae'}_{term}"

    def _prefactor(self, term: Name, lr_fraction: float | torch.Tensor) -> float | torch.Tensor:
        """Weight of a term when the learning rate is `lr_fraction` of its start."""
        start: float = getattr(self.settings, f"start_pref_{term}")
        limit: float = getattr(self.settings, f"limit_pref_{term}")
        return limit + (start - limit) * lr_fraction

    def __call__(
        self,
        prediction: Mapping[str, torch.Tensor],
        label: Labels,
        lr_fraction: float | torch.Tensor,
        natoms: int,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its metrics, see `Loss`; on a GPU the usual loss is one kernel.

        Metrics are `rmse_e` and `rmse_v` per atom, `rmse_f`, `rmse_ae`, `rmse_pf`, or `mae_…`, and `rmse`.
        """
        if (
            isinstance(lr_fraction, torch.Tensor)
            and triton_support.usable(prediction["energy"].device)
            and fits_kernels(self.settings, prediction, label)
        ):
            from deepmd_muon.loss.ener import kernels

            return kernels.evaluate(self.settings, prediction, label, lr_fraction, natoms, mask)
        return self.compare(prediction, label, lr_fraction, natoms, mask)

    def compare(
        self,
        prediction: Mapping[str, torch.Tensor],
        label: Labels,
        lr_fraction: float | torch.Tensor,
        natoms: int,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its metrics by torch's operations."""
        real = None if mask is None else mask.sum(1).to(torch.float64).clamp(min=1.0)
        every = _Counted(1.0 / natoms if real is None else 1.0 / real, mask, None)
        energy = prediction["energy"]
        loss: torch.Tensor | None = None
        metrics: dict[str, torch.Tensor] = {}
        compared = self._compare(prediction, label, every)
        for term, found in compared.items():
            name = self._metric(term)
            if found is None:
                metrics[name] = energy.new_full((), torch.nan)
                continue
            value, shown = found
            weighted = self._prefactor(term, lr_fraction) * value
            loss = weighted if loss is None else loss + weighted
            metrics[name] = shown.detach()
        if loss is None:
            loss = (
                0.0 * energy.sum()
            )  # connected to the parameters, so that backward works on every rank
        metrics["rmse"] = loss.detach().sqrt()
        return loss, metrics

    def _compare(
        self, prediction: Mapping[str, torch.Tensor], label: Labels, every: _Counted
    ) -> dict[Name, _Found]:
        """Compare the quantities of each active term."""
        terms: dict[Name, Callable[[Mapping[str, torch.Tensor], Labels, _Counted], _Found]] = {
            "e": self._energy,
            "f": self._force,
            "pf": self._prefactored,
            "v": self._virial,
            "ae": self._atomic,
        }
        return {
            term: compare(prediction, label, every)
            for term, compare in terms.items()
            if term in self._active
        }

    def _delta(self, index: int) -> float:
        if isinstance(self.settings.huber_delta, (int, float)):
            return float(self.settings.huber_delta)
        return float(self.settings.huber_delta[index])

    def _energy(
        self, prediction: Mapping[str, torch.Tensor], label: Labels, every: _Counted
    ) -> _Found:
        wanted = label.get("energy")
        if wanted is None:
            return None
        energy = prediction["energy"]
        weights = label.get("atom_ener_coeff")
        if self.settings.enable_atom_ener_coeff and weights is not None:
            weighted = (weights * prediction["atom_energy"]).sum(1)
            found = label.get("find_atom_ener_coeff")
            energy = weighted if found is None else torch.where(found, weighted, energy)
        pair = energy.unsqueeze(1), wanted.reshape(energy.shape).unsqueeze(1)
        return self._per_frame(
            *pair, every._replace(present=label.get("find_energy")), self._delta(0)
        )

    def _virial(
        self, prediction: Mapping[str, torch.Tensor], label: Labels, every: _Counted
    ) -> _Found:
        wanted = label.get("virial")
        if wanted is None:
            return None
        virial = prediction["virial"]
        pair = virial, wanted.reshape(virial.shape)
        return self._per_frame(
            *pair, every._replace(present=label.get("find_virial")), self._delta(2)
        )

    def _per_frame(
        self, found: torch.Tensor, wanted: torch.Tensor, counted: _Counted, delta: float
    ) -> _Found:
        """Compare a quantity `(nframes, components)` that grows with the number of atoms."""
        per_atom = counted.per_atom
        if (
            self.settings.is_plain
            and counted.present is None
            and not isinstance(per_atom, torch.Tensor)
        ):
            square = torch.nn.functional.mse_loss(found, wanted)
            value = square * (
                per_atom * per_atom if self.settings.intensive_ener_virial else per_atom
            )
            return value, square.detach().sqrt() * per_atom
        error = found - wanted
        if isinstance(per_atom, torch.Tensor):
            per_atom = per_atom.unsqueeze(1)
        scaled = error * per_atom
        mean = counted.mean_of_frames
        if self.settings.loss_func == "mae":
            value = mean(scaled.abs())
            return value, value
        square = mean(scaled * scaled)
        if self.settings.use_huber:
            return mean(_huber(scaled, delta)), square.sqrt()
        return (
            square if self.settings.intensive_ener_virial else mean(scaled * error)
        ), square.sqrt()

    def _force_error(
        self, prediction: Mapping[str, torch.Tensor], label: Labels
    ) -> torch.Tensor | None:
        wanted = label.get("force")
        if wanted is None:
            return None
        wanted = wanted.reshape(prediction["force"].shape)
        error = wanted - prediction["force"]
        if self.settings.relative_f is not None:
            error = error / (
                torch.linalg.vector_norm(wanted, dim=-1, keepdim=True) + self.settings.relative_f
            )
        return error

    def _force(
        self, prediction: Mapping[str, torch.Tensor], label: Labels, every: _Counted
    ) -> _Found:
        counted, wanted = every._replace(present=label.get("find_force")), label.get("force")
        if self.settings.is_plain and self.settings.relative_f is None and wanted is not None:
            square = counted.mean_square(
                prediction["force"], wanted.reshape(prediction["force"].shape)
            )
            return square, square.detach().sqrt()
        error = self._force_error(prediction, label)
        if error is None:
            return None
        mean = counted.mean
        size = (
            torch.linalg.vector_norm(error, dim=-1, keepdim=True)
            if self.settings.f_use_norm
            else error
        )
        if self.settings.loss_func == "mae":
            value = mean(size.abs())
            return value, value
        square = mean(error * error)
        return (
            mean(_huber(size, self._delta(1))) if self.settings.use_huber else square
        ), square.sqrt()

    def _prefactored(
        self, prediction: Mapping[str, torch.Tensor], label: Labels, every: _Counted
    ) -> _Found:
        error = self._force_error(prediction, label)
        weights, found = label.get("atom_pref"), label.get("find_atom_pref")
        if error is None or (weights is None and not self.settings.use_default_pf):
            return None
        power = error.abs() if self.settings.loss_func == "mae" else error * error
        if weights is not None:
            weights = weights.reshape(error.shape[:2])
            if found is not None and self.settings.use_default_pf:
                weights, found = torch.where(found.unsqueeze(1), weights, 1.0), None
            power = power * weights.unsqueeze(-1)
        present = _both(label.get("find_force"), found)
        value = every._replace(present=present).mean(power)
        shown = value if self.settings.loss_func == "mae" else value.sqrt()
        return value, shown if present is None else torch.where(present.any(), shown, torch.nan)

    def _atomic(
        self, prediction: Mapping[str, torch.Tensor], label: Labels, every: _Counted
    ) -> _Found:
        wanted = label.get("atom_ener")
        if wanted is None:
            return None
        energy = prediction["atom_energy"]
        error = (wanted.reshape(energy.shape) - energy).unsqueeze(-1)
        mean = every._replace(present=label.get("find_atom_ener")).mean
        if self.settings.loss_func == "mae":
            value = mean(error.abs())
            return value, value
        square = mean(error * error)
        return (
            mean(_huber(error, self._delta(0))) if self.settings.use_huber else square
        ), square.sqrt()
