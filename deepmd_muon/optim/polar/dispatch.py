"""Which implementation orthogonalizes which matrices: one table, read from the top."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from deepmd_muon.optim.polar.schedules import Coefficients

Implementation = Literal["whole", "strips", "tiles", "symmetric", "torch"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_LOG = logging.getLogger(__name__)
_READABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST_STRIPS = 128  # programs that share a matrix
_TILE = 64
# With more 64 × 64 tiles, launches of larger products win.
_MOST_TILES = 100


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the choice depends on: `count` matrices of one shape, rows ≤ columns."""

    rows: int
    columns: int
    count: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    operand: torch.dtype

    @property
    def readable(self) -> bool:
        """Whether a kernel can take them at all: tensor cores with asynchronous copies, fp16 operands."""
        on_gpu = self.device == "cuda" and self.capability >= (8, 0)
        return on_gpu and self.operand == torch.float16 and self.dtype in _READABLE

    @property
    def tiles(self) -> int:
        """Tiles of 64 × 64 in all of them."""
        return self.count * -(-self.rows // _TILE) * -(-self.columns // _TILE)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table."""

    implementation: Implementation
    shapes: str
    means: str
    fits: Callable[[Problem], bool]


def _whole(p: Problem) -> bool:
    return p.readable and p.columns <= (256 if p.rows <= 64 else 128)


def _strips(p: Problem) -> bool:
    strips = -(-p.columns // (64 if p.rows <= 128 else 32))
    few = p.rows <= 128 or p.count * strips <= 2 * _MOST_STRIPS
    return p.readable and 1 < p.rows <= 256 and strips <= _MOST_STRIPS and few


def _tiles(p: Problem) -> bool:
    return p.readable and 1 < p.rows <= 1024 and p.tiles <= _MOST_TILES


def _symmetric(p: Problem) -> bool:
    return p.readable and p.rows >= 128


TABLE: tuple[Rule, ...] = (
    Rule(
        "whole",
        "m ≤ 64 and n ≤ 256, or m, n ≤ 128",
        "one launch for all of them, one program a matrix, X in registers",
        _whole,
    ),
    Rule(
        "strips",
        "m ≤ 128 and n ≤ 8192; m ≤ 256, n ≤ 4096, ≤ 8192 in all",
        "one cooperative launch, each program keeps 64 or 32 columns in registers",
        _strips,
    ),
    Rule(
        "tiles",
        f"m ≤ 1024 and at most {_MOST_TILES} tiles of 64 × 64",
        "one cooperative launch, programs share the tiles of each product",
        _tiles,
    ),
    Rule(
        "symmetric",
        "m ≥ 128",
        "three launches a step, half of each symmetric product; wide ones share products with X",
        _symmetric,
    ),
    Rule("torch", "everything else", "batched products of torch", lambda _: True),
)


def choose(problem: Problem, allowed: Collection[str] = IMPLEMENTATIONS) -> Implementation:
    """Return the first implementation of the table that fits and is allowed; torch fits everything."""
    for rule in TABLE:
        if rule.fits(problem) and (rule.implementation in allowed or rule.implementation == "torch"):
            return rule.implementation
    raise AssertionError("the last rule of the table fits everything")


_COUNTS: Counter[tuple[str, int, int]] = Counter()
_FAILED: dict[str, str] = {}


def counts() -> dict[tuple[str, int, int], int]:
    """Return how many matrices went to each (implementation, rows, columns) since the start."""
    return dict(_COUNTS)


def describe() -> str:
    """Return the table as text: shapes (m ≤ n), implementation, what it does; then what is available and what ran."""
    lines = [f"{rule.implementation:10} {rule.shapes:56} {rule.means}" for rule in TABLE]
    reason = unavailable()
    lines.append(f"kernels: {'not used, ' + reason if reason else 'Triton on ' + torch.cuda.get_device_name()}")
    lines += [f"{name} is off: {why}" for name, why in _FAILED.items()]
    ran = sorted(_COUNTS.items())
    lines += [f"ran: {name} for {number} matrices of {m} × {n}" for (name, m, n), number in ran]
    return "\n".join(lines)


def unavailable() -> str:
    """Say why no kernel can run here; empty when they can. Touches no GPU unless there is one."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return ""


@functools.lru_cache(maxsize=1)
def _kernels_available() -> bool:
    reason = unavailable()
    if reason:
        level = logging.WARNING if torch.cuda.is_available() else logging.INFO
        _LOG.log(level, "matrices are orthogonalized by torch: %s", reason)
    return not reason


def orthogonalize_with_kernels(
    matrices: Sequence[Tensor], coefficients: Coefficients, operand: torch.dtype, allowed: Collection[str]
) -> list[Tensor | None]:
    """Orthogonalize by kernels what the table gives them.

    Parameters
    ----------
    matrices
        Batches (b, m, n) on one device.
    coefficients
        One (a, b, c) a step.
    operand
        Dtype of the operands of matrix products.
    allowed
        Implementations that may be used.

    Returns
    -------
    list
        float32 results (b, m, n); None for what is torch's.
    """
    nothing: list[Tensor | None] = [None] * len(matrices)
    device = matrices[0].device
    if not allowed or not _kernels_available() or device.type != "cuda":
        return nothing
    usable = tuple(name for name in allowed if name not in _FAILED)
    geometry = tuple((tuple(x.shape), x.stride(), x.dtype) for x in matrices)
    capability = torch.cuda.get_device_capability(device)
    chosen = _choose_all(geometry, capability, operand, usable)
    results = nothing
    for name in dict.fromkeys(chosen):
        members = [i for i, c in enumerate(chosen) if c == name]
        if name == "torch":
            continue
        done = _attempt(name, [matrices[i] for i in members], coefficients)
        if done is None:  # it has just been switched off: ask the table again
            return orthogonalize_with_kernels(matrices, coefficients, operand, allowed)
        for i, x in zip(members, done, strict=True):
            results[i] = x
            _COUNTS[name, min(x.shape[1:]), max(x.shape[1:])] += x.shape[0]
    return results


Geometry = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]


@functools.lru_cache(maxsize=64)
def _choose_all(
    geometry: Geometry, capability: tuple[int, int], operand: torch.dtype, allowed: tuple[str, ...]
) -> tuple[Implementation, ...]:
    """Choose for each tensor, equal shapes counted together, and log it."""
    sizes = [(shape[0], min(shape[1:]), max(shape[1:])) for shape, _, _ in geometry]
    count: Counter[tuple[int, int]] = Counter()
    for b, m, n in sizes:
        count[m, n] += b
    chosen: list[Implementation] = []
    for (b, m, n), (_, _, dtype) in zip(sizes, geometry, strict=True):
        problem = Problem(m, n, count[m, n], dtype, "cuda", capability, operand)
        chosen.append("torch" if b * m * n == 0 else choose(problem, allowed))
    lines = Counter((name, m, n) for name, (_, m, n) in zip(chosen, sizes, strict=True))
    for (name, m, n), number in sorted(lines.items()):
        _LOG.info("%d tensors of %d × %d matrices are orthogonalized by %r", number, m, n, name)
    return tuple(chosen)


def _attempt(name: str, matrices: Sequence[Tensor], coefficients: Coefficients) -> list[Tensor] | None:
    """Run one implementation; on its first use check it against torch; on failure switch it off and say so."""
    try:
        _check(name, matrices[0].device)
        return _run(name, matrices, coefficients)
    except Exception as error:  # whatever a compiler or driver raises must not end a training run
        if torch.cuda.is_current_stream_capturing():
            raise
        _FAILED[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning("%r is switched off and torch takes over: %s", name, _FAILED[name])
        return None


def _run(name: str, matrices: Sequence[Tensor], coefficients: Coefficients) -> list[Tensor]:
    if name == "symmetric":
        from deepmd_muon.optim.polar.products import orthogonalize_by_products as run
    else:
        from deepmd_muon.optim.polar.launches import orthogonalize_in_one_launch

        run = functools.partial(orthogonalize_in_one_launch, name)
    done: list[Tensor] = run(matrices, coefficients)
    return done


class KernelError(RuntimeError):
    """A kernel's result differs from torch's."""


@functools.lru_cache(maxsize=64)
def _check(name: str, device: torch.device) -> None:
    """Compare an implementation with plain torch on matrices of low rank, in all ways that it reads and writes."""
    from deepmd_muon.optim.polar.newton_schulz import orthogonalize_matrices
    from deepmd_muon.optim.polar.schedules import coefficients_of

    shapes = {"whole": [(24, 40)], "strips": [(100, 400)], "tiles": [(270, 290)], "symmetric": [(150, 170), (128, 256)]}
    coefficients = coefficients_of("8+2")
    for m, n in shapes[name]:
        i = torch.arange(2 * m * n, device=device, dtype=torch.float32).view(2, m, n)
        x = torch.cos(0.3 * i) + torch.eye(m, n, device=device)
        (expected,) = orthogonalize_matrices([x], coefficients, flash=False)
        for y in (x, x.mT, x.mT.contiguous().mT):
            (found,) = _run(name, [y], coefficients)
            error = float(((found if found.shape == x.shape else found.mT) - expected).norm() / expected.norm())
            if not error < 5e-3:
                raise KernelError(f"its result is {error:.1e} from torch's")
