"""The launches of `angle_launches` as operators of torch, which its compiler can record."""

from __future__ import annotations

from deepmd_muon.model.descriptor.dpa3 import angle_launches
from deepmd_muon.model.descriptor.dpa3.angle_launches import outputs
from deepmd_muon.model.descriptor.dpa3.launching import operator

_LAYER = "Tensor weight, Tensor residual, Tensor reach, int width, int message, float carry, str kind, float[] curve_of"

update = operator("angle_update", angle_launches.update, f"Tensor[] terms, {_LAYER}", 2)
adjoint = operator(
    "angle_adjoint", angle_launches.adjoint, f"Tensor message_bar, Tensor updated_bar, Tensor[] terms, {_LAYER}", 4
)
tangent = operator("angle_tangent", angle_launches.tangent, f"Tensor[] terms, Tensor[] dots, {_LAYER}", 2)
gradient = operator(
    "angle_gradient",
    angle_launches.gradient,
    f"Tensor[] given, Tensor[] earlier, Tensor[] terms, Tensor[] dots, {_LAYER}",
    5,
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
