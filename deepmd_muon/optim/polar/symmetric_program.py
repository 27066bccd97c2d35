"""The launches of all steps for large matrices, in order; some steps share products with X."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from deepmd_muon.optim.polar.schedules import Coefficients

_WIDE = 1.5  # columns / rows from which steps share products with X
# Two steps may share products with X if an error of R grows by at most this in the first of them.
_GROWTH = 12.0
# The first steps of all start from a normalised X and a small R. Two of these may always share
# products, and more, (rows, steps), with this many rows, because errors of more rows average out
# more.
_FIRST_STEPS = ((512, 4), (256, 3))
# From this many rows on, single steps may exceed _GROWTH, if the product of their growths is at
# most _GROWTH ** (most − 1), where `most` steps may share products.
_MANY_ROWS = 1024
# In segments of at least this many steps all matrices are fine; in shorter ones only the first R
# is.
_LONG = 4


class Product(NamedTuple):
    """One launch, a symmetric product or an update of X with weights w.

    It is R ← X Xᵀ, or target ← w₀ left + w₁ right + w₂ left right, or for the target 'X' X ← w₀ X +
    left X.

    `fine` names the matrices that are stored and added together with their rounding residuals.
    """

    target: str
    left: str
    right: str
    weights: tuple[float, float, float] = (0.0, 0.0, 1.0)
    fine: tuple[str, ...] = ()


@functools.lru_cache(maxsize=64)
def program(coefficients: Coefficients, rows: int, columns: int) -> tuple[Product, ...]:
    """Return the launches of all steps, segment by segment."""
    return tuple(
        product
        for segment in segments(coefficients, rows, columns)
        for product in _launches(segment)
    )


def segments(coefficients: Coefficients, rows: int, columns: int) -> list[Coefficients]:
    """Divide the steps into segments that multiply X once each, as few as precision allows.

    A step is R = X Xᵀ, p = a I + b R + c R² and X ← p X. Products with a wide X are expensive. All
    polynomials in R commute, so the next R is p R p, and the polynomials of several steps can be
    multiplied with each other before they multiply X. But an error of R outside the range of X
    grows by a² in each step until R is recomputed.
    """
    max_steps = next((steps for min_rows, steps in _FIRST_STEPS if rows >= min_rows), 0)
    if max_steps == 0 or columns < _WIDE * rows:
        return [(step,) for step in coefficients]
    growth = [a * a for a, _, _ in coefficients]

    def may_share(n: int) -> bool:
        """Return whether the first n steps may share products with X."""
        if n <= 2:
            return True
        before_last = growth[: n - 1]
        averaged = rows >= _MANY_ROWS and math.prod(before_last) <= _GROWTH ** (max_steps - 1)
        return averaged or max(before_last) <= _GROWTH

    choices = [
        [coefficients[:n], *_pairs(coefficients[n:])]
        for n in range(1, min(max_steps, len(growth)) + 1)
        if may_share(n)
    ]
    return min(choices, key=len)


def _pairs(coefficients: Coefficients) -> list[Coefficients]:
    """Divide steps into pairs from the last on, or single steps if errors would grow too much."""
    pairs: list[Coefficients] = []
    end = len(coefficients)
    while end > 0:
        a_before_last = coefficients[end - 2][0] if end > 1 else math.inf
        start = end - 2 if a_before_last**2 <= _GROWTH else end - 1
        pairs.insert(0, coefficients[start:end])
        end = start
    return pairs


def _launches(segment: Coefficients) -> list[Product]:
    """Return the launches of steps that share products with X.

    R is X Xᵀ. Q with X ← (scale I + Q) X collects p − a I of all steps, a product of polynomials in
    R. A launch never writes a matrix that it reads, so matrices take turns: `free` are not in use.
    """
    names = ("R", "A", "B", "C")
    if len(segment) >= _LONG:
        fine: tuple[str, ...] = names
    elif len(segment) > 1:
        fine = ("R",)
    else:
        fine = ()
    launches = [Product("R", "X", "X", fine=fine)]
    free = ["A", "B", "C"]
    q = ""
    scale = 1.0
    for k, (a, b, c) in enumerate(segment):
        last = k + 1 == len(segment)
        p = free.pop(0)
        launches.append(Product(p, "R", "R", weights=(b, 0.0, c), fine=fine))
        if not last:
            # R ← p R p
            pr = free.pop(0)
            launches.append(Product(pr, "R", p, weights=(a, 0.0, 1.0), fine=fine))
            if len(segment) < _LONG:
                fine = ()
            launches.append(Product("R", p, pr, weights=(0.0, a, 1.0), fine=fine))
            free.append(pr)
        if k == 0:
            q = p
            scale = a
            continue
        # scale I + Q ← (a I + P) (scale I + Q)
        target = "R" if last else free.pop(0)
        # Only its fp16 copy multiplies X, so the last Q needs no rest.
        product_fine = tuple(name for name in fine if name != target) if last else fine
        launches.append(Product(target, p, q, weights=(scale, a, 1.0), fine=product_fine))
        free += [p, q]
        q = target
        scale *= a
    return [*launches, Product("X", q, "X", weights=(scale, 0.0, 1.0))]


def amplification(products: Sequence[Product]) -> float:
    """Return the largest factor by which these launches amplify small singular values of X."""
    factors = (abs(product.weights[0]) for product in products if product.target == "X")
    return max(itertools.accumulate(factors, operator.mul, initial=1.0))
