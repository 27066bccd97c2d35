"""Magma damping: smaller steps for blocks whose momentum is poorly aligned with the gradient.

For each block (one matrix of a parameter's view) with momentum m and gradient g::

    c = cos(m, g)
    r = (sigmoid(c/2) − sigmoid(−1/2)) / (sigmoid(1/2) − sigmoid(−1/2))        in [0, 1]
    s ← 0.9 s + 0.1 r                                                         starts at 0.5
    update ← (0.1 + 0.9 s) · update

deepmd-kit calls this form Magma-lite: momentum alignment without random masks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.rules.interface import BlockState, MatrixRule, Pieces, StateTensor
from deepmd_muon.optim.update.gradients import waves

SCORE = "magma_score"
TEMPERATURE = 2.0
SCORE_DECAY = 0.9
SCORE_START = 0.5
MIN_SCALE = 0.1

# Elements converted to float64 at a time: on a CPU few, which stay in its cache; elsewhere many, in
# few launches.
_AT_A_TIME_CPU = 2**16
_AT_A_TIME = 2**22
# Number of elements up to which launches for a tensor cost more than concatenating it with others.
_SMALL = 2**16
# Sums of float64 squares between this and its inverse show neither overflow nor underflow.
_SAFE_SQUARE = 1e-270

_LOWEST = 1.0 / (1.0 + math.exp(1.0 / TEMPERATURE))  # sigmoid(−1/2)
_HIGHEST = 1.0 / (1.0 + math.exp(-1.0 / TEMPERATURE))  # sigmoid(1/2)

# ----- formulas ----------------------------------------------------------------------------------
# Triton compiles them for its kernels, so they use operators and methods that its tensors have, too.


def next_score(
    score: Tensor,
    cosine: Tensor,
    temperature: float = TEMPERATURE,
    lowest: float = _LOWEST,
    span: float = _HIGHEST - _LOWEST,
    pace: float = 1.0 - SCORE_DECAY,
) -> Tensor:
    """Return the score of a block after a step with this cos(m, g)."""
    alignment = ((cosine / temperature).sigmoid() - lowest) / span
    return score + pace * (alignment - score)


def damping(score: Tensor, least: float = MIN_SCALE) -> Tensor:
    """Return the factor of a block's update with this score."""
    return least + (1.0 - least) * score


# ----- the rule ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Magma(MatrixRule):
    """Magma damping as a rule: one score per block."""

    name = "magma_muon"
    sums = 5

    @classmethod
    def of(cls, settings: HybridMuonConfig) -> Magma | None:
        """Return the rule that settings switch on, or None."""
        return cls() if settings.magma_muon else None

    def tensors(self) -> Mapping[str, StateTensor]:
        """Return the score."""
        return {SCORE: StateTensor("blocks", "float32", SCORE_START)}

    def measure(self, pieces: Sequence[Pieces], device: torch.device) -> Tensor:
        """Return `piece_sums` of several pairs, concatenated: float64 (pieces of all, 5)."""
        sums = piece_sums_of_many(pieces)
        if len(sums) == 1:
            return sums[0]
        return torch.cat(sums) if sums else torch.zeros(0, 5, dtype=torch.float64, device=device)

    def combine(self, sums: Tensor) -> Tensor:
        """Return the alignment of each block, float32 (blocks,); 0 if either vector is zero."""
        s = _relative_scales(sums[..., 0])
        t = _relative_scales(sums[..., 1])
        mm = (sums[..., 2] * (s * s)).sum(dim=1)
        mg = (sums[..., 3] * (s * t)).sum(dim=1)
        gg = (sums[..., 4] * (t * t)).sum(dim=1)
        norms = mm.sqrt() * gg.sqrt()
        return torch.where(norms > 0, mg / norms, 0.0).clamp(-1.0, 1.0).float()

    def measure_whole(self, momenta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return cos(m, g) of every block, float32 (blocks,) each; 0 if a vector is zero.

        `momenta` and `gradients` are (blocks, elements) of one dtype; equal lengths are batched.
        Sums are in float64. float64 blocks are scaled first if their squares might overflow or
        underflow, so that a block's size and scale do not matter.
        """
        if not momenta:
            return []
        at_a_time = _AT_A_TIME_CPU if momenta[0].device.type == "cpu" else _AT_A_TIME
        by_length: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        for i, m in enumerate(momenta):
            by_length[m.shape[1]].append((m, i))
        order: list[int] = []
        sums: list[Tensor] = []
        for members in by_length.values():
            for wave in waves(members, at_a_time):
                numbers = [i for _, i in wave]
                order += numbers
                if len(numbers) == 1:
                    sums.append(_sums_of_one(momenta[numbers[0]], gradients[numbers[0]]))
                else:
                    sums.append(
                        _sums_of_wave(
                            [momenta[i] for i in numbers], [gradients[i] for i in numbers]
                        )
                    )
        mm, mg, gg = torch.cat(sums, dim=1) if len(sums) > 1 else sums[0]
        norms = mm.sqrt_() * gg.sqrt_()
        cosines = torch.where(norms > 0, mg / norms, 0.0).clamp_(-1.0, 1.0).float()
        cosines_of_blocks = cosines.split([len(momenta[i]) for i in order])
        by_number = dict(zip(order, cosines_of_blocks, strict=True))
        return [by_number[i] for i in range(len(momenta))]

    def advance(
        self, polar: Sequence[Tensor], state: BlockState, measured: Sequence[Tensor] | None
    ) -> BlockState:
        """Move the scores towards the alignments; all tensors are float32 (blocks,)."""
        assert measured is not None
        # In float64, so that a score does not depend on the number of scores: vector and scalar
        # units round differently.
        scores = torch.cat(list(state[SCORE])).double()
        cosines = torch.cat(list(measured)).double()
        advanced = next_score(scores, cosines)
        return {SCORE: advanced.float().split([len(score) for score in state[SCORE]])}

    def factors(self, polar: Sequence[Tensor], state: BlockState) -> list[Tensor]:
        """Return 0.1 + 0.9 s of each block, (blocks, 1, 1)."""
        scores = list(state[SCORE])
        factors = damping(torch.cat(scores))
        return [x.view(-1, 1, 1) for x in factors.split([len(score) for score in scores])]


# ----- sums of whole blocks
# --------------------------------------------------------------------------


def _sums_of_one(m: Tensor, g: Tensor) -> Tensor:
    """Return `_sums` of a pair; a CPU converts it piece by piece."""
    if m.dtype == torch.float64:
        return _sums_in_range(m, g)
    if m.is_cuda:
        return _sums(m.double(), g.double())
    rows = max(1, _AT_A_TIME_CPU // max(1, m.shape[1]))
    sums = []
    for m_rows, g_rows in zip(m.split(rows), g.split(rows), strict=True):
        m_pieces = m_rows.split(_AT_A_TIME_CPU, 1)
        g_pieces = g_rows.split(_AT_A_TIME_CPU, 1)
        of_pieces = [_sums(x.double(), y.double()) for x, y in zip(m_pieces, g_pieces, strict=True)]
        sums.append(of_pieces[0] if len(of_pieces) == 1 else torch.stack(of_pieces).sum(dim=0))
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def _sums_of_wave(momenta: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return `_sums` of several pairs of one length, concatenated."""
    blocks = sum(map(len, momenta))
    operands = momenta[0].new_empty(2, blocks, momenta[0].shape[1], dtype=torch.float64)
    from_float64 = momenta[0].dtype == torch.float64
    for into, tensors in zip(operands, (momenta, gradients), strict=True):
        if from_float64:
            torch.cat(list(tensors), out=into)
        else:
            into.copy_(torch.cat(list(tensors)))
    return _sums_in_range(*operands) if from_float64 else _sums(*operands)


def _sums_in_range(m: Tensor, g: Tensor) -> Tensor:
    """Return `_sums` of float64 rows, scaled first if their squares might over- or underflow."""
    sums = _sums(m, g, keep=True)
    squares = sums[::2]
    safe = ((squares > _SAFE_SQUARE) & (squares < 1.0 / _SAFE_SQUARE)).all(dim=0)
    if not m.is_cuda and safe.all():  # a GPU would synchronize
        return sums
    return torch.where(safe, sums, _sums(m / _largest(m), g / _largest(g)))


def _sums(m: Tensor, g: Tensor, *, keep: bool = False) -> Tensor:
    """Return Σ m², Σ m g and Σ g² of float64 rows, (3, blocks); `keep` preserves the operands."""
    mm = torch.linalg.vector_norm(m, dim=1).square_()
    gg = torch.linalg.vector_norm(g, dim=1).square_()
    mg = (m * g if keep else m.mul_(g)).sum(dim=1)
    return torch.stack((mm, mg, gg))


def _largest(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row, (rows, 1), or 1 for rows of zeros."""
    largest = x.abs().amax(dim=1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest)


# ----- sums of pieces of blocks, which ranks add
# -----------------------------------------------------


def piece_sums(momentum: Tensor, gradient: Tensor) -> Tensor:
    """Return the contribution of each piece to its block's alignment, float64 (pieces, 5).

    Momentum and gradient are (pieces, elements). The columns are the scales s and t, then Σ(m/s)²,
    Σ(m/s)(g/t) and Σ(g/t)². The scales are 1 unless the dtype is float64, whose squares can
    overflow.
    """
    m = momentum.double()
    g = gradient.double()
    s = t = torch.ones(len(m), 1, dtype=torch.float64, device=m.device)
    if momentum.dtype == torch.float64 and m.shape[1]:
        s = _largest(m)
        t = _largest(g)
        m = m / s
        g = g / t
    sums = [torch.linalg.vecdot(a, b, dim=1).unsqueeze(1) for a, b in ((m, m), (m, g), (g, g))]
    return torch.cat([s, t, *sums], dim=1)


def _relative_scales(scales: Tensor) -> Tensor:
    """Return the scales of a block's pieces, (blocks, pieces), divided by the largest."""
    tiny = torch.finfo(torch.float64).tiny
    return scales / scales.amax(dim=1, keepdim=True).clamp_min(tiny)


def piece_sums_of_many(pairs: Sequence[Pieces], *, joined: bool | None = None) -> list[Tensor]:
    """Return `piece_sums` of several pairs, in one tensor or several, row by row.

    With `joined`, small pairs are concatenated and summed in a few launches. This is the default on
    a GPU, where launches cost more than copies.
    """
    if joined is None:
        joined = bool(pairs) and pairs[0].momentum.is_cuda
    small = [i for i, pair in enumerate(pairs) if pair.momentum.numel() <= _SMALL]
    sums: dict[int, Tensor] = {}
    if joined and len(small) > 1:
        of_small = _piece_sums_joined([pairs[i] for i in small])
        if len(small) == len(pairs):
            return [of_small]
        sums_of_small = of_small.split([pairs[i].shape[0] for i in small])
        sums = dict(zip(small, sums_of_small, strict=True))
    return [
        sums[i]
        if i in sums
        else piece_sums(pair.momentum.reshape(pair.shape), pair.gradient.reshape(pair.shape))
        for i, pair in enumerate(pairs)
    ]


def _piece_sums_joined(pairs: Sequence[Pieces]) -> Tensor:
    """Return `piece_sums` of several pairs by reductions over segments of one vector."""
    flat = _flatten_dense_tensors([pair.momentum for pair in pairs])
    m = flat.double()
    g = _flatten_dense_tensors([pair.gradient for pair in pairs]).double()
    lengths = _lengths(tuple(pair.shape for pair in pairs), m.device)
    # unsafe: the lengths are correct by construction, and checking them would synchronize. The data
    # is one-dimensional, because with several columns torch sums each segment in a single thread.
    reduce = functools.partial(torch.segment_reduce, unsafe=True, initial=0.0)
    count = len(lengths) // 3
    scales = m.new_ones(count, 2)
    if flat.dtype == torch.float64:
        largest = reduce(torch.cat((m, g)).abs(), "max", lengths=lengths[: 2 * count])
        scales = torch.where(largest == 0, 1.0, largest).view(2, -1).T
        of_elements = scales.repeat_interleave(lengths[:count], dim=0, output_size=len(m))
        m = m / of_elements[:, 0]
        g = g / of_elements[:, 1]
    products = torch.cat((m * m, m * g, g * g))
    sums = reduce(products, "sum", lengths=lengths).view(3, -1).T
    return torch.cat([scales, sums], dim=1)


@functools.lru_cache(maxsize=256)
def _lengths(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return the lengths of all pieces, three times."""
    return torch.tensor(
        [n for pieces, n in shapes for _ in range(pieces)] * 3, dtype=torch.int64, device=device
    )
