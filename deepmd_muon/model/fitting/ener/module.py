"""The `ener` fitting net: atomic energies and, in the same call, dE/dD in explicit form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepmd_muon.model.activation import Activation, activation
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.fitting.ener.settings import EnerSettings
from deepmd_muon.model.networks import (
    Copies,
    LayerTensors,
    Network,
    NetworkCollection,
    SeedPath,
    Stream,
    dtype_of,
    unflatten,
)


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


class EnergyFitting(torch.nn.Module):
    """Networks from descriptor to atomic energy: one for each centre type, or one for all.

    Parameters
    ----------
    settings
        Widths, activation, precision, vacuum energies.
    type_map
        Element symbols.
    dim_in
        Length of the descriptor.
    mixed_types
        One network for all types. Its weights then start as deepmd-kit's from the same seed.
    seed
        Used when the settings name no seed of their own.

    Raises
    ------
    ModelError
        When `atom_ener` does not fit `type_map`.
    """

    bias_atom_e: torch.Tensor
    case_embd: torch.Tensor | None

    def __init__(
        self,
        settings: EnerSettings,
        type_map: Sequence[str],
        dim_in: int,
        mixed_types: bool = False,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        ntypes = len(type_map)
        self.mixed_types = mixed_types
        self.vacuum = _vacuum(settings.atom_ener, ntypes)
        self.activation = activation(settings.activation_function)
        self.dtype = dtype_of(settings.precision)
        own = seed if settings.seed is None else settings.seed
        stream: Stream | SeedPath = SeedPath(own) if mixed_types else Stream(own).child(1)
        self.register_buffer("bias_atom_e", torch.zeros(ntypes, 1, dtype=torch.float64))
        branches = settings.dim_case_embd
        self.register_buffer("case_embd", torch.zeros(branches, dtype=self.dtype) if branches else None)
        self.filter_layers = NetworkCollection(
            [
                Network(
                    (dim_in + branches, *settings.neuron),
                    1,
                    timestep=settings.resnet_dt,
                    dtype=self.dtype,
                    stream=stream.child(index),
                )
                for index in range(1 if mixed_types else ntypes)
            ]
        )
        flags = settings.trainable
        self.requires_grad_(all(flags) if isinstance(flags, tuple) else flags)

    def forward(
        self, descriptor: torch.Tensor, type_counts: tuple[int, ...], *, force: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return atomic energies `(nreal,)` [eV] and dE/dD `(nreal, dim_in)`; see `Fitting`."""
        x = self._with_branch(descriptor.to(self.dtype))
        energy, slope = (self._one_net if self.mixed_types else self._net_per_type)(x, type_counts, force=force)
        energy = energy + torch.cat([bias.expand(n) for bias, n in zip(self.bias_atom_e, type_counts, strict=True)])
        if slope is None:
            return energy, None
        return energy, slope[:, : descriptor.shape[1]].to(descriptor.dtype)

    def _with_branch(self, x: torch.Tensor) -> torch.Tensor:
        """Append the row that says which branch of a multi-task model this is."""
        return x if self.case_embd is None else torch.cat([x, self.case_embd.expand(len(x), -1)], dim=1)

    def _vacuum_row(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's input of an atom without descriptor `(1, columns of x)`."""
        branches = 0 if self.case_embd is None else len(self.case_embd)
        return self._with_branch(x.new_zeros(1, x.shape[1] - branches))

    def _one_net(
        self, x: torch.Tensor, type_counts: tuple[int, ...], *, force: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Energies and slopes of all atoms from the one network.

        As in deepmd-kit, one given vacuum energy removes the network's value in vacuum from the atoms of all types.
        """
        energy, slope = self._evaluate(self.filter_layers[0], x, force=force)
        if any(value is not None for value in self.vacuum):
            energy = energy - self._evaluate(self.filter_layers[0], self._vacuum_row(x), force=False)[0]
        return energy.double().squeeze(1), slope

    def _net_per_type(
        self, x: torch.Tensor, type_counts: tuple[int, ...], *, force: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Energies and slopes, each type by its own network."""
        energies, slopes = [], []
        for index, part in enumerate(torch.split(x, list(type_counts))):
            energy, slope = self._one_type(index, part, force=force)
            energies.append(energy.double())
            slopes.append(slope)
        total = torch.cat(energies).squeeze(1)
        return total, torch.cat(slopes) if force else None  # type: ignore[arg-type]  # no None then

    def _one_type(self, index: int, x: torch.Tensor, *, force: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Energies and slopes of the atoms of one type, the net's value in vacuum removed where one is set."""
        in_vacuum = self.vacuum[index] is not None
        rows = torch.cat([x, self._vacuum_row(x)]) if in_vacuum else x
        energy, slope = self._evaluate(self.filter_layers[index], rows, force=force)
        if in_vacuum:
            energy = energy[:-1] - energy[-1:]
        return energy, slope if slope is None or not in_vacuum else slope[:-1]

    def _evaluate(
        self, network: Network, rows: torch.Tensor, *, force: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a network's output `(nrows, 1)` and, with `force`, its slope like `rows`."""
        if not force:
            return _energy(self.activation, network.copies, rows, network.tensors), None
        flat = [part for layer in network.tensors for part in layer]
        return energy_and_slope(self.activation, network.copies, rows, *flat)


def _vacuum(atom_ener: Sequence[float | None], ntypes: int) -> tuple[float | None, ...]:
    """One energy or None per type from `atom_ener`."""
    if not atom_ener:
        return (None,) * ntypes
    if len(atom_ener) != ntypes:
        raise ModelError(f"atom_ener needs one entry (a number or null) per type: {ntypes}, found {len(atom_ener)}")
    return tuple(atom_ener)
