"""Coefficients of the odd quintic iteration σ ← a σ + b σ³ + c σ⁵, with sources and error bands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from deepmd_muon.optim.errors import InvalidSettingError

Coefficients = tuple[tuple[float, float, float], ...]

# Fixed coefficients that trade exactness at 1 for speed: K. Jordan et al., "Muon: an optimizer for
# hidden layers in neural networks", 2024.
_JORDAN = (3.4445, -4.7750, 2.0315)

# Second-order polish with f(1) = 1 and f'(1) = 0: DeepSeek-V4 technical report, 2026.
_POLISH = (2.0, -1.5, 0.5)

# Minimax composition for σ in [1e-3, 1]: N. Amsel, D. Persson, C. Musco, R. Gower, "The Polar
# Express: optimal matrix sign methods and their application to the Muon algorithm",
# arXiv:2505.16932. The last one is Newton–Schulz.
POLAR_EXPRESS_LIMIT: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# The same construction for a final error of 0.05 instead of convergence: in four, five and six
# steps it reaches the smallest cut-off that steps of degree five can reach. Each polynomial is
# optimal on an interval whose upper end is 1.02 times the largest result of the steps before it
# (see _SAFETY), so the steps need not be slowed down afterwards.
_FOUR_STEPS: Coefficients = (
    (8.0669993, -22.7597498, 16.1849382),
    (3.74966252, -2.69505226, 0.50107249),
    (2.93949771, -2.12426356, 0.44106041),
    (2.06192813, -1.41276002, 0.37099379),
)
_FIVE_STEPS: Coefficients = (
    (8.27845563, -23.56201457, 16.79826186),
    (4.0611089, -2.90364143, 0.52327037),
    (3.75000376, -2.69528345, 0.50109704),
    (2.9401685, -2.12475899, 0.44111173),
    (2.06227164, -1.41307816, 0.37102202),
)
_SIX_STEPS: Coefficients = (
    (8.33073641, -23.7604671, 16.9500103),
    (4.14598715, -2.95971645, 0.52925059),
    (4.06107602, -2.90361965, 0.52326805),
    (3.74989242, -2.69520802, 0.50108903),
    (2.93994959, -2.12459731, 0.44109498),
    (2.06215949, -1.4129743, 0.37101281),
)

# Coefficients optimised step by step for five steps by J. You (2025); sharded Muons for FSDP2 and
# dion use them.
_MUON_FSDP2: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# The minimax polynomials rise steeply at the upper end of their interval. A singular value that
# rounding lifts above it would diverge, so every step but the last is slowed down (Amsel et al.,
# section 4.4, use 1.01; with half-precision operands, 1.02 is the smallest stable factor).
_SAFETY = 1.02


def slow_down(coefficients: Coefficients, factor: float, *, spare_last: bool) -> Coefficients:
    """Replace f(σ) by f(σ/factor) in every step; with `spare_last`, not in the last."""
    slowed = tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in coefficients)
    return (*slowed[:-1], coefficients[-1]) if spare_last else slowed


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A named sequence of (a, b, c).

    Attributes
    ----------
    name
        The name in settings.
    coefficients
        One (a, b, c) per step.
    band
        Lowest and highest result for relative singular values σ/‖X‖_F in [cutoff, 1], in exact
        arithmetic.
    cutoff
        The lower end of the interval for which the band is guaranteed.
    source
        The source of the coefficients.
    """

    name: str
    coefficients: Coefficients
    band: tuple[float, float]
    cutoff: float
    source: str

    def __call__(self, sigma: Sequence[float]) -> list[float]:
        """Map relative singular values in double precision, so that rounding does not matter."""
        mapped = list(sigma)
        for a, b, c in self.coefficients:
            mapped = [s * (a + s * s * (b + s * s * c)) for s in mapped]
        return mapped


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            "8+2", (_JORDAN,) * 8 + (_POLISH,) * 2, (0.999, 1.003), 3e-5, "DeepSeek-V4 report, 2026"
        ),
        Schedule("keller-jordan", (_JORDAN,) * 5, (0.68, 1.21), 2e-3, "K. Jordan et al., 2024"),
        Schedule(
            "polar-express",
            slow_down(POLAR_EXPRESS_LIMIT, _SAFETY, spare_last=True),
            (0.999, 1.001),
            1e-3,
            "N. Amsel et al., 2025",
        ),
        Schedule(
            "polar-express-4",
            _FOUR_STEPS,
            (0.95, 1.05),
            6.82e-3,
            "construction of N. Amsel et al., 2025",
        ),
        Schedule(
            "polar-express-5",
            _FIVE_STEPS,
            (0.95, 1.05),
            1.64e-3,
            "construction of N. Amsel et al., 2025",
        ),
        Schedule(
            "polar-express-6",
            _SIX_STEPS,
            (0.95, 1.05),
            3.92e-4,
            "construction of N. Amsel et al., 2025",
        ),
        Schedule("muon-fsdp2", _MUON_FSDP2, (0.97, 1.15), 3e-3, "J. You, 2025"),
    )
}


AnySchedule = str | Schedule | Sequence[Sequence[float]]


def coefficients_of(schedule: AnySchedule) -> Coefficients:
    """Return the (a, b, c) of each step of a named schedule, a `Schedule` or a sequence of triples.

    Raises
    ------
    InvalidSettingError
        When it is none of these.
    """
    if isinstance(schedule, Schedule):
        return schedule.coefficients
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise InvalidSettingError(
                f"unknown schedule {schedule!r}; known are {', '.join(SCHEDULES)}"
            )
        return SCHEDULES[schedule].coefficients
    steps = tuple(tuple(step) for step in schedule)
    if not steps or not all(len(step) == 3 and all(map(math.isfinite, step)) for step in steps):
        raise InvalidSettingError(
            f"schedule: must be one triple (a, b, c) of finite numbers per step; found {schedule!r}"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in steps)
