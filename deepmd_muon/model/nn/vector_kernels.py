"""Vectors of three components in Triton kernels; a component is usually a number for each edge."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Vector(NamedTuple):
    """The components of a vector."""

    x: Any
    y: Any
    z: Any


@triton.jit
def load_vector(values, row, mask=None, other=None):
    """Load rows of a tensor (…, 3)."""
    x = tl.load(values + row * 3, mask, other)
    y = tl.load(values + row * 3 + 1, mask, other)
    z = tl.load(values + row * 3 + 2, mask, other)
    return Vector(x, y, z)


@triton.jit
def store_vector(out, row, mask, a):
    """Store a vector in rows of a tensor (…, 3), in its dtype."""
    tl.store(out + row * 3, a.x.to(out.dtype.element_ty), mask)
    tl.store(out + row * 3 + 1, a.y.to(out.dtype.element_ty), mask)
    tl.store(out + row * 3 + 2, a.z.to(out.dtype.element_ty), mask)


@triton.jit
def cast(a, dtype: tl.constexpr):
    """Return the components in another dtype."""
    return Vector(a.x.to(dtype), a.y.to(dtype), a.z.to(dtype))


@triton.jit
def scaled(p, a):
    """Return p·a."""
    return Vector(p * a.x, p * a.y, p * a.z)


@triton.jit
def plus(a, b):
    """Return a + b."""
    return Vector(a.x + b.x, a.y + b.y, a.z + b.z)


@triton.jit
def minus(a, b):
    """Return a − b."""
    return Vector(a.x - b.x, a.y - b.y, a.z - b.z)


@triton.jit
def times(a, b):
    """Return a∘b, the products of the components."""
    return Vector(a.x * b.x, a.y * b.y, a.z * b.z)


@triton.jit
def dot(a, b):
    """Return a·b."""
    return a.x * b.x + a.y * b.y + a.z * b.z


@triton.jit
def across(a, e):
    """Return the part of a across a unit vector, a − (a·e)·e."""
    return minus(a, scaled(dot(a, e), e))
