"""Dense layers and activations of `model.nn` for TorchScript."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.nn.activation import (
    GELU_CUBIC,
    GELU_SCALE,
    SILUT_THRESHOLD,
    SOFTPLUS_LINEAR_ABOVE,
    activation,
)
from deepmd_muon.model.nn.networks import Network


class Act(NamedTuple):
    """An activation.

    Attributes
    ----------
    kind
        Its name, one for each function.
    threshold
        Where the tanh of `silut` begins, or `relu6` ends; other functions have none.
    """

    kind: str
    threshold: float


class Dense(NamedTuple):
    """One layer, y = f(x·matrix + bias)·idt + copies of x."""

    matrix: Tensor
    bias: Tensor
    idt: Tensor | None
    copies: int


def act_of(name: str) -> Act:
    """Return the activation that a DeePMD input means by `name`.

    Raises
    ------
    ModelError
        When the name is unknown.
    """
    activation(name)  # raises if the name is unknown
    kind, _, threshold = name.lower().partition(":")
    if kind == "relu6":
        return Act("relu", 6.0)
    kind = {"none": "linear", "gelu_tf": "gelu", "custom_silu": "silut"}.get(kind, kind)
    if threshold:
        return Act(kind, float(threshold))
    return Act(kind, SILUT_THRESHOLD if kind == "silut" else math.inf)


def dense_layers(network: Network) -> list[Dense]:
    """Return copies of a network's layers, with the last linear layer if it has one."""
    tensors = network.tensors
    copies = [*network.copies, 0][: len(tensors)]  # a last linear layer adds no copies
    return [
        Dense(
            matrix=layer.matrix.detach().clone(),
            bias=layer.bias.detach().clone(),
            idt=None if layer.idt is None else layer.idt.detach().clone(),
            copies=int(layer_copies),
        )
        for layer, layer_copies in zip(tensors, copies, strict=True)
    ]


def _silut_start(threshold: float) -> tuple[float, float]:
    """Return value and slope of SiLU at the threshold."""
    sigmoid = 1.0 / (1.0 + math.exp(-threshold))
    return threshold * sigmoid, sigmoid + threshold * sigmoid * (1.0 - sigmoid)


def _slope_of_gelu(h: Tensor, scale: float = GELU_SCALE, cubic: float = GELU_CUBIC) -> Tensor:
    """Return the derivative of the tanh form of GELU.

    TorchScript sees constants of modules only as defaults of arguments.
    """
    square = h * h
    t = torch.tanh(scale * h * (1.0 + cubic * square))
    inner = scale * (1.0 + 3.0 * cubic * square)
    return 0.5 * (1.0 + t) + 0.5 * h * (1.0 - t * t) * inner


def value_of(act: Act, h: Tensor) -> Tensor:
    """Return f(h) in a new tensor."""
    if act.kind == "tanh":
        if h.is_cuda or h.requires_grad:
            return torch.tanh(h)
        # On CPUs 2σ(2h) − 1 takes half the time of tanh and errs by 2e-16 at most.
        return (h * 2.0).sigmoid_().mul_(2.0).sub_(1.0)
    if act.kind == "sigmoid":
        return torch.sigmoid(h)
    if act.kind == "relu":
        return h.clamp(0.0, act.threshold)
    if act.kind == "softplus":
        return torch.nn.functional.softplus(h)
    if act.kind == "gelu":
        return torch.nn.functional.gelu(h, approximate="tanh")
    if act.kind == "silu":
        return torch.nn.functional.silu(h)
    if act.kind == "silut":
        # Few arguments ever reach the threshold. On CPUs looking for them costs less than a tanh of
        # all.
        if not h.is_cuda and h.numel() > 0 and float(h.detach().max()) < act.threshold:
            return torch.nn.functional.silu(h)
        start, rate = _silut_start(act.threshold)
        tail = torch.tanh(rate * (h - act.threshold)) + start
        return torch.where(h >= act.threshold, tail, torch.nn.functional.silu(h))
    assert act.kind == "linear"
    return h.clone()


def slope_of(
    act: Act, h: Tensor, value: Tensor, linear_above: float = SOFTPLUS_LINEAR_ABOVE
) -> Tensor:
    """Return f′(h), with f(h) known, in a new tensor."""
    if act.kind == "tanh":
        return 1.0 - value * value
    if act.kind == "sigmoid":
        return value * (1.0 - value)
    if act.kind == "relu":
        return ((h > 0.0) & (h < act.threshold)).to(h.dtype)
    if act.kind == "softplus":
        return torch.sigmoid(h).masked_fill_(h > linear_above, 1.0)
    if act.kind == "gelu":
        return _slope_of_gelu(h)
    if act.kind == "silu" or act.kind == "silut":
        sigmoid = torch.sigmoid(h)
        low = sigmoid * (1.0 + h * (1.0 - sigmoid))
        if act.kind == "silu":
            return low
        _, rate = _silut_start(act.threshold)
        tail = rate * (1.0 - torch.tanh(rate * (h - act.threshold)).square())
        return torch.where(h >= act.threshold, tail, low)
    assert act.kind == "linear"
    return torch.ones_like(h)


def _halves(x: Tensor) -> Tensor:
    """Return the rows of x `(rows, n)` in two batches, padded with a row of zeros if odd."""
    if x.shape[0] % 2 == 1:
        x = torch.nn.functional.pad(x, [0, 0, 0, 1])
    return x.reshape([2, x.shape[0] // 2, x.shape[1]])


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x·matrix, from x `(rows, n)` and matrix `(n, M)`.

    On CPUs in two batches: LAMMPS exports its own `dgemm_`, without vector instructions, and the
    linker gives it to torch.mm, addmm and products of one batch. Products of more batches call a
    function that only MKL has.
    """
    if x.is_cuda:
        return torch.mm(x, matrix)
    result = torch.bmm(_halves(x), matrix.expand([2, -1, -1]))
    return result.flatten(0, 1)[: x.shape[0]]


def add_product(other: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """Return other + x·matrix, from other `(M,)` or `(rows, M)`; see `product`."""
    if x.is_cuda:
        return torch.addmm(other, x, matrix)
    start = other if other.dim() == 1 else _halves(other)
    result = torch.baddbmm(start, _halves(x), matrix.expand([2, -1, -1]))
    return result.flatten(0, 1)[: x.shape[0]]


def accumulate_product(total: Tensor, x: Tensor, matrix: Tensor) -> None:
    """Add x·matrix to total `(rows, M)`, which is contiguous; see `product`."""
    if x.is_cuda:
        torch.addmm(total, x, matrix, out=total)
    elif x.shape[0] % 2 == 1:
        total.add_(product(x, matrix))
    else:
        halves = _halves(total)
        torch.baddbmm(halves, _halves(x), matrix.expand([2, -1, -1]), out=halves)


def output_of(layer: Dense, x: Tensor, value: Tensor) -> Tensor:
    """Return y `(rows, n_out)` = f(h)·idt + copies of x, from f(h) and x `(rows, n_in)`."""
    idt = layer.idt
    out = value if idt is None else value * idt
    if layer.copies == 1:
        out = out + x
    elif layer.copies == 2:
        out = out + torch.cat([x, x], dim=1)
    return out


def embed_rows(act: Act, layers: list[Dense], x: Tensor) -> Tensor:
    """Return a net's output and its derivative by column 0 of x `(rows, n)`: `(2, rows, M)`."""
    nrows = x.shape[0]
    x_dot = torch.zeros_like(x)
    x_dot[:, 0] = 1.0
    stack = torch.stack([x, x_dot])
    for layer in layers:
        n_in = stack.shape[2]
        z = product(stack.view(-1, n_in), layer.matrix)
        z = z.view(2, nrows, layer.matrix.shape[1])
        h = z[0].add_(layer.bias)
        if act.kind == "tanh" and not (h.is_cuda or h.requires_grad):
            # In place: σ(2h) as in value_of, (1 − tanh²)·dh as dh − tanh²·dh.
            value = h.mul_(2.0).sigmoid_().mul_(2.0).sub_(1.0)
            z[1].addcmul_(value.square(), z[1], value=-1.0)
            out = z
        else:
            value = value_of(act, h)
            out = torch.stack([value, slope_of(act, h, value).mul_(z[1])])
        idt = layer.idt
        if idt is not None:
            out = out * idt
        if layer.copies == 1:
            out += stack
        elif layer.copies == 2:
            out.view(2, nrows, 2, n_in).add_(stack.unsqueeze(2))
        stack = out
    return stack


def forward_layer(act: Act, layer: Dense, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return y `(rows, n_out)` and dy/dh without idt, from x `(rows, n_in)`."""
    h = add_product(layer.bias, x, layer.matrix)
    value = value_of(act, h)
    return output_of(layer, x, value), slope_of(act, h, value)


def adjoint_layer(layer: Dense, slope: Tensor, y_bar: Tensor) -> Tensor:
    """Return dE/dx from dE/dy and the slope that `forward_layer` returned."""
    idt = layer.idt
    h_bar = slope * y_bar if idt is None else slope * y_bar * idt
    x_bar = product(h_bar, layer.matrix.t())
    if layer.copies == 1:
        return x_bar + y_bar
    if layer.copies == 2:
        n_in = layer.matrix.shape[0]
        return x_bar + y_bar[:, :n_in] + y_bar[:, n_in:]
    return x_bar


def energy_and_slope(act: Act, layers: list[Dense], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E `(rows, 1)` of a network whose last layer is linear, and dE/dx like x."""
    slopes: list[Tensor] = []
    last = layers[-1]
    for layer in layers[:-1]:
        x, slope = forward_layer(act, layer, x)
        slopes.append(slope)
    adjoint = last.matrix.t().expand(x.shape[0], -1)
    # TorchScript knows no reversed().
    for index in range(len(slopes) - 1, -1, -1):
        adjoint = adjoint_layer(layers[index], slopes[index], adjoint)
    return add_product(last.bias, x, last.matrix), adjoint
