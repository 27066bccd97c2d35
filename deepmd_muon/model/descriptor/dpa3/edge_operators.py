"""The launches of `edge_launches` as operators of torch, which its compiler can record."""

from __future__ import annotations

import torch

from deepmd_muon.model.descriptor.dpa3 import edge_launches
from deepmd_muon.model.descriptor.dpa3.edge_launches import outputs

_LAYER = "Tensor neighbor, Tensor weight, int message, str kind, float[] curve_of"

update = torch.library.custom_op(
    "deepmd_muon::edge_update",
    edge_launches.update,
    mutates_args=(),
    schema=f"(Tensor[] terms, {_LAYER}) -> (Tensor, Tensor, Tensor)",
)
adjoint = torch.library.custom_op(
    "deepmd_muon::edge_adjoint",
    edge_launches.adjoint,
    mutates_args=(),
    schema=f"(Tensor[] cotangents, Tensor[] terms, {_LAYER}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
tangent = torch.library.custom_op(
    "deepmd_muon::edge_tangent",
    edge_launches.tangent,
    mutates_args=(),
    schema=f"(Tensor[] terms, Tensor[] dots, {_LAYER}) -> (Tensor, Tensor, Tensor)",
)
gradient = torch.library.custom_op(
    "deepmd_muon::edge_gradient",
    edge_launches.gradient,
    mutates_args=(),
    schema=(
        f"(Tensor[] given, Tensor[] earlier, Tensor[] terms, Tensor[] dots, {_LAYER})"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


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
    return tuple(x.new_empty(x.shape) for x in (layer[1], *terms[:3]))
