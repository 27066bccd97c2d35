"""The `ener` loss: energy, force, virial, atomic energy and prefactored force, as DeePMD weighs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch

Term = Literal["e", "f", "v", "ae", "pf"]
Labels = Mapping[str, torch.Tensor | None]


_Found: TypeAlias = tuple[torch.Tensor, torch.Tensor] | None
"""Contribution to the loss and the error to report, or None without a label."""


class LossError(ValueError):
    """The settings of a loss contradict each other, or a batch lacks what they need."""


class _Atoms(NamedTuple):
    """How many atoms divide what: 1/N per frame, the mask of real atoms and their number in the batch."""

    per_atom: torch.Tensor | float
    mask: torch.Tensor | None

    def mean(self, error: torch.Tensor) -> torch.Tensor:
        """Mean of `(nframes, natoms, components)` over the real atoms of the batch."""
        if self.mask is None:
            return error.mean()
        mask = self.mask.to(error.dtype).unsqueeze(-1)
        return (error * mask).sum() / (mask.sum() * error.shape[-1])


def _huber(error: torch.Tensor, delta: float) -> torch.Tensor:
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error * error, delta * (size - 0.5 * delta))


@dataclass(frozen=True)
class EnergyLoss:
    """Weighted errors of energy, force and virial; settings carry the names of the input's `loss` section.

    A term counts when both its prefactors are above 0, as in DeePMD; its weight is
    limit + (start − limit)·lr/start_lr. Per frame of N atoms, with ⟨⟩ the mean over frames, components or atoms:

    - `mse`: e ⟨ΔE²⟩/N, f ⟨ΔF²⟩, v ⟨ΔW²⟩/N (with `intensive_ener_virial` 1/N² in both), ae ⟨ΔE_i²⟩, pf ⟨p_i ΔF²⟩
    - `mae`: e ⟨|ΔE|⟩/N, f ⟨|ΔF|⟩, v ⟨|ΔW|⟩/N, ae ⟨|ΔE_i|⟩, pf ⟨p_i |ΔF|⟩
    - `use_huber` (with `mse`): the Huber function of ΔE/N, ΔF, ΔW/N, ΔE_i

    `f_use_norm` takes |ΔF_i| of an atom in place of its components, `relative_f` divides ΔF_i by
    |F_i| + `relative_f`, `enable_atom_ener_coeff` compares Σ c_i E_i in place of the energy.

    Raises
    ------
    LossError
        When settings exclude each other.
    """

    start_pref_e: float = 0.02
    limit_pref_e: float = 1.0
    start_pref_f: float = 1000.0
    limit_pref_f: float = 1.0
    start_pref_v: float = 0.0
    limit_pref_v: float = 0.0
    start_pref_ae: float = 0.0
    limit_pref_ae: float = 0.0
    start_pref_pf: float = 0.0
    limit_pref_pf: float = 0.0
    use_default_pf: bool = False
    relative_f: float | None = None
    enable_atom_ener_coeff: bool = False
    loss_func: Literal["mse", "mae"] = "mse"
    f_use_norm: bool = False
    use_huber: bool = False
    huber_delta: float | tuple[float, ...] = 0.01
    intensive_ener_virial: bool = False

    def __post_init__(self) -> None:
        if self.loss_func not in ("mse", "mae"):
            raise LossError(f"loss_func must be 'mse' or 'mae', found {self.loss_func!r}")
        if self.use_huber and (self.loss_func == "mae" or self.has("pf") or self.relative_f is not None):
            raise LossError("use_huber goes with loss_func 'mse', without relative_f and atomic prefactors")
        if self.f_use_norm and not (self.use_huber or self.loss_func == "mae"):
            raise LossError("f_use_norm needs loss_func 'mae' or use_huber")
        if not isinstance(self.huber_delta, (int, float)) and len(self.huber_delta) != 3:
            raise LossError(f"huber_delta is one number or three (energy, force, virial), found {self.huber_delta}")

    def has(self, term: Term) -> bool:
        """Whether a term counts."""
        return bool(getattr(self, f"start_pref_{term}") and getattr(self, f"limit_pref_{term}"))

    @property
    def needs_force(self) -> bool:
        """Whether the model has to predict forces."""
        return self.has("f") or self.has("pf")

    @property
    def needs_virial(self) -> bool:
        """Whether the model has to predict the virial."""
        return self.has("v")

    def prefactor(self, term: Term, lr_fraction: float | torch.Tensor) -> float | torch.Tensor:
        """Weight of a term when the learning rate is `lr_fraction` of its start."""
        start: float = getattr(self, f"start_pref_{term}")
        limit: float = getattr(self, f"limit_pref_{term}")
        return limit + (start - limit) * lr_fraction

    def __call__(
        self,
        prediction: Mapping[str, torch.Tensor],
        label: Labels,
        lr_fraction: float | torch.Tensor,
        natoms: int,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compare a prediction with its labels; nothing is read back from the device.

        Parameters
        ----------
        prediction
            `energy (nframes,)`, `atom_energy (nframes, natoms)` [eV], `force (nframes, natoms, 3)` [eV/Å],
            `virial (nframes, 9)` [eV]; only what the terms need.
        label
            The same quantities as `energy`, `force`, `virial`, `atom_ener`, further `atom_pref` and
            `atom_ener_coeff (nframes, natoms)`. Missing or None contributes nothing.
        lr_fraction
            lr/start_lr.
        natoms
            Atoms in a frame.
        mask
            True for real atoms `(nframes, natoms)` when frames carry padding.

        Returns
        -------
        tuple
            The loss, and detached errors to report: `rmse_e` and `rmse_v` per atom, `rmse_f`, `rmse_ae`, `rmse_pf`
            (`mae_…` with `loss_func` "mae"), NaN where a label is missing, and `rmse`, the root of the loss.
        """
        real = None if mask is None else mask.sum(1).to(torch.float64)
        atoms = _Atoms(1.0 / natoms if real is None else 1.0 / real, mask)
        energy = prediction["energy"]
        loss = energy.new_zeros(())
        metrics: dict[str, torch.Tensor] = {}
        terms: dict[Term, Callable[[Mapping[str, torch.Tensor], Labels, _Atoms], _Found]] = {
            "e": self._energy,
            "f": self._force,
            "pf": self._prefactored,
            "v": self._virial,
            "ae": self._atomic,
        }
        for term, compare in terms.items():
            if not self.has(term):
                continue
            found = compare(prediction, label, atoms)
            name = f"{'rmse' if self.loss_func == 'mse' else 'mae'}_{term}"
            if found is None:
                metrics[name] = energy.new_full((), torch.nan)
                continue
            value, shown = found
            loss = loss + self.prefactor(term, lr_fraction) * value
            metrics[name] = shown.detach()
        metrics["rmse"] = loss.detach().sqrt()
        return loss, metrics

    def _delta(self, index: int) -> float:
        if isinstance(self.huber_delta, (int, float)):
            return float(self.huber_delta)
        return float(self.huber_delta[index])

    def _energy(self, prediction: Mapping[str, torch.Tensor], label: Labels, atoms: _Atoms) -> _Found:
        wanted = label.get("energy")
        if wanted is None:
            return None
        energy = prediction["energy"]
        weights = label.get("atom_ener_coeff")
        if self.enable_atom_ener_coeff and weights is not None:
            energy = (weights * prediction["atom_energy"]).sum(1)
        return self._per_frame((energy - wanted.reshape(energy.shape)).unsqueeze(1), atoms, self._delta(0))

    def _virial(self, prediction: Mapping[str, torch.Tensor], label: Labels, atoms: _Atoms) -> _Found:
        wanted = label.get("virial")
        if wanted is None:
            return None
        virial = prediction["virial"]
        return self._per_frame(virial - wanted.reshape(virial.shape), atoms, self._delta(2))

    def _per_frame(self, error: torch.Tensor, atoms: _Atoms, delta: float) -> _Found:
        """Error `(nframes, components)` of a quantity that grows with the number of atoms."""
        per_atom = atoms.per_atom
        if isinstance(per_atom, torch.Tensor):
            per_atom = per_atom.unsqueeze(1)
        scaled = error * per_atom
        if self.loss_func == "mae":
            value = scaled.abs().mean()
            return value, value
        square = (scaled * scaled).mean()
        if self.use_huber:
            return _huber(scaled, delta).mean(), square.sqrt()
        return (square if self.intensive_ener_virial else (scaled * error).mean()), square.sqrt()

    def _force_error(self, prediction: Mapping[str, torch.Tensor], label: Labels) -> torch.Tensor | None:
        wanted = label.get("force")
        if wanted is None:
            return None
        wanted = wanted.reshape(prediction["force"].shape)
        error = wanted - prediction["force"]
        if self.relative_f is not None:
            error = error / (torch.linalg.vector_norm(wanted, dim=-1, keepdim=True) + self.relative_f)
        return error

    def _force(self, prediction: Mapping[str, torch.Tensor], label: Labels, atoms: _Atoms) -> _Found:
        error = self._force_error(prediction, label)
        if error is None:
            return None
        size = torch.linalg.vector_norm(error, dim=-1, keepdim=True) if self.f_use_norm else error
        if self.loss_func == "mae":
            value = atoms.mean(size.abs())
            return value, value
        square = atoms.mean(error * error)
        return (atoms.mean(_huber(size, self._delta(1))) if self.use_huber else square), square.sqrt()

    def _prefactored(self, prediction: Mapping[str, torch.Tensor], label: Labels, atoms: _Atoms) -> _Found:
        error = self._force_error(prediction, label)
        weights = label.get("atom_pref")
        if error is None or (weights is None and not self.use_default_pf):
            return None
        power = error.abs() if self.loss_func == "mae" else error * error
        value = atoms.mean(power if weights is None else power * weights.reshape(error.shape[:2]).unsqueeze(-1))
        return value, value if self.loss_func == "mae" else value.sqrt()

    def _atomic(self, prediction: Mapping[str, torch.Tensor], label: Labels, atoms: _Atoms) -> _Found:
        wanted = label.get("atom_ener")
        if wanted is None:
            return None
        energy = prediction["atom_energy"]
        error = (wanted.reshape(energy.shape) - energy).unsqueeze(-1)
        if self.loss_func == "mae":
            value = atoms.mean(error.abs())
            return value, value
        square = atoms.mean(error * error)
        return (atoms.mean(_huber(error, self._delta(0))) if self.use_huber else square), square.sqrt()
