"""The launches of `edge_launches` as operators of torch, which its compiler can record."""

from __future__ import annotations

import torch

from deepmd_muon.model.descriptor.dpa3 import edge_launches, geometry
from deepmd_muon.model.descriptor.dpa3.edge_launches import outputs
from deepmd_muon.model.descriptor.dpa3.launching import operator

_LAYER = (
    "Tensor neighbor, Tensor order, Tensor start, Tensor tiles, Tensor used, Tensor weight, int message, str kind, "
    "float[] curve_of"
)

incoming = operator("edge_incoming", geometry.incoming, "Tensor neighbor, Tensor empty", 4)
update = operator("edge_update", edge_launches.update, f"Tensor[] terms, {_LAYER}", 3)
adjoint = operator("edge_adjoint", edge_launches.adjoint, f"Tensor[] cotangents, Tensor[] terms, {_LAYER}", 5)
tangent = operator("edge_tangent", edge_launches.tangent, f"Tensor[] terms, Tensor[] dots, {_LAYER}", 3)
gradient = operator(
    "edge_gradient",
    edge_launches.gradient,
    f"Tensor[] given, Tensor[] earlier, Tensor[] terms, Tensor[] dots, {_LAYER}",
    4,
)


@incoming.register_fake
def _(neighbor, empty):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    atoms, width = neighbor.shape
    tiles = neighbor.new_empty(-(-width // geometry.EDGE_TILE) * atoms, dtype=torch.int32)
    return neighbor.new_empty(neighbor.numel()), neighbor.new_empty(atoms + 1), tiles, neighbor.new_empty(1)


@update.register_fake
def _(terms, *layer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
    return outputs(terms, *layer)


@adjoint.register_fake
def _(cotangents, terms, *layer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
    return tuple(x.new_empty(x.shape) for x in terms)


@tangent.register_fake
def _(terms, dots, *layer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
    return outputs(terms, *layer)


@gradient.register_fake
def _(given, earlier, terms, dots, *layer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
    return tuple(x.new_empty(x.shape) for x in (layer[5], *terms[:3]))
