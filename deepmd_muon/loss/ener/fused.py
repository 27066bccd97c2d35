"""The `ener` loss of a training step in one kernel, where it is the usual one; `EnergyLoss.compare` defines it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.loss.ener.settings import EnerLossSettings
from deepmd_muon.loss.interface import Labels

# One program adds up all errors: with more force components, torch's many programs are faster.
_MOST = 1 << 16
_LABELS = {"e": "energy", "f": "force", "v": "virial"}


def evaluate(
    settings: EnerLossSettings, prediction: Mapping[str, Tensor], labels: Labels, lr_fraction: Tensor, natoms: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics as `EnergyLoss.compare` does, where `fits` says so."""
    table = _table(settings, natoms, prediction["energy"].device)
    pairs = [x for term in settings.names for x in (prediction[_LABELS[term]], labels[_LABELS[term]])]
    value, errors = FusedLoss.apply(table, lr_fraction, *pairs)
    names = [*(f"rmse_{term}" for term in settings.names), "rmse"]
    return value, dict(zip(names, errors.unbind(), strict=True))


def fits(settings: EnerLossSettings, prediction: Mapping[str, Tensor], labels: Labels, mask: Tensor | None) -> bool:
    """Return whether the loss is a sum of mean squares over all atoms of all frames, of a size that pays."""
    terms = settings.names
    if not settings.is_plain or settings.relative_f is not None or mask is not None or not {*terms} <= {*_LABELS}:
        return False
    partial = any(name.startswith("find_") and label is not None for name, label in labels.items())
    weighted = settings.enable_atom_ener_coeff and labels.get("atom_ener_coeff") is not None
    names = [_LABELS[term] for term in terms]
    given = [labels.get(name) is not None for name in names]
    return not partial and not weighted and all(given) and max(prediction[name].numel() for name in names) <= _MOST


@cache  # graphs read them as long as they exist; there is one for each number of atoms
def _table(settings: EnerLossSettings, natoms: int, device: torch.device) -> Tensor:
    """Return the rows that the kernels read, one for each term."""
    rows = []
    for term in settings.names:
        limit, start = getattr(settings, f"limit_pref_{term}"), getattr(settings, f"start_pref_{term}")
        per_atom = 1.0 if term == "f" else 1.0 / natoms
        rows.append(
            [limit, start - limit, per_atom * per_atom if settings.intensive_ener_virial else per_atom, per_atom]
        )
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(device)


class FusedLoss(torch.autograd.Function):
    """The loss, and without gradient the error that each term shows and the root of the loss."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, fraction: Tensor, *pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return a scalar and `(terms + 1,)`, float64; `pairs` hold prediction and label of each term in turn."""
        from deepmd_muon.loss.ener import kernels

        frames = pairs[1].shape[0]
        straight = [x.contiguous() if k % 2 == 0 else x.reshape(frames, -1) for k, x in enumerate(pairs)]
        ctx.save_for_backward(table, fraction, *straight)
        out = kernels.loss_of(list(zip(straight[::2], straight[1::2], strict=True)), table, fraction)
        errors = out[1:]
        ctx.mark_non_differentiable(errors)
        return out[0], errors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> Any:
        """Return the gradient of every prediction."""
        from deepmd_muon.loss.ener import kernels

        table, fraction, *straight = ctx.saved_tensors
        pairs = list(zip(straight[::2], straight[1::2], strict=True))
        found = kernels.gradients_of(pairs, table, fraction, cotangent)
        return (None, None, *(x for gradient in found for x in (gradient, None)))
