"""Newton–Schulz iteration in plain torch: the reference that every faster path is compared with.

A matrix X with singular values σ is mapped to U f(σ/‖X‖_F) Vᵀ, where f is the schedule's composed
polynomial. The iterate is kept in fp32 (or fp64); only the operands of matrix products are rounded
to 16 bits, and only if that is faster. Storing the iterate in 16 bits would amplify the rounding
noise of low-rank gradients to full strength.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.polar.schedules import Coefficients

# Rounding errors of R = X Xᵀ in directions where X is zero grow by a² per step; below about 1e-2
# they are harmless. When they have grown by this factor, R is recomputed from X (for fp32: 1e-7 ·
# √m · 2e4 is about 1e-2).
_GRAM_GROWTH = {torch.float32: 2e4, torch.float64: 1e12}


@torch.no_grad()
def orthogonalize_with_torch(
    matrices: Sequence[Tensor],
    coefficients: Coefficients,
    operand: torch.dtype,
    *,
    gram: bool = True,
) -> list[Tensor]:
    """Orthogonalize batches (b, m, n) on one device, equal shapes together.

    There is one (a, b, c) per step. Operands of products have the dtype `operand`; results are in
    float32, or float64 if `operand` is. `gram` allows iterating on the Gram matrix where that is
    cheaper: a step takes 8 m³ operations in this form, and 4 m² n + 2 m³ in the standard form. The
    Gram form also builds R from X and X from R about three times: it is cheaper for n ≥ 2 m.
    """
    master = torch.float64 if operand == torch.float64 else torch.float32
    by_shape: dict[tuple[torch.Size, torch.dtype], list[int]] = defaultdict(list)
    for i, x in enumerate(matrices):
        by_shape[x.shape[1:], x.dtype].append(i)
    results = list(matrices)
    for ((rows, columns), _), members in by_shape.items():
        batches = [matrices[i] for i in members]
        is_copy = len(batches) > 1
        x = torch.cat(batches) if is_copy else batches[0]
        x = _normalize(x, master, in_place=is_copy)
        wide = x.mT if rows > columns else x
        if min(rows, columns) == 1:
            polar = wide  # the polar factor of a vector is its direction
        elif gram and operand == master and max(rows, columns) >= 2 * min(rows, columns):
            polar = _gram(wide, coefficients)
        else:
            polar = _standard(wide, coefficients, operand)
        upright = polar.mT if rows > columns else polar
        for i, o in zip(members, upright.split([len(batch) for batch in batches]), strict=True):
            results[i] = o
    return results


def _normalize(x: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """Divide each matrix (b, m, n) by its largest entry, then by its Frobenius norm.

    The first division prevents overflow. With `in_place`, `x` may be overwritten.
    """
    if x.dtype.itemsize < 4:
        x = x.to(dtype)
        in_place = True
    # Zeros stay zeros. The second division corrects the error of the first for subnormal numbers.
    largest = x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
    x = (x.div_(largest) if in_place else x / largest).to(dtype)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min_(1e-18)
    return x.div_(norm)


def _standard(x: Tensor, coefficients: Coefficients, operand: torch.dtype) -> Tensor:
    """Iterate X ← a X + (b A + c A²) X with A = X Xᵀ; x is (B, m, n), normalised, m ≤ n."""
    if operand == x.dtype:
        gram, polynomial = x.new_empty(2, x.shape[0], x.shape[1], x.shape[1])
        following = x.new_empty(x.shape)
        for a, b, c in coefficients:
            torch.bmm(x, x.mT, out=gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            torch.baddbmm(x, polynomial, x, beta=a, out=following)
            buffer = x if x.is_contiguous() else x.new_empty(x.shape)  # of the step after
            x = following
            following = buffer
        return x
    for a, b, c in coefficients:
        narrow = x.to(operand)
        gram = _multiply_add(None, narrow, narrow.mT)
        narrow_gram = gram.to(operand)
        polynomial = _multiply_add(gram, narrow_gram, narrow_gram, beta=b, alpha=c).to(operand)
        x = _multiply_add(x, polynomial, narrow, beta=a)
    return x


def _gram(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Iterate on R = X Xᵀ: with p = a + b R + c R², Q ← Q p and R ← p R p.

    At restarts and at the end X ← Q X. X is (B, m, n), normalised, m ≤ n.
    """
    growth_limit = _GRAM_GROWTH[x.dtype]
    q = r = None
    growth = 1.0
    for step, (a, b, c) in enumerate(coefficients):
        if q is not None and growth * a * a > growth_limit:
            x = torch.bmm(q, x)
            q = None
        if q is None:
            r = torch.bmm(x, x.mT)
            growth = 1.0
        growth *= a * a
        assert r is not None
        p = torch.baddbmm(r, r, r, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        q = p if q is None else torch.bmm(q, p)
        if step + 1 < len(coefficients) and growth * coefficients[step + 1][0] ** 2 <= growth_limit:
            r = torch.bmm(p, torch.bmm(r, p))
    assert q is not None
    return torch.bmm(q, x)


def _multiply_add(
    addend: Tensor | None, left: Tensor, right: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return beta·addend + alpha·left@right, accumulated in fp32 or wider, for batches of matrices.

    On a GPU, tensor cores multiply 16-bit operands and accumulate in fp32; elsewhere the rounded
    operands are converted to fp32 first, which gives the same result up to the order of summation.
    """
    if left.dtype.itemsize == 2:
        if left.is_cuda:
            if addend is None:
                return torch.bmm(left, right, out_dtype=torch.float32)
            return torch.baddbmm(addend, left, right, torch.float32, beta=beta, alpha=alpha)
        left, right = left.float(), right.float()
    if addend is None:
        return torch.bmm(left, right)
    return torch.baddbmm(addend, left, right, beta=beta, alpha=alpha)
