"""The `ener` fitting net: atomic energies and, in the same call, dE/dD in explicit form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.fitting.ener.settings import EnerSettings
from deepmd_muon.model.nn import layers, triton_support
from deepmd_muon.model.nn.activation import Activation, activation
from deepmd_muon.model.nn.networks import (
    Copies,
    LayerTensors,
    Network,
    NetworkCollection,
    SeedPath,
    Stream,
    dtype_of,
    unflatten,
)
from deepmd_muon.model.structures import Structures


class _Tape(NamedTuple):
    """Tensors for one network's backward pass: each layer's input, saved activation, and adjoint of its output."""

    inputs: list[Tensor]
    keeps: list[Tensor]
    adjoints: list[Tensor]


def _up_and_down(
    f: Activation,
    copies: Sequence[Copies],
    x: Tensor,
    layers_of: Sequence[LayerTensors],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, _Tape]:
    """Return E `(n, 1)` and dE/dx `(n, dim)`: values go up the layers, the adjoint of E comes down to `out`."""
    *hidden, last = layers_of
    inputs, keeps = [x], []
    for layer, kind in zip(hidden, copies, strict=True):
        value, keep = layers.forward(f, layer, inputs[-1], kind)
        inputs.append(value)
        keeps.append(keep)
    adjoints = [last.matrix.t().expand(x.shape[0], -1)]
    down = reversed(list(enumerate(zip(hidden, copies, keeps, strict=True))))
    for index, (layer, kind, keep) in down:
        above = adjoints[-1]
        h_bar = layers.slope(f, keep, layer.idt, above)
        adjoints.append(layers.down(h_bar, layer, above, kind, None if index else out))
    slope = adjoints.pop()
    if not hidden:
        slope = slope.clone() if out is None else out.copy_(slope)
    return torch.addmm(last.bias, inputs[-1], last.matrix), slope, _Tape(inputs, keeps, adjoints)


def _pull(
    f: Activation,
    copies: Sequence[Copies],
    tape: _Tape,
    layers_of: Sequence[LayerTensors],
    of_energy: Tensor,
    of_slope: Tensor,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the cotangents of x and of every layer's tensors from those of E and dE/dx."""
    *hidden, last = layers_of
    inputs, keeps, adjoints = tape
    tangents, before = [of_slope], []
    for layer, kind, keep in zip(hidden, copies, keeps, strict=True):
        before.append(torch.mm(tangents[-1], layer.matrix))
        tangents.append(layers.tangent(f, keep, layer.idt, before[-1], tangents[-1], kind))
    last_matrix = torch.addmm(tangents[-1].sum(0).unsqueeze(1), inputs[-1].t(), of_energy)
    gradients = [None, of_energy.sum(0), last_matrix]
    down = torch.mm(of_energy, last.matrix.t())
    for index in reversed(range(len(hidden))):
        layer, keep, kind = hidden[index], keeps[index], copies[index]
        adjoint = adjoints[len(hidden) - 1 - index]
        pair, of_bias, of_idt = layers.cotangents(f, keep, layer.idt, before[index], down, adjoint)
        both = torch.cat([inputs[index], tangents[index]])
        gradients += [of_idt, of_bias, torch.mm(both.t(), pair.flatten(0, 1))]
        down = layers.down(pair[0], layer, down, kind)
    return down, gradients[::-1]


class EnergyAndSlope(torch.autograd.Function):
    """E and dE/dx of networks with one output, with ONE backward pass for both.

    Forward: values go up the layers, the adjoint of E comes down. The gradient of Σ Ē·E + Σ ġ·dE/dx is that of
    Ē·E plus the derivative of E along ġ: so the backward pass sends ġ up as a tangent, and the adjoints that
    belong to tangents are the ones the forward pass already has. On a GPU the networks overlap.

    Arguments: activation, copies of every hidden layer, rows of each network, x `(n, dim)`, then matrix, bias, idt of
    every layer of every network.
    """

    @staticmethod
    def forward(
        ctx: Any,
        f: Activation,
        copies: tuple[Copies, ...],
        counts: tuple[int, ...],
        x: Tensor,
        *flat: Tensor | None,
    ) -> Any:
        """Return E `(n, 1)` and dE/dx `(n, dim)`."""
        energies, saved = [], []
        whole = x.new_empty(x.shape)  # networks write their rows of it
        rows = whole.split(counts)
        with triton_support.Branches(x.device, len(counts)) as branches:
            for number, (part, own) in enumerate(
                zip(x.split(counts), unflatten(flat, len(counts)), strict=True)
            ):
                with branches.chain(number):
                    energy, _, tape = _up_and_down(f, copies, part, own, rows[number])
                    energies.append(energy)
                    saved += [*tape.inputs[1:], *tape.keeps, *tape.adjoints]
        ctx.activation, ctx.copies, ctx.counts = f, copies, counts
        ctx.save_for_backward(x, *flat, *saved)
        return layers.joined(energies), whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, energy_cotangent: Tensor, slope_cotangent: Tensor) -> Any:
        """Return the cotangents of x and of every layer's tensors."""
        f, copies, counts, depth = ctx.activation, ctx.copies, ctx.counts, len(ctx.copies)
        each = 3 * (depth + 1)
        x, *others = ctx.saved_tensors
        networks, saved = (
            unflatten(others[: each * len(counts)], len(counts)),
            iter(others[each * len(counts) :]),
        )
        cotangents = energy_cotangent.split(counts), slope_cotangent.split(counts)
        parts = zip(x.split(counts), networks, *cotangents, strict=True)
        downs: list[Tensor] = []
        gradients: list[Tensor | None] = []
        with triton_support.Branches(x.device, len(counts)) as branches:
            for number, (part, own, of_energy, of_slope) in enumerate(parts):
                with branches.chain(number):
                    inputs, keeps, adjoints = (
                        [next(saved) for _ in range(depth)] for _ in range(3)
                    )
                    tape = _Tape([part, *inputs], keeps, adjoints)
                    down, mine = _pull(f, copies, tape, own, of_energy, of_slope)
                    downs.append(down)
                    gradients += mine
        return (None, None, None, layers.joined(downs), *gradients)


energy_and_slope: Callable[..., tuple[Tensor, Tensor]] = (
    EnergyAndSlope.apply
)  # torch leaves it untyped


class EnergyFitting(torch.nn.Module):
    """Networks from descriptor to atomic energy: one for each centre type, or one for all.

    The weights of one for all start as deepmd-kit's from the same seed. Arguments as in `Fitting`.

    Raises
    ------
    ModelError
        When `atom_ener` does not fit `type_map`.
    """

    type_axes: ClassVar[Mapping[str, int]] = {"bias_atom_e": 0}
    bias_atom_e: Tensor
    case_embd: Tensor | None
    fparam_avg: Tensor | None
    fparam_inv_std: Tensor | None
    aparam_avg: Tensor | None
    aparam_inv_std: Tensor | None
    default_fparam_tensor: Tensor | None

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
        self.settings = settings
        self.mixed_types = mixed_types
        self.vacuum = settings.atom_ener or (None,) * ntypes
        if len(self.vacuum) != ntypes:
            raise ModelError(
                f"atom_ener needs one entry (a number or null) per type: {ntypes}, found {len(self.vacuum)}"
            )
        self.activation = activation(settings.activation_function)
        self.dtype = dtype_of(settings.precision)
        own = seed if settings.seed is None else settings.seed
        stream: Stream | SeedPath = SeedPath(own) if mixed_types else Stream(own).child(1)
        self.register_buffer("bias_atom_e", torch.zeros(ntypes, 1, dtype=torch.float64))
        branches = settings.dim_case_embd
        self.register_buffer(
            "case_embd", torch.zeros(branches, dtype=self.dtype) if branches else None
        )
        for name, number in (("fparam", settings.numb_fparam), ("aparam", settings.numb_aparam)):
            self.register_buffer(
                f"{name}_avg", torch.zeros(number, dtype=self.dtype) if number else None
            )
            self.register_buffer(
                f"{name}_inv_std", torch.ones(number, dtype=self.dtype) if number else None
            )
        default = (
            None
            if settings.default_fparam is None
            else torch.tensor(settings.default_fparam, dtype=self.dtype)
        )
        self.register_buffer("default_fparam_tensor", default)
        self.dim_in = dim_in
        self.numb_parameters = sum(settings.net_parameters.values())
        self.filter_layers = NetworkCollection(
            [
                Network(
                    (dim_in + self.numb_parameters + branches, *settings.neuron),
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

    def parameters_of(self, structures: Structures) -> Tensor | None:
        """Return the parameters of every sorted atom; see `Conditioned`."""
        found = []
        numbers = self.settings.net_parameters
        if "fparam" in numbers:
            fparam = structures.fparam
            if fparam is None and self.default_fparam_tensor is not None:
                fparam = self.default_fparam_tensor.double().expand(structures.nframes, -1)
            _check_parameters("fparam", fparam, numbers["fparam"], "of each frame")
            assert fparam is not None
            found.append(fparam[structures.sorted_frame])
        if "aparam" in numbers:
            _check_parameters("aparam", structures.aparam, numbers["aparam"], "of each atom")
            assert structures.aparam is not None
            found.append(structures.aparam.flatten(0, 1)[structures.order])
        return torch.cat(found, dim=1) if found else None

    def set_parameter_statistics(self, name: str, mean: Tensor, deviation: Tensor) -> None:
        """Standardise parameters; see `Conditioned`."""
        getattr(self, f"{name}_avg").copy_(mean)
        getattr(self, f"{name}_inv_std").copy_(1.0 / deviation)

    def forward(
        self,
        descriptor: Tensor,
        type_counts: tuple[int, ...],
        *,
        force: bool = True,
        parameters: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return atomic energies `(nreal,)` [eV] and dE/dD `(nreal, dim_in)`; see `Fitting` and `Conditioned`."""
        x = descriptor.to(self.dtype)
        if parameters is not None:
            means, scales = self.scaling()
            x = torch.cat(
                [x, (parameters.to(self.dtype) - torch.cat(means)) * torch.cat(scales)], dim=1
            )
        energy, slope = self._evaluate_all(self._with_branch(x), type_counts, force=force)
        energy = energy + torch.cat(
            [bias.expand(n) for bias, n in zip(self.bias_atom_e, type_counts, strict=True)]
        )
        if slope is None:
            return energy, None
        return energy, slope[:, : descriptor.shape[1]].to(descriptor.dtype)

    def _with_branch(self, x: Tensor) -> Tensor:
        """Append the row that says which branch of a multi-task model this is."""
        return (
            x
            if self.case_embd is None
            else torch.cat([x, self.case_embd.expand(len(x), -1)], dim=1)
        )

    def scaling(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return means and inverse deviations of the parameters that the net reads."""
        names = self.settings.net_parameters
        return [getattr(self, f"{name}_avg") for name in names], [
            getattr(self, f"{name}_inv_std") for name in names
        ]

    def _vacuum_rows(self, x: Tensor) -> Tensor:
        """Return the network's input of atoms without descriptor: one row, or one of each atom with its parameters."""
        if not self.numb_parameters:
            return self._with_branch(x.new_zeros(1, self.dim_in))
        return torch.cat([x.new_zeros(len(x), self.dim_in), x[:, self.dim_in :]], dim=1)

    def _evaluate_all(
        self, x: Tensor, type_counts: tuple[int, ...], *, force: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return energies and slopes of all atoms, the networks' values in vacuum removed where they are given."""
        networks, in_vacuum = self.filter_layers, [value is not None for value in self.vacuum]
        if self.mixed_types:
            energy, slope = self._evaluate(networks[0], x, force=force)
            if any(in_vacuum):  # as in deepmd-kit, from the atoms of all types
                energy = energy - self._evaluate(networks[0], self._vacuum_rows(x), force=False)[0]
            return energy.double().squeeze(1), slope
        if force and not any(in_vacuum):
            flat = [part for index in range(len(type_counts)) for part in networks[index].flat]
            energy, slope = energy_and_slope(
                self.activation, networks[0].copies, type_counts, x, *flat
            )
            return energy.double().squeeze(1), slope
        energies, slopes = [], []
        for index, part in enumerate(torch.split(x, list(type_counts))):
            rows = torch.cat([part, self._vacuum_rows(part)]) if in_vacuum[index] else part
            energy, slope = self._evaluate(networks[index], rows, force=force)
            if in_vacuum[index]:
                energy = energy[: len(part)] - energy[len(part) :]
                slope = None if slope is None else slope[: len(part)]
            energies.append(energy.double())
            slopes.append(slope)
        return torch.cat(energies).squeeze(1), torch.cat(slopes) if force else None  # type: ignore[arg-type]  # no None

    def _evaluate(
        self, network: Network, rows: Tensor, *, force: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return a network's output `(nrows, 1)` and, with `force`, its slope like `rows`."""
        if force:
            return energy_and_slope(
                self.activation, network.copies, (rows.shape[0],), rows, *network.flat
            )
        *hidden, last = network.tensors
        features = layers.plain_values(self.activation, network.copies, rows, hidden)
        return torch.addmm(last.bias, features, last.matrix), None


def _check_parameters(name: str, values: Tensor | None, number: int, whose: str) -> None:
    if values is None or values.shape[-1] != number:
        found = "none" if values is None else str(values.shape[-1])
        raise ModelError(
            f"the model reads {number} parameters {whose} ({name}, fitting_net/numb_{name}); found {found}"
        )
