"""The `ener` fitting net: atomic energies and, in the same call, dE/dD in explicit form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepmd_muon.model.activation import Activation, activation
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.networks import Copies, LayerTensors, Network, NetworkCollection, Stream, dtype_of, unflatten
from deepmd_muon.model.registry import register_fitting


def _skip(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return copies of x side by side, as a residual layer adds them."""
    return torch.cat([x, x], dim=1) if copies == 2 else x


def _unskip(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Apply the transpose of `_skip`."""
    return x.view(x.shape[0], 2, -1).sum(1) if copies == 2 else x


class EnergyAndSlope(torch.autograd.Function):
    """E and dE/dx of a network with one output, with ONE backward pass for both.

    Forward: values go up the layers, the adjoint of E comes down. The gradient of Σ Ē·E + Σ ġ·dE/dx is that of
    Ē·E plus the derivative of E along ġ: so the backward pass sends ġ up as a tangent, and the adjoints that
    belong to tangents are the ones the forward pass already has.

    Arguments: activation, copies of every hidden layer, x `(n, dim)`, then matrix, bias, idt of every layer.
    """

    @staticmethod
    def forward(
        ctx: Any, f: Activation, copies: tuple[Copies, ...], x: torch.Tensor, *flat: torch.Tensor | None
    ) -> Any:
        """Return E `(n, 1)` and dE/dx `(n, dim)`."""
        *hidden, last = unflatten(flat)
        inputs, keeps = [x], []
        for layer, kind in zip(hidden, copies, strict=True):
            value, keep = f(torch.addmm(layer.bias, inputs[-1], layer.matrix))
            out = value if layer.idt is None else value * layer.idt
            inputs.append(out + _skip(inputs[-1], kind) if kind else out)
            keeps.append(keep)
        adjoints = [last.matrix.t().expand(x.shape[0], -1)]
        for layer, kind, keep in zip(reversed(hidden), reversed(copies), reversed(keeps), strict=True):
            above = adjoints[-1]
            h_bar = f.times_slope(keep, above if layer.idt is None else above * layer.idt)
            below = torch.mm(h_bar, layer.matrix.t())
            adjoints.append(below.add_(_unskip(above, kind)) if kind else below)
        ctx.activation, ctx.copies = f, copies
        ctx.save_for_backward(*inputs, *keeps, *adjoints[:-1], *flat)
        slope = adjoints[-1] if hidden else adjoints[-1].clone()
        return torch.addmm(last.bias, inputs[-1], last.matrix), slope

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, energy_cotangent: torch.Tensor, slope_cotangent: torch.Tensor) -> Any:
        """Return the cotangents of x and of every layer's tensors."""
        f: Activation = ctx.activation
        depth = len(ctx.copies)
        inputs, rest = ctx.saved_tensors[: depth + 1], ctx.saved_tensors[depth + 1 :]
        keeps, adjoints, flat = rest[:depth], rest[depth : 2 * depth], rest[2 * depth :]
        *hidden, last = unflatten(flat)
        tangents, before, moved = [slope_cotangent], [], []
        for layer, kind, keep in zip(hidden, ctx.copies, keeps, strict=True):
            before.append(torch.mm(tangents[-1], layer.matrix))
            moved.append(f.times_slope(keep, before[-1]))
            out = moved[-1] if layer.idt is None else moved[-1] * layer.idt
            tangents.append(out + _skip(tangents[-1], kind) if kind else out)
        last_matrix = torch.addmm(tangents[-1].sum(0).unsqueeze(1), inputs[-1].t(), energy_cotangent)
        gradients = [None, energy_cotangent.sum(0), last_matrix]
        down = torch.mm(energy_cotangent, last.matrix.t())
        for index in reversed(range(depth)):
            layer, keep, kind = hidden[index], keeps[index], ctx.copies[index]
            cotangent = torch.stack([down, adjoints[depth - 1 - index]])
            idt_gradient = None
            if layer.idt is not None:
                idt_gradient = torch.addcmul(f.value_of(keep) * down, moved[index], cotangent[1]).sum(0)
                cotangent *= layer.idt
            f.pull_back_(keep, before[index], cotangent)
            both = torch.cat([inputs[index], tangents[index]])
            gradients += [idt_gradient, cotangent[0].sum(0), torch.mm(both.t(), cotangent.flatten(0, 1))]
            below = torch.mm(cotangent[0], layer.matrix.t())
            down = below.add_(_unskip(down, kind)) if kind else below
        return (None, None, down, *reversed(gradients))


energy_and_slope: Callable[..., tuple[torch.Tensor, torch.Tensor]] = EnergyAndSlope.apply  # torch leaves it untyped


def _energy(f: Activation, copies: tuple[Copies, ...], x: torch.Tensor, layers: Sequence[LayerTensors]) -> torch.Tensor:
    """E alone, as `EnergyAndSlope` returns it, left to autograd."""
    for layer, kind in zip(layers[:-1], copies, strict=True):
        value = f.value(torch.addmm(layer.bias, x, layer.matrix))
        out = value if layer.idt is None else value * layer.idt
        x = out + _skip(x, kind) if kind else out
    return torch.addmm(layers[-1].bias, x, layers[-1].matrix)


@register_fitting("ener")
class EnergyFitting(torch.nn.Module):
    """One network per centre type from descriptor to atomic energy.

    Parameters
    ----------
    section
        The normalised `model.fitting_net` section.
    type_map
        Element symbols.
    dim_in
        Length of the descriptor.
    seed
        Used when the section names no seed of its own.

    Raises
    ------
    ModelError
        When frame or atomic parameters are asked for, or `atom_ener` does not fit `type_map`.
    """

    bias_atom_e: torch.Tensor

    def __init__(
        self,
        section: Mapping[str, Any],
        type_map: Sequence[str],
        dim_in: int,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        for key in ("numb_fparam", "numb_aparam"):
            if section[key]:
                raise ModelError(f"fitting_net.{key} must be 0, found {section[key]}")
        ntypes = len(type_map)
        self.vacuum = _vacuum(section["atom_ener"], ntypes)
        self.activation = activation(section["activation_function"])
        self.dtype = dtype_of(section["precision"])
        stream = Stream(seed if section["seed"] is None else section["seed"]).child(1)
        self.register_buffer("bias_atom_e", torch.zeros(ntypes, 1, dtype=torch.float64))
        self.filter_layers = NetworkCollection(
            [
                Network(
                    (dim_in, *section["neuron"]),
                    1,
                    timestep=section["resnet_dt"],
                    dtype=self.dtype,
                    stream=stream.child(index),
                )
                for index in range(ntypes)
            ]
        )
        flags = section["trainable"]
        self.requires_grad_(all(flags) if isinstance(flags, Sequence) else bool(flags))

    def forward(
        self, descriptor: torch.Tensor, type_counts: tuple[int, ...], *, force: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return atomic energies `(nreal,)` [eV] and dE/dD `(nreal, dim_in)`; see `Fitting`."""
        energies, slopes = [], []
        x = descriptor.to(self.dtype)
        for index, part in enumerate(torch.split(x, list(type_counts))):
            energy, slope = self._one_type(index, part, force=force)
            energies.append(energy.double() + self.bias_atom_e[index])
            slopes.append(slope)
        total = torch.cat(energies).squeeze(1)
        return total, torch.cat(slopes).to(descriptor.dtype) if force else None  # type: ignore[arg-type]  # no None then

    def _one_type(self, index: int, x: torch.Tensor, *, force: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Energies and slopes of the atoms of one type, the net's value in vacuum removed where one is set."""
        network = self.filter_layers[index]
        flat = [part for layer in network.tensors for part in layer]
        in_vacuum = self.vacuum[index] is not None
        rows = torch.cat([x, x.new_zeros(1, x.shape[1])]) if in_vacuum else x
        slope = None
        if force:
            energy, slope = energy_and_slope(self.activation, network.copies, rows, *flat)
        else:
            energy = _energy(self.activation, network.copies, rows, network.tensors)
        if in_vacuum:
            energy = energy[:-1] - energy[-1:]
        return energy, slope if slope is None or not in_vacuum else slope[:-1]


def _vacuum(atom_ener: Sequence[float | Sequence[float] | None], ntypes: int) -> tuple[float | None, ...]:
    """One energy or None per type from `atom_ener`, whose entries may be lists of one number."""
    if not atom_ener:
        return (None,) * ntypes
    if len(atom_ener) != ntypes:
        raise ModelError(f"atom_ener needs one entry (a number or null) per type: {ntypes}, found {len(atom_ener)}")
    return tuple(None if e is None else float(e[0] if isinstance(e, Sequence) else e) for e in atom_ener)
