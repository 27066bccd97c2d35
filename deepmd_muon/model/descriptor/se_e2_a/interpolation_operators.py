"""The kernels of the interpolated embedding as operators of torch, which its compiler can record."""

from __future__ import annotations

import torch

from deepmd_muon.model.descriptor.se_e2_a import interpolation_kernels
from deepmd_muon.model.descriptor.se_e2_a.edges import Edges

_EDGES = "Tensor rows, Tensor empty, Tensor start, int pieces, int[] widths, int[] missing"


def _edges(
    rows: torch.Tensor,
    empty: torch.Tensor,
    start: torch.Tensor,
    pieces: int,
    widths: list[int],
    missing: list[int],
) -> Edges:
    return Edges(rows, empty, start, pieces, tuple(widths), tuple(missing))


@torch.library.custom_op("deepmd_muon::expand", mutates_args=(), schema=f"({_EDGES}) -> Tensor")
def _expand(*edges):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN202 (the schema says it)
    return interpolation_kernels.expand(_edges(*edges))


@torch.library.custom_op("deepmd_muon::spread", mutates_args=(), schema=f"({_EDGES}, Tensor moved) -> Tensor")
def _spread(*edges_and_moved):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN202
    *edges, moved = edges_and_moved
    return interpolation_kernels.spread(_edges(*edges), moved)


@torch.library.custom_op("deepmd_muon::evaluate", mutates_args=(), schema=f"({_EDGES}, Tensor product) -> Tensor")
def _evaluate(*edges_and_product):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN202
    *edges, product = edges_and_product
    return interpolation_kernels.evaluate(_edges(*edges), product)


@_expand.register_fake
def _(*edges):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN202
    given = _edges(*edges)
    return given.rows.new_empty(given.rows.shape[0], 4, given.terms)


@_spread.register_fake
def _(*edges_and_moved):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN202
    given = _edges(*edges_and_moved[:-1])
    return given.rows.new_empty(given.rows.shape[0], 4, given.terms)


@_evaluate.register_fake
def _(*edges_and_product):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN202
    return torch.empty_like(edges_and_product[0], memory_format=torch.contiguous_format)


def expand(edges: Edges) -> torch.Tensor:
    """See `interpolation.expand_reference`."""
    result: torch.Tensor = _expand(*edges)
    return result


def spread(edges: Edges, moved: torch.Tensor) -> torch.Tensor:
    """See `interpolation.spread_reference`."""
    result: torch.Tensor = _spread(*edges, moved)
    return result


def evaluate(edges: Edges, product: torch.Tensor) -> torch.Tensor:
    """See `interpolation.evaluate_reference`."""
    result: torch.Tensor = _evaluate(*edges, product)
    return result
