"""The launches of `angle_launches` as operators of torch, which its compiler can record."""

from __future__ import annotations

import torch

from deepmd_muon.model.descriptor.dpa3 import angle_launches
from deepmd_muon.model.descriptor.dpa3.angle_launches import outputs

_LAYER = "Tensor weight, Tensor residual, int width, int message, float carry, str kind, float[] curve_of"

update = torch.library.custom_op(
    "deepmd_muon::angle_update",
    angle_launches.update,
    mutates_args=(),
    schema=f"(Tensor[] terms, {_LAYER}) -> (Tensor, Tensor)",
)
adjoint = torch.library.custom_op(
    "deepmd_muon::angle_adjoint",
    angle_launches.adjoint,
    mutates_args=(),
    schema=f"(Tensor message_bar, Tensor updated_bar, Tensor[] terms, {_LAYER}) -> (Tensor, Tensor, Tensor, Tensor)",
)
tangent = torch.library.custom_op(
    "deepmd_muon::angle_tangent",
    angle_launches.tangent,
    mutates_args=(),
    schema=f"(Tensor[] terms, Tensor[] dots, {_LAYER}) -> (Tensor, Tensor)",
)
gradient = torch.library.custom_op(
    "deepmd_muon::angle_gradient",
    angle_launches.gradient,
    mutates_args=(),
    schema=(
        f"(Tensor[] given, Tensor[] earlier, Tensor[] terms, Tensor[] dots, {_LAYER})"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)


@update.register_fake
def _(terms, *layer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
    return outputs(terms, *layer)


@adjoint.register_fake
def _(message_bar, updated_bar, terms, *layer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
    return tuple(x.new_empty(x.shape) for x in terms)


@tangent.register_fake
def _(terms, dots, *layer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
    return outputs(terms, *layer)


@gradient.register_fake
def _(given, earlier, terms, dots, *layer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
    return tuple(x.new_empty(x.shape) for x in (*terms[:3], *layer[:2]))
