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
# Two steps may share products with X if an error of R grows by at most _GROWTH in the first of them. The first steps of
# all start from a normalised X and a small R. Two of these may always share products, and more (rows, steps) with the
# rows of _FIRST_STEPS, because errors of more rows average out more. From _MANY_ROWS on, single steps may exceed
# _GROWTH, if the product of their growths is at most _GROWTH ** (most − 1), where `most` steps may share products.
_GROWTH = 12.0
_FIRST_STEPS = ((512, 4), (256, 3))
_MANY_ROWS = 1024
_LONG = 4  # in segments of at least so many steps, all matrices are fine; in shorter ones, only the first R is


class Product(NamedTuple):
    """One launch: R ← X Xᵀ; target ← w₀ left + w₁ right + w₂ left right; or, for target 'X', X ← w₀ X + left X.

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

    A step is R = X Xᵀ, p = a I + b R + c R² and X ← p X. Products with a wide X are expensive. All polynomials in R
    commute, so the next R is p R p, and the polynomials of several steps can be multiplied with each other before they
    multiply X. But an error of R outside the range of X grows by a² in each step until R is recomputed.
    """
    most = next((steps for least, steps in _FIRST_STEPS if rows >= least), 0)
    if most == 0 or columns < _WIDE * rows:
        return [(step,) for step in coefficients]
    growth = [a * a for a, _, _ in coefficients]
    many = rows >= _MANY_ROWS
    lengths = [
        n
        for n in range(1, min(most, len(growth)) + 1)
        if n <= 2
        or max(growth[: n - 1]) <= _GROWTH
        or (many and math.prod(growth[: n - 1]) <= _GROWTH ** (most - 1))
    ]
    return min(([coefficients[:n], *_pairs(coefficients[n:])] for n in lengths), key=len)


def _pairs(coefficients: Coefficients) -> list[Coefficients]:
    """Divide steps into pairs, starting from the last, and into single steps where errors would grow too much."""
    found: list[Coefficients] = []
    end = len(coefficients)
    while end > 0:
        start = end - 2 if end > 1 and coefficients[end - 2][0] ** 2 <= _GROWTH else end - 1
        found.insert(0, coefficients[start:end])
        end = start
    return found


def _launches(segment: Coefficients) -> list[Product]:
    """Return the launches of steps that share products with X.

    R is X Xᵀ, and Q with X ← (scale I + Q) X collects p - a I of all steps, a product of polynomials in R.
    """
    squares = ("R", "A", "B", "C")
    fine = squares if len(segment) >= _LONG else squares[: len(segment) > 1]
    launches = [Product("R", "X", "X", fine=fine)]
    free = [*squares[1:]]
    q, scale = "", 1.0
    for k, (a, b, c) in enumerate(segment):
        last = k + 1 == len(segment)
        p = free.pop(0)
        launches.append(Product(p, "R", "R", (b, 0.0, c), fine))
        if not last:  # R ← p R p
            w = free.pop(0)
            launches.append(Product(w, "R", p, (a, 0.0, 1.0), fine))
            fine = fine if len(segment) >= _LONG else ()
            launches.append(Product("R", p, w, (0.0, a, 1.0), fine))
            free.append(w)
        if k == 0:
            q, scale = p, a
            continue
        into = "R" if last else free.pop(0)
        launches.append(
            Product(
                into,
                p,
                q,
                (scale, a, 1.0),
                tuple(name for name in fine if name != into or not last),
            )
        )
        free += [p, q]
        q, scale = into, scale * a
    return [*launches, Product("X", q, "X", (scale, 0.0, 1.0))]


def amplification(products: Sequence[Product]) -> float:
    """Return the largest factor by which these launches amplify small singular values of X."""
    factors = (abs(product.weights[0]) for product in products if product.target == "X")
    return max(itertools.accumulate(factors, operator.mul, initial=1.0))
