"""A layer of attention on a CPU: values, forces and the gradient of a loss on forces, in closed form.

Torch's operations of `AttentionLayer` define the result. Their gradient's gradient takes several times as many passes
over memory as the formulas here. For a layer Z(X, E, θ) of features X, gates E and parameters θ, and a loss L:

1. `_up` computes Z;
2. `_down` pulls a cotangent of Z back to X and E, on the way to forces;
3. `_along` takes L's gradient by the results of 2 as tangents (Ẋ, Ė) and pushes them up the layer, which gives L's
   gradient by the cotangent of 2;
4. `_down_along` sends L's cotangent of Z down the layer together with the derivative of 2 along these tangents, which
   gives the gradients by X, E and θ. The adjoints that belong to tangents are those of 2.

Autograd meets 3 before 4, but has nothing to hand from one to the other. So the layer has two outputs more, which stand
for X and E in 2: their "gradients" are Ẋ and Ė.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """Settings of a layer.

    Attributes
    ----------
    scale
        Factor of the scores.
    shortest
        Rows of queries, keys and values are divided by their length, at least this; None leaves them as they are.
    eps
        Addend of the variance in the layer normalisation.
    """

    scale: float
    shortest: float | None
    eps: float


class Weights(NamedTuple):
    """Parameters of a layer: `(width, 3·attn)`, `(3·attn,)`, `(attn, width)`, and three of `(width,)`."""

    in_matrix: Tensor
    in_bias: Tensor
    out_matrix: Tensor
    out_bias: Tensor
    norm_scale: Tensor
    norm_bias: Tensor


class Values(NamedTuple):
    """Tensors that `_up` computes.

    Attributes
    ----------
    parts
        Queries, keys and values, rescaled `(3, nreal, ncolumns, attn)`.
    inverse
        The factors that rescaled them `(3, nreal, ncolumns, 1)`; None without.
    soft, gated
        Softmax P and A = P·E `(nreal, ncolumns, ncolumns)`.
    mixed
        A·values `(nreal, ncolumns, attn)`.
    normed, spread
        Normalised features before scale and bias `(nreal, ncolumns, width)`, and 1/deviation `(nreal, ncolumns, 1)`.
    """

    parts: Tensor
    inverse: Tensor | None
    soft: Tensor
    gated: Tensor
    mixed: Tensor
    normed: Tensor
    spread: Tensor


class Adjoints(NamedTuple):
    """Tensors that `_down` computes: cotangents of the layer's tensors, and of raw queries, keys and values.

    `norm_turn`, `soft_turn` and `part_turn` are the sums that normalisation, softmax and rescaling subtract
    `(…, ncolumns, 1)`.
    """

    above: Tensor
    summed: Tensor
    norm_turn: Tensor
    mixed: Tensor
    gated: Tensor
    scores: Tensor
    soft_turn: Tensor
    raw: Tensor
    part_turn: Tensor | None


class Tangents(NamedTuple):
    """Tensors that `_along` computes: derivatives of the layer's tensors; `_turn` as in `Adjoints`."""

    x: Tensor
    parts: Tensor
    part_turn: Tensor | None
    soft: Tensor
    gated: Tensor
    mixed: Tensor
    normed: Tensor
    norm_turn: Tensor


def _up(form: Form, w: Weights, x: Tensor, gate: Tensor, mask: Tensor) -> tuple[Tensor, Values]:
    """Return Z like X `(nreal, ncolumns, width)`, and the values on the way."""
    parts = _project(x, w, w.in_bias)
    inverse = None
    if form.shortest is not None:
        inverse = torch.linalg.vector_norm(parts, dim=-1, keepdim=True).clamp_min_(form.shortest).reciprocal_()
        parts *= inverse
    query, key, value = parts
    soft = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=form.scale).softmax(-1)
    gated = soft * gate
    mixed = torch.bmm(gated, value)
    summed = torch.addmm(w.out_bias, mixed.flatten(0, 1), w.out_matrix).view_as(x).add_(x)
    normed, _, spread = torch.native_layer_norm(summed, [x.shape[-1]], None, None, form.eps)
    z = torch.addcmul(w.norm_bias, normed, w.norm_scale)
    return z, Values(parts, inverse, soft, gated, mixed, normed, spread)


def _down(form: Form, w: Weights, v: Values, gate: Tensor, above: Tensor) -> tuple[Tensor, Tensor, Adjoints]:
    """Return the cotangents of X and of E from that of Z, and those on the way."""
    query, key, value = v.parts
    summed, norm_turn = _unnormalise(v, above * w.norm_scale)
    mixed = _times(summed, w.out_matrix.t())
    gated = torch.bmm(mixed, value.transpose(1, 2))
    scores = v.gated * gated
    soft_turn = scores.sum(-1, keepdim=True)
    scores.addcmul_(v.soft, soft_turn, value=-1.0)
    parts = torch.empty_like(v.parts)
    torch.bmm(scores, key, out=parts[0])
    torch.bmm(scores.transpose(1, 2), query, out=parts[1])
    parts[:2] *= form.scale
    torch.bmm(v.gated.transpose(1, 2), mixed, out=parts[2])
    raw, part_turn = _unscale(v, parts)
    adjoints = Adjoints(above, summed, norm_turn, mixed, gated, scores, soft_turn, raw, part_turn)
    return _unproject(raw, w, summed.clone()), (v.soft * gated).sum_to_size(gate.shape), adjoints


def _along(
    form: Form, w: Weights, v: Values, gate: Tensor, x: Tensor, moved_gate: Tensor | None
) -> tuple[Tensor, Tangents]:
    """Return the derivative of Z along tangents of X and E, and those on the way."""
    query, key, value = v.parts
    parts, part_turn = _unscale(v, _project(x, w, None))
    scores = torch.bmm(parts[0], key.transpose(1, 2)).baddbmm_(query, parts[1].transpose(1, 2))
    scores *= form.scale
    soft = scores.sub_((v.soft * scores).sum(-1, keepdim=True)).mul_(v.soft)
    gated = soft * gate
    if moved_gate is not None:
        gated.addcmul_(v.soft, moved_gate)
    mixed = torch.bmm(gated, value).baddbmm_(v.gated, parts[2])
    summed = torch.addmm(x.flatten(0, 1), mixed.flatten(0, 1), w.out_matrix).view_as(x)
    normed, norm_turn = _unnormalise(v, summed)
    return normed * w.norm_scale, Tangents(x, parts, part_turn, soft, gated, mixed, normed, norm_turn)


def _down_along(
    form: Form, w: Weights, v: Values, gate: Tensor, above: Tensor | None, a: Adjoints, t: Tangents
) -> tuple[Tensor, Tensor, Adjoints]:
    """Return the cotangents of X and E, and those on the way, where `above` is that of Z.

    They contain the derivatives of the adjoints `a` along the tangents `t`.
    """
    query, key, value = v.parts
    summed = _bend_normalisation(form.eps, v, a, t)
    if above is not None:
        summed += _unnormalise(v, above * w.norm_scale)[0]
    mixed = _times(summed, w.out_matrix.t())
    gated = torch.bmm(mixed, value.transpose(1, 2)).baddbmm_(a.mixed, t.parts[2].transpose(1, 2))
    scores = (t.gated * a.gated).addcmul_(v.gated, gated)
    turn = scores.sum(-1, keepdim=True)
    scores.addcmul_(t.soft, a.soft_turn, value=-1.0).addcmul_(v.soft, turn, value=-1.0)
    parts = torch.empty_like(v.parts)
    torch.bmm(scores, key, out=parts[0]).baddbmm_(a.scores, t.parts[1])
    torch.bmm(scores.transpose(1, 2), query, out=parts[1]).baddbmm_(a.scores.transpose(1, 2), t.parts[0])
    parts[:2] *= form.scale
    torch.bmm(t.gated.transpose(1, 2), a.mixed, out=parts[2]).baddbmm_(v.gated.transpose(1, 2), mixed)
    of_gate = (t.soft * a.gated).addcmul_(v.soft, gated).sum_to_size(gate.shape)
    raw, part_turn = _unscale(v, parts)
    _bend_scaling_(raw, v, a, t)
    found = Adjoints(a.above if above is None else above, summed, turn, mixed, gated, scores, turn, raw, part_turn)
    return _unproject(raw, w, summed.clone()), of_gate, found


def _gradients(x: Tensor, v: Values, above: Tensor | None, down: Adjoints) -> list[Tensor]:
    """Return the gradients of `Weights` that belong to the layer's values."""
    raw = down.raw.flatten(1, 2)
    rows = x.flatten(0, 1).t()
    summed = down.summed.flatten(0, 1)
    gradients = [
        torch.cat([torch.mm(rows, part) for part in raw], dim=1),
        raw.sum(1).flatten(),
        torch.mm(v.mixed.flatten(0, 1).t(), summed),
        summed.sum(0),
    ]
    if above is None:
        return [*gradients, torch.zeros_like(gradients[3]), torch.zeros_like(gradients[3])]
    return [*gradients, (above * v.normed).sum((0, 1)), above.sum((0, 1))]


def _add_gradients_along(gradients: list[Tensor], a: Adjoints, t: Tangents) -> None:
    """Add what belongs to the tangents."""
    rows = t.x.flatten(0, 1).t()
    for part, raw in zip(gradients[0].chunk(3, dim=1), a.raw.flatten(1, 2), strict=True):
        part.addmm_(rows, raw)
    gradients[2].addmm_(t.mixed.flatten(0, 1).t(), a.summed.flatten(0, 1))
    gradients[4] += (a.above * t.normed).sum((0, 1))


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x·matrix for x `(nreal, ncolumns, n)`."""
    return torch.mm(x.flatten(0, 1), matrix).view(*x.shape[:2], matrix.shape[1])


def _project(x: Tensor, w: Weights, bias: Tensor | None) -> Tensor:
    """Return x times the three parts of the first matrix `(3, nreal, ncolumns, attn)`."""
    rows, matrices = x.flatten(0, 1), w.in_matrix.chunk(3, dim=1)
    out = x.new_empty(3, len(rows), matrices[0].shape[1])
    for number, matrix in enumerate(matrices):
        if bias is None:
            torch.mm(rows, matrix, out=out[number])
        else:
            torch.addmm(bias.chunk(3)[number], rows, matrix, out=out[number])
    return out.view(3, *x.shape[:2], out.shape[2])


def _unproject(raw: Tensor, w: Weights, start: Tensor) -> Tensor:
    """Add the three parts times their transposed matrices to `start`, in place."""
    rows = start.flatten(0, 1)
    for part, matrix in zip(raw.flatten(1, 2), w.in_matrix.chunk(3, dim=1), strict=True):
        rows.addmm_(part, matrix.t())
    return start


def _unscale(v: Values, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Apply the derivative of the rescaling, a symmetric map, to x, which is overwritten; also return x·parts."""
    if v.inverse is None:
        return x, None
    turn = (v.parts * x).sum(-1, keepdim=True)
    return x.addcmul_(v.parts, turn, value=-1.0).mul_(v.inverse), turn


def _bend_scaling_(raw: Tensor, v: Values, a: Adjoints, t: Tangents) -> None:
    """Add the derivative of `_unscale` along the tangents, applied to the adjoints.

    With y the rescaled row, r its factor, ẏ its tangent, h̄ the cotangent of the raw row and both sums `_unscale` found,
    it is −(ẏ·h̄)·y − r·turn(a)·ẏ − r·turn(t)·h̄.
    """
    if v.inverse is None or a.part_turn is None or t.part_turn is None:
        return
    raw.addcmul_(v.parts, (t.parts * a.raw).sum(-1, keepdim=True), value=-1.0)
    raw.addcmul_(t.parts, a.part_turn * v.inverse, value=-1.0)
    raw.addcmul_(a.raw, t.part_turn * v.inverse, value=-1.0)


def _unnormalise(v: Values, x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the derivative of the normalisation, a symmetric map, to x; also return the mean of x·normed."""
    turn = (v.normed * x).mean(-1, keepdim=True)
    out = torch.addcmul(x, v.normed, turn, value=-1.0)
    return out.sub_(x.mean(-1, keepdim=True)).mul_(v.spread), turn


def _bend_normalisation(eps: float, v: Values, a: Adjoints, t: Tangents) -> Tensor:
    """Return the derivative of `_unnormalise` along the tangents, applied to the adjoints.

    Like `_bend_scaling_` with means, and eps·r⁴·turn(a)·turn(t) more in the first factor: the mean of y² is
    1 − eps·r².
    """
    first = (t.normed * a.summed).mean(-1, keepdim=True)
    first.addcmul_(a.norm_turn * t.norm_turn, v.spread.pow(4), value=eps)
    out = (v.normed * first.neg_()).addcmul_(t.normed, a.norm_turn * v.spread, value=-1.0)
    return out.addcmul_(a.summed, t.norm_turn * v.spread, value=-1.0)


@dataclass
class _Record:
    """Adjoints and tangents that the derivative of forces hands to the derivative of the layer."""

    adjoints: Adjoints | None = None
    tangents: Tangents | None = None


class _Layer(torch.autograd.Function):
    """The layer, its second and third output standing for X and E in `_Pulled`."""

    @staticmethod
    def forward(ctx: Any, form: Form, x: Tensor, gate: Tensor, mask: Tensor, *weights: Tensor) -> Any:
        """Return Z and the two stand-ins."""
        z, values = _up(form, Weights(*weights), x, gate, mask)
        stand_ins = x.new_zeros(()).expand_as(x), gate.new_zeros(()).expand_as(gate)
        ctx.form, ctx.record = form, _Record()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gate, *weights, *stand_ins, *values)
        return z, *stand_ins

    @staticmethod
    def backward(ctx: Any, above: Tensor | None, moved: Tensor | None, moved_gate: Tensor | None) -> Any:
        """Return cotangents of X and E for forces; without a further derivative those of all parameters, too."""
        x, gate, *rest = ctx.saved_tensors
        w, stand_ins, v = Weights(*rest[:6]), rest[6:8], Values(*rest[8:])
        if torch.is_grad_enabled():
            if moved is not None or moved_gate is not None:
                raise RuntimeError("a layer of attention has no third derivative")
            assert above is not None
            of_x, of_gate = _pull(ctx.form, ctx.record, *stand_ins, above, gate, *w, *v)
            return None, of_x, of_gate, None, *[None] * len(w)
        if moved is None:
            assert above is not None
            of_x, of_gate, down = _down(ctx.form, w, v, gate, above)
            return None, of_x, of_gate, None, *_gradients(x, v, above, down)
        a, t = ctx.record.adjoints, ctx.record.tangents
        ctx.record.adjoints = ctx.record.tangents = None
        if a is None or t is None or t.x.data_ptr() != moved.data_ptr():
            raise RuntimeError("only one derivative of a layer of attention can be differentiated again")
        of_x, of_gate, down = _down_along(ctx.form, w, v, gate, above, a, t)
        gradients = _gradients(x, v, above, down)
        _add_gradients_along(gradients, a, t)
        return None, of_x, of_gate, None, *gradients


class _Pulled(torch.autograd.Function):
    """`_down`, whose derivative is `_along`."""

    @staticmethod
    def forward(
        ctx: Any, form: Form, record: _Record, x: Tensor, gate_: Tensor, above: Tensor, gate: Tensor, *rest: Tensor
    ) -> Any:
        """Return the cotangents of X and E."""
        w, v = Weights(*rest[:6]), Values(*rest[6:])
        of_x, of_gate, adjoints = _down(form, w, v, gate, above)
        ctx.form, ctx.record = form, record
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gate, *rest, *adjoints)
        return of_x, of_gate

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, x: Tensor | None, moved_gate: Tensor | None) -> Any:
        """Return the tangents as "gradients" of the stand-ins, and the gradient by the cotangent of Z."""
        gate, *rest = ctx.saved_tensors
        w, v, a = Weights(*rest[:6]), Values(*rest[6:13]), Adjoints(*rest[13:])
        x = torch.zeros_like(a.summed) if x is None else x.contiguous()
        of_above, tangents = _along(ctx.form, w, v, gate, x, moved_gate)
        ctx.record.adjoints, ctx.record.tangents = a, tangents
        return None, None, x, moved_gate, of_above, *[None] * (1 + len(rest))


# torch leaves `apply` untyped
_pull: Callable[..., tuple[Tensor, Tensor]] = _Pulled.apply
_layer: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Layer.apply


def attention_layer(form: Form, weights: Weights, x: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
    """Return the features behind a layer of attention `(nreal, ncolumns, width)`.

    Forces may be differentiated once; in a pass that keeps a graph for that, parameters get no gradient.

    Parameters
    ----------
    form, weights
        Settings and parameters of the layer.
    x
        Features `(nreal, ncolumns, width)`.
    gate
        Factor of the softmax, of a shape that broadcasts to `(nreal, ncolumns, ncolumns)`.
    mask
        Addend of the scores `(nreal, 1, ncolumns)`.
    """
    return _layer(form, x, gate, mask, *weights)[0]
