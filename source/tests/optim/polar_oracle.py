"""What the polar factor tests compare with: float64 singular value decompositions and matrices of known spectrum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.polar import SCHEDULES, Schedule

AnySchedule = str | Schedule | Sequence[tuple[float, float, float]]

SHAPES = (
    (1, 1),
    (1, 8),
    (2, 1),
    (5, 7),
    (16, 16),
    (17, 33),
    (25, 50),
    (63, 65),
    (65, 64),
    (127, 129),
    (128, 384),
    (240, 240),
    (241, 1607),
)
SPECTRA = (
    "gaussian",
    "rank1",
    "rank8",
    "rank-deficient",
    "log3",
    "log5",
    "log8",
    "constant",
    "one-hot",
)
# Singular values at or below this share of the largest one are rounding errors of a float32 input.
RESOLUTION = 1e-7


def spectrum(kind: str, m: int) -> Tensor:
    """Return m singular values, largest first; 'gaussian' is not a spectrum but a kind of matrix."""
    if kind.startswith("rank"):
        rank = int(kind.removeprefix("rank")) if kind != "rank-deficient" else max(1, m - 8)
        return torch.cat([torch.ones(min(rank, m)), torch.zeros(m - min(rank, m))]).double()
    if kind.startswith("log"):
        return torch.logspace(0, -float(kind.removeprefix("log")), m, dtype=torch.float64)
    assert kind == "constant"
    return torch.ones(m, dtype=torch.float64)


def matrices(kind: str, batch: int, m: int, n: int, seed: int = 0) -> Tensor:
    """Return float32 matrices (batch, m, n) of a kind of spectrum."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(batch, m, n, generator=generator, dtype=torch.float64)
    if kind == "gaussian" or batch == 0:
        return gaussian.float()
    if kind == "one-hot":
        x = torch.zeros(batch, m, n)
        x[:, m // 2, n // 3] = 1.0
        return x
    u, _, vh = torch.linalg.svd(gaussian, full_matrices=False)
    return ((u * spectrum(kind, min(m, n))) @ vh).float()


def decomposed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, σ / ‖X‖_F and Vᵀ of matrices (batch, m, n) in float64, whatever their scale."""
    x = x.double()
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return u, s / torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp_min(1e-300), vh


def mapped(sigma: Tensor, schedule: AnySchedule) -> Tensor:
    """Apply the scalar map of a schedule, or of its coefficients, in float64."""
    schedule = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    for a, b, c in schedule.coefficients if isinstance(schedule, Schedule) else schedule:
        sigma = sigma * (a + sigma**2 * (b + sigma**2 * c))
    return sigma


class Oracle:
    """Matrices X (batch, m, n), decomposed once, to judge results O by."""

    def __init__(self, x: Tensor, schedule: AnySchedule = "8+2") -> None:
        self.u, self.s, self.vh = decomposed(x)
        self.values = torch.where(self.above(RESOLUTION), mapped(self.s, schedule), 0.0)

    def above(self, threshold: float) -> Tensor:
        """Say which singular values exceed that share of the largest."""
        return self.s > threshold * self.s[..., :1]

    @property
    def result(self) -> Tensor:
        """U f(Σ) Vᵀ in float64, singular values below the input's resolution left out."""
        return (self.u * self.values[..., None, :]) @ self.vh

    def error(self, o: Tensor, threshold: float) -> Tensor:
        """Return, per matrix, the relative error along singular pairs above a share of the largest value."""
        inside = self.above(threshold).double()
        difference = self.u.mT @ o.double() @ self.vh.mT - torch.diag_embed(self.values)
        difference = difference * inside[..., :, None] * inside[..., None, :]
        return (
            difference.square().sum(dim=(-2, -1)).sqrt()
            / (self.values * inside).square().sum(-1).sqrt()
        )

    def noise(self, o: Tensor) -> Tensor:
        """Return, per matrix, the share of ‖O‖² that is not along the singular pairs of X."""
        along = torch.einsum("bij,bik,bkj->bj", self.u, o.double(), self.vh.mT)
        along = torch.where(self.above(RESOLUTION), along, 0.0)
        total = o.double().square().sum(dim=(-2, -1))
        return torch.where(total > 0, 1.0 - along.square().sum(-1) / total, 0.0)


def oracle(x: Tensor, schedule: AnySchedule = "8+2") -> Tensor:
    """Return U f(Σ) Vᵀ in float64, singular values below the input's resolution left out."""
    return Oracle(x, schedule).result


def noise_fraction(x: Tensor, o: Tensor) -> Tensor:
    """Return, per matrix, the share of ‖O‖² that is not along the singular pairs of X."""
    return Oracle(x).noise(o)


def error_inside(x: Tensor, o: Tensor, schedule: AnySchedule, threshold: float) -> Tensor:
    """Return, per matrix, the relative error to the schedule in float64, along singular pairs above a threshold.

    `threshold` is a share of the largest singular value.
    """
    return Oracle(x, schedule).error(o, threshold)
