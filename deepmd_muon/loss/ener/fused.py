"""The `ener` loss of a training step in one kernel, where it is the usual one; `EnergyLoss.compare` defines it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmd_muon.loss.ener.settings import EnerLossSettings
from deepmd_muon.loss.interface import Labels

if TYPE_CHECKING:
    from deepmd_muon.loss.ener import kernels

# One program adds up all errors: with more force components, torch's many programs are faster.
_MOST = 1 << 16
_LABELS = {"e": "energy", "f": "force", "v": "virial"}


def evaluate(
    settings: EnerLossSettings,
    prediction: Mapping[str, Tensor],
    labels: Labels,
    lr_fraction: Tensor,
    natoms: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics as `EnergyLoss.compare` does, where `fits` says so."""
    quantities = [_LABELS[term] for term in settings.names]
    # With a mask the number of atoms differs between frames, and the kernels read it.
    table = _table(settings, natoms if mask is None else 1, prediction["energy"].device)
    pairs = [x for name in quantities for x in (prediction[name], labels[name])]
    present = [labels.get(f"find_{name}") for name in quantities]
    mask = mask if mask is None else mask.contiguous()
    value, errors = FusedLoss.apply(settings, table, lr_fraction, mask, present, *pairs)
    names = [*(f"rmse_{term}" for term in settings.names), "rmse"]
    return value, dict(zip(names, errors.unbind(), strict=True))


def fits(settings: EnerLossSettings, prediction: Mapping[str, Tensor], labels: Labels) -> bool:
    """Return whether the loss is a sum of mean squares, of a size that pays."""
    terms = settings.names
    if not settings.is_plain or settings.relative_f is not None or not {*terms} <= {*_LABELS}:
        return False
    weighted = settings.enable_atom_ener_coeff and labels.get("atom_ener_coeff") is not None
    names = [_LABELS[term] for term in terms]
    given = [labels.get(name) is not None for name in names]
    return not weighted and all(given) and max(prediction[name].numel() for name in names) <= _MOST


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
    def forward(
        ctx: Any,
        settings: EnerLossSettings,
        table: Tensor,
        fraction: Tensor,
        mask: Tensor | None,
        present: list[Tensor | None],
        *pairs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a scalar and `(terms + 1,)`, float64; `pairs` hold prediction and label of each term in turn."""
        from deepmd_muon.loss.ener import kernels

        frames = pairs[1].shape[0]
        straight = [x.contiguous() if k % 2 == 0 else x.reshape(frames, -1) for k, x in enumerate(pairs)]
        natoms = None if mask is None else mask.sum(1)
        ctx.settings = settings
        terms = _terms(settings, mask, natoms, present, straight)
        out = kernels.loss_of(terms, table, fraction)
        value, errors, numbers = out.split([1, len(present) + 1, len(present)])
        ctx.save_for_backward(table, fraction, numbers, mask, natoms, *present, *straight)
        ctx.mark_non_differentiable(errors)
        return value[0], errors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> Any:
        """Return the gradient of every prediction."""
        from deepmd_muon.loss.ener import kernels

        table, fraction, numbers, mask, natoms, *rest = ctx.saved_tensors
        each = len(rest) // 3
        terms = _terms(ctx.settings, mask, natoms, rest[:each], rest[each:])
        found = kernels.gradients_of(terms, table, fraction, cotangent, numbers)
        return (*(None,) * 5, *(x for gradient in found for x in (gradient, None)))


def _terms(
    settings: EnerLossSettings,
    mask: Tensor | None,
    natoms: Tensor | None,
    present: Sequence[Tensor | None],
    straight: Sequence[Tensor],
) -> kernels.Terms:
    from deepmd_muon.loss.ener import kernels

    pairs = [*zip(straight[::2], straight[1::2], strict=True)]
    force = settings.names.index("f") if "f" in settings.names else len(pairs)
    return kernels.Terms(pairs, [*present], mask, natoms, force, settings.intensive_ener_virial)
