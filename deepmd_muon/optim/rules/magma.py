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
        """Return `row_sums` of several pairs, concatenated: float64 (pieces of all, 5)."""
        if not pieces:
            return torch.zeros(0, 5, dtype=torch.float64, device=device)
        return sums_of_pieces(pieces, joined=device.type == "cuda")

    def combine(self, sums: Tensor) -> Tensor:
        """Return the alignment of each block, float32 (blocks,); 0 if either vector is zero."""
        s = _relative_scales(sums[..., 0])
        t = _relative_scales(sums[..., 1])
        mm = (sums[..., 2] * (s * s)).sum(dim=1)
        mg = (sums[..., 3] * (s * t)).sum(dim=1)
        gg = (sums[..., 4] * (t * t)).sum(dim=1)
        norms = mm.sqrt() * gg.sqrt()
        return torch.where(norms > 0, mg / norms, 0.0).clamp(-1.0, 1.0).float()

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


# ----- sums of pieces of blocks, which ranks add -------------------------------------------------


def sums_of_pieces(pairs: Sequence[Pieces], *, joined: bool) -> Tensor:
    """Return `row_sums` of several pairs, concatenated; equal lengths are summed together.

    With `joined`, small pairs of all lengths take a few launches together. On a GPU launches cost
    more than copies.
    """
    at_a_time = _AT_A_TIME if pairs[0].momentum.is_cuda else _AT_A_TIME_CPU
    sums: dict[int, Tensor] = {}

    def store(numbers: Sequence[int], of_rows: Tensor) -> None:
        sums.update(zip(numbers, of_rows.split([pairs[i].shape[0] for i in numbers]), strict=True))

    small = [i for i, pair in enumerate(pairs) if joined and pair.momentum.numel() <= _SMALL]
    if small:
        store(small, _row_sums_joined([pairs[i] for i in small]))
    by_length: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
    for i, pair in enumerate(pairs):
        if i not in sums:
            by_length[pair.shape[1]].append((pair.momentum, i))
    for members in by_length.values():
        for wave in waves(members, at_a_time):
            numbers = [i for _, i in wave]
            momenta = [pairs[i].momentum.reshape(pairs[i].shape) for i in numbers]
            gradients = [pairs[i].gradient.reshape(pairs[i].shape) for i in numbers]
            store(numbers, row_sums(_cat(momenta), _cat(gradients), at_a_time))
    return torch.cat([sums[i] for i in range(len(pairs))])


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def row_sums(momentum: Tensor, gradient: Tensor, at_a_time: int) -> Tensor:
    """Return the contribution of each row to its block's alignment, float64 (rows, 5).

    Momentum and gradient are (rows, elements), of which `at_a_time` are converted to float64 at a
    time. The columns are the scales s and t, then Σ(m/s)², Σ(m/s)(g/t) and Σ(g/t)². The scales are
    1 unless the dtype is float64, whose squares can overflow.
    """
    n_rows = max(1, at_a_time // max(1, momentum.shape[1]))
    sums_of_rows = []
    for m, g in zip(momentum.split(n_rows), gradient.split(n_rows), strict=True):
        s = _scales(m)
        t = _scales(g)
        columns = zip(m.split(at_a_time, 1), g.split(at_a_time, 1), strict=True)
        sums = [_sums(x, y, s, t) for x, y in columns]
        of_rows = torch.stack(sums).sum(dim=0) if len(sums) > 1 else sums[0]
        sums_of_rows.append(torch.cat([s, t, of_rows], dim=1))
    return _cat(sums_of_rows)


def _sums(m: Tensor, g: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return Σ(m/s)², Σ(m/s)(g/t) and Σ(g/t)² of rows, float64 (rows, 3)."""
    m = m / s if m.dtype == torch.float64 else m.double()
    g = g / t if g.dtype == torch.float64 else g.double()
    mm = torch.linalg.vector_norm(m, dim=1).square_()
    gg = torch.linalg.vector_norm(g, dim=1).square_()
    return torch.stack([mm, m.mul_(g).sum(1), gg], dim=1)


def _scales(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row, (rows, 1), or 1 for zeros and narrower dtypes."""
    if x.dtype != torch.float64 or not x.shape[1]:
        return torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
    largest = x.abs().amax(dim=1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest)


def _relative_scales(scales: Tensor) -> Tensor:
    """Return the scales of a block's pieces, (blocks, pieces), divided by the largest."""
    tiny = torch.finfo(torch.float64).tiny
    return scales / scales.amax(dim=1, keepdim=True).clamp_min(tiny)


def _row_sums_joined(pairs: Sequence[Pieces]) -> Tensor:
    """Return `row_sums` of several pairs by reductions over segments of one vector."""
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
