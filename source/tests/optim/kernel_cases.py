"""Cases that every kernel must pass, in Triton's interpreter on a CPU and on a GPU."""

from __future__ import annotations

import torch
from polar_oracle import error_inside, matrices, noise_fraction
from torch import Tensor

from deepmd_muon.optim.polar.dispatch import _run
from deepmd_muon.optim.polar.schedules import coefficients_of

SPECTRA = ("gaussian", "rank1", "rank8", "rank-deficient", "log3", "log5", "log8", "constant", "one-hot")
# What DESIGN asks of the default path, with room: 3e-3 inside the range of the input, 0.02 of energy outside.
INSIDE, OUTSIDE = 3e-3, 0.02


def polar(name: str, *x: Tensor, schedule: str = "8+2") -> list[Tensor]:
    """Run one implementation, whatever the dispatch table says, and bring the results back."""
    return [o.cpu() for o in _run(name, x, coefficients_of(schedule))]


def check_quality(name: str, shape: tuple[int, int], kinds: tuple[str, ...], device: str, batch: int = 2) -> None:
    for kind in kinds:
        x = matrices(kind, batch, *shape)
        (o,) = polar(name, x.to(device))
        assert o.shape == x.shape
        assert error_inside(x, o, "8+2", threshold=1e-3).max() <= INSIDE, (shape, kind)
        assert noise_fraction(x, o).max() <= OUTSIDE, (shape, kind)


def check_views(name: str, shape: tuple[int, int], device: str) -> None:
    """Tall, transposed, offset, padded and strided views give what a contiguous copy gives."""
    base = matrices("gaussian", 1, *shape).to(device)
    (expected,) = polar(name, base)
    m, n = shape
    padded = torch.full((1, m + 3, n + 5), 7.0, device=device)[:, 2 : 2 + m, 3 : 3 + n]
    every_other = torch.zeros(1, 2 * m, 2 * n, device=device)[:, ::2, ::2]
    transposed = torch.zeros(1, n, m, device=device).mT
    views = (padded, every_other, transposed)
    for view in views:
        view.copy_(base)
    for view, o in zip(views, polar(name, *views), strict=True):
        assert torch.equal(o, expected) or torch.allclose(o, expected, atol=2e-3), view.stride()
    (tall,) = polar(name, base.mT)
    assert torch.allclose(tall.mT, expected, atol=2e-3)


def check_dtypes_and_scales(name: str, shape: tuple[int, int], device: str) -> None:
    x = matrices("gaussian", 1, *shape)
    (expected,) = polar(name, x.to(device))
    for scale in (1e-30, 1e-7, 1e30):
        (o,) = polar(name, (x * scale).to(device))
        assert torch.allclose(o, expected, atol=3e-3), scale
    for scale in (1e-300, 1e300):
        (o,) = polar(name, (x.double() * scale).to(device))
        assert torch.allclose(o, expected, atol=3e-3), scale
    for dtype in (torch.float16, torch.bfloat16):
        narrow = x.to(dtype)
        (o,) = polar(name, narrow.to(device))
        (wide,) = polar(name, narrow.float().to(device))
        assert torch.equal(o, wide), dtype


def check_special_values(name: str, shape: tuple[int, int], device: str) -> None:
    """Zeros stay zero, NaN and infinity stay in their matrix, the input is not written."""
    x = matrices("gaussian", 4, *shape)
    x[1] = 0.0
    (expected,) = polar(name, x.to(device))
    assert torch.equal(expected[1], torch.zeros(shape))
    for bad in (float("nan"), float("inf")):
        y = x.clone()
        y[2, 0, 0] = bad
        given = y.to(device)
        (o,) = polar(name, given)
        assert torch.isnan(o[2]).any()
        for i in (0, 1, 3):
            assert torch.equal(o[i], expected[i])
        assert torch.equal(given.cpu(), y) or torch.isnan(y).any()


def check_company(name: str, shapes: tuple[tuple[int, int, int], ...], device: str, repeats: int = 1) -> None:
    """Alone, in any company and every time: the same bits."""
    xs = [matrices("gaussian", *shape, seed=i).to(device) for i, shape in enumerate(shapes)]
    together = polar(name, *xs)
    for x, o in zip(xs, together, strict=True):
        assert torch.equal(polar(name, x)[0], o)
        for i in range(min(len(x), 3)):
            assert torch.equal(polar(name, x[i : i + 1])[0][0], o[i])
    for _ in range(repeats):
        for again, o in zip(polar(name, *xs), together, strict=True):
            assert torch.equal(again, o)
