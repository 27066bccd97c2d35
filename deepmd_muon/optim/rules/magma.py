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
# Sums of float64 squares between this and its inverse show neither overflow nor underflow.
_SAFE_SQUARE = 1e-270

_LOWEST = 1.0 / (1.0 + math.exp(1.0 / TEMPERATURE))
_HIGHEST = 1.0 / (1.0 + math.exp(-1.0 / TEMPERATURE))


def _sums_of_one(m: Tensor, g: Tensor) -> Tensor:
    """Return `_sums` of a pair; a CPU converts it piece by piece."""
    if m.dtype == torch.float64:
        return _sums_in_range(m, g)
    if m.is_cuda:
        return _sums(m.double(), g.double())
    rows = max(1, _AT_A_TIME_CPU // max(1, m.shape[1]))
    found = []
    for some, others in zip(m.split(rows), g.split(rows), strict=True):
        columns = zip(some.split(_AT_A_TIME_CPU, 1), others.split(_AT_A_TIME_CPU, 1), strict=True)
        pieces = [_sums(x.double(), y.double()) for x, y in columns]
        found.append(pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(dim=0))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _sums_in_range(m: Tensor, g: Tensor) -> Tensor:
    """Return `_sums` of float64 rows, scaled first if their squares might over- or underflow."""
    sums = _sums(m, g, keep=True)
    squares = sums[::2]
    safe = ((squares > _SAFE_SQUARE) & (squares < 1.0 / _SAFE_SQUARE)).all(dim=0)
    if not m.is_cuda and safe.all():  # a GPU would synchronize
        return sums
    m, g = (
        x / torch.where(top == 0, 1.0, top)
        for x in (m, g)
        for top in (x.abs().amax(1, keepdim=True),)
    )
    return torch.where(safe, sums, _sums(m, g))


def _sums(m: Tensor, g: Tensor, *, keep: bool = False) -> Tensor:
    """Return Σ m², Σ m g and Σ g² of float64 rows, (3, blocks); `keep` preserves the operands."""
    mm, gg = (torch.linalg.vector_norm(x, dim=1).square_() for x in (m, g))
    return torch.stack((mm, (m * g if keep else m.mul_(g)).sum(dim=1), gg))


# Number of elements up to which launches for a tensor cost more than concatenating it with others.
_SMALL = 2**16


def piece_sums(momentum: Tensor, gradient: Tensor) -> Tensor:
    """Return the contribution of each piece to its block's alignment, float64 (pieces, 5).

    Momentum and gradient are (pieces, elements).

    The columns are the scales s and t, then Σ(m/s)², Σ(m/s)(g/t) and Σ(g/t)². The scales are 1
    unless the dtype is float64, whose squares can overflow.
    """
    m, g = momentum.double(), gradient.double()
    ones = torch.ones(len(m), 1, dtype=torch.float64, device=m.device)
    s = t = ones
    if momentum.dtype == torch.float64 and m.shape[1]:
        s, t = (
            torch.where(x == 0, 1.0, x) for x in (y.abs().amax(dim=1, keepdim=True) for y in (m, g))
        )
        m, g = m / s, g / t
    sums = [torch.linalg.vecdot(a, b, dim=1).unsqueeze(1) for a, b in ((m, m), (m, g), (g, g))]
    return torch.cat([s, t, *sums], dim=1)


def piece_sums_of_many(pairs: Sequence[Pieces], *, joined: bool | None = None) -> list[Tensor]:
    """Return `piece_sums` of several pairs, in one tensor or several, row by row.

    With `joined`, small pairs are concatenated and summed in a few launches; the default on a GPU,
    where launches cost more than copies.
    """
    found: list[Tensor | None] = [None] * len(pairs)
    joined = bool(pairs) and pairs[0].momentum.is_cuda if joined is None else joined
    small = [i for i, x in enumerate(pairs) if x.momentum.numel() <= _SMALL]
    if joined and len(small) > 1:
        flat = [_flatten_dense_tensors([pairs[i][k] for i in small]) for k in (0, 1)]
        m, g = (x.double() for x in flat)
        shapes = tuple(pairs[i].shape for i in small)
        lengths = _lengths(shapes, m.device)
        # unsafe: the lengths are correct by construction, and checking them would synchronize. The
        # data is one-dimensional, because with several columns torch sums each segment in a single
        # thread.
        reduce = functools.partial(torch.segment_reduce, unsafe=True, initial=0.0)
        count = len(lengths) // 3
        scales = m.new_ones(count, 2)
        if flat[0].dtype == torch.float64:
            largest = reduce(torch.cat((m, g)).abs(), "max", lengths=lengths[: 2 * count])
            scales = torch.where(largest == 0, 1.0, largest).view(2, -1).T
            each = scales.repeat_interleave(lengths[:count], dim=0, output_size=len(m))
            m, g = m / each[:, 0], g / each[:, 1]
        products = torch.cat((m * m, m * g, g * g))
        sums = torch.cat([scales, reduce(products, "sum", lengths=lengths).view(3, -1).T], dim=1)
        if len(small) == len(pairs):
            return [sums]
        for i, part in zip(small, sums.split([pieces for pieces, _ in shapes]), strict=True):
            found[i] = part
    return [
        piece_sums(m.reshape(shape), g.reshape(shape)) if part is None else part
        for (m, g, shape), part in zip(pairs, found, strict=True)
    ]


@functools.lru_cache(maxsize=256)
def _lengths(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return the lengths of all pieces, three times."""
    return torch.tensor(
        [n for pieces, n in shapes for _ in range(pieces)] * 3, dtype=torch.int64, device=device
    )


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
        found = piece_sums_of_many(pieces)
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.zeros(0, 5, dtype=torch.float64, device=device)

    def combine(self, sums: Tensor) -> Tensor:
        """Return the alignment of each block, float32 (blocks,); 0 where either vector is zero."""
        s, t = sums[..., 0], sums[..., 1]
        s, t = (
            x / x.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
            for x in (s, t)
        )
        mm, mg, gg = (
            (sums[..., 2 + i] * scale).sum(dim=1) for i, scale in enumerate((s * s, s * t, t * t))
        )
        norms = mm.sqrt() * gg.sqrt()
        return torch.where(norms > 0, mg / norms, 0.0).clamp(-1.0, 1.0).float()

    def measure_whole(self, momenta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return cos(m, g) of every block, float32 (blocks,) each.

        0 where a vector is zero. Equal lengths are batched.

        `momenta` and `gradients` are of one dtype. Sums are in float64. float64 blocks are scaled
        first if their squares might overflow or underflow, so that a block's size and scale do not
        matter.
        """
        if not momenta:
            return []
        from_float64 = momenta[0].dtype == torch.float64
        at_a_time = _AT_A_TIME_CPU if momenta[0].device.type == "cpu" else _AT_A_TIME
        alike: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        for i, m in enumerate(momenta):
            alike[m.shape[1]].append((m, i))
        order: list[int] = []
        sums: list[Tensor] = []
        for wave in (wave for members in alike.values() for wave in waves(members, at_a_time)):
            members = [i for _, i in wave]
            order += members
            if len(members) == 1:
                sums.append(_sums_of_one(momenta[members[0]], gradients[members[0]]))
                continue
            blocks = sum(len(momenta[i]) for i in members)
            pairs = momenta[0].new_empty(
                2, blocks, momenta[members[0]].shape[1], dtype=torch.float64
            )
            for place, several in zip(pairs, (momenta, gradients), strict=True):
                some = [several[i] for i in members]
                if from_float64:
                    torch.cat(some, out=place)
                else:
                    place.copy_(torch.cat(some))
            sums.append(_sums_in_range(*pairs) if from_float64 else _sums(*pairs))
        mm, mg, gg = torch.cat(sums, dim=1) if len(sums) > 1 else sums[0]
        norms = mm.sqrt_() * gg.sqrt_()
        cosines = torch.where(norms > 0, mg / norms, 0.0).clamp_(-1.0, 1.0).float()
        found = dict(zip(order, cosines.split([len(momenta[i]) for i in order]), strict=True))
        return [found[i] for i in range(len(momenta))]

    def advance(
        self, polar: Sequence[Tensor], state: BlockState, measured: Sequence[Tensor] | None
    ) -> BlockState:
        """Move the scores towards the alignments; all tensors are float32 (blocks,)."""
        assert measured is not None
        # In float64, so that a score does not depend on the number of scores: vector and scalar
        # units round differently.
        old, cosine = torch.cat(list(state[SCORE])).double(), torch.cat(list(measured)).double()
        new = old.lerp(
            (torch.sigmoid(cosine / TEMPERATURE) - _LOWEST) / (_HIGHEST - _LOWEST),
            1.0 - SCORE_DECAY,
        )
        return {SCORE: new.float().split([len(score) for score in state[SCORE]])}

    def factors(self, polar: Sequence[Tensor], state: BlockState) -> list[Tensor]:
        """Return 0.1 + 0.9 s of each block."""
        scores = list(state[SCORE])
        factors = MIN_SCALE + (1.0 - MIN_SCALE) * torch.cat(scores)
        return [x.view(-1, 1, 1) for x in factors.split([len(score) for score in scores])]
