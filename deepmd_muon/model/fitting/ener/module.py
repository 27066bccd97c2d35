"""The `ener` fitting net: atomic energies and, in the same call, dE/dD in explicit form.

Names as in `layers`: a bar (`_bar`) marks derivatives of the energy, a dot (`_dot`) tangents, a hat
(`_hat`) derivatives of the loss. A network maps x `(n, width)` to E `(n, 1)`; its slope is x̄ =
dE/dx.
"""

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

# ----- the fitting net ---------------------------------------------------------------------------


class ParameterScaling(NamedTuple):
    """Statistics of frame and atomic parameters, a tensor for each kind that the net reads."""

    means: list[Tensor]
    inverse_deviations: list[Tensor]


class EnergyFitting(torch.nn.Module):
    """Networks from descriptor to atomic energy: one for each centre type, or one for all.

    A network for all types starts from the same weights as deepmd-kit's with the same seed.

    Parameters
    ----------
    settings, type_map, dim_in, mixed_types, seed
        See `Fitting`.

    Raises
    ------
    ModelError
        If `atom_ener` does not fit `type_map`.
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
        self.dim_in = dim_in
        self.numb_parameters = sum(settings.net_parameters.values())
        self.vacuum = settings.atom_ener or (None,) * ntypes
        if len(self.vacuum) != ntypes:
            raise ModelError(
                f"atom_ener needs one entry (a number or null) per type: {ntypes}, "
                f"found {len(self.vacuum)}"
            )
        self.activation = activation(settings.activation_function)
        self.dtype = dtype_of(settings.precision)
        self._register_buffers(ntypes)

        if settings.seed is not None:
            seed = settings.seed
        stream: Stream | SeedPath = SeedPath(seed) if mixed_types else Stream(seed).child(1)
        width = dim_in + self.numb_parameters + settings.dim_case_embd
        networks = [
            Network(
                (width, *settings.neuron),
                n_out=1,
                timestep=settings.resnet_dt,
                dtype=self.dtype,
                stream=stream.child(index),
            )
            for index in range(1 if mixed_types else ntypes)
        ]
        self.filter_layers = NetworkCollection(networks)
        trainable = settings.trainable
        self.requires_grad_(all(trainable) if isinstance(trainable, tuple) else trainable)

    def _register_buffers(self, ntypes: int) -> None:
        """Register buffers under deepmd-kit's names; None if the settings do not need one."""
        settings = self.settings
        self.register_buffer("bias_atom_e", torch.zeros(ntypes, 1, dtype=torch.float64))
        case_embd = None
        if settings.dim_case_embd:
            case_embd = torch.zeros(settings.dim_case_embd, dtype=self.dtype)
        self.register_buffer("case_embd", case_embd)
        for name, number in (("fparam", settings.numb_fparam), ("aparam", settings.numb_aparam)):
            mean = torch.zeros(number, dtype=self.dtype) if number else None
            inverse_deviation = torch.ones(number, dtype=self.dtype) if number else None
            self.register_buffer(f"{name}_avg", mean)
            self.register_buffer(f"{name}_inv_std", inverse_deviation)
        default_fparam = None
        if settings.default_fparam is not None:
            default_fparam = torch.tensor(settings.default_fparam, dtype=self.dtype)
        self.register_buffer("default_fparam_tensor", default_fparam)

    def parameters_of(self, structures: Structures) -> Tensor | None:
        """Return the parameters of every sorted atom; see `Conditioned`."""
        columns = []
        numbers = self.settings.net_parameters
        if "fparam" in numbers:
            fparam = structures.fparam
            if fparam is None and self.default_fparam_tensor is not None:
                fparam = self.default_fparam_tensor.double().expand(structures.nframes, -1)
            fparam = _check_width("fparam", fparam, numbers["fparam"], "of each frame")
            columns.append(fparam[structures.sorted_frame])
        if "aparam" in numbers:
            aparam = _check_width("aparam", structures.aparam, numbers["aparam"], "of each atom")
            columns.append(aparam.flatten(0, 1)[structures.order])
        return torch.cat(columns, dim=1) if columns else None

    def set_parameter_statistics(self, name: str, mean: Tensor, deviation: Tensor) -> None:
        """Standardise parameters; see `Conditioned`."""
        getattr(self, f"{name}_avg").copy_(mean)
        getattr(self, f"{name}_inv_std").copy_(1.0 / deviation)

    def scaling(self) -> ParameterScaling:
        """Return the statistics of the parameters that the net reads."""
        names = self.settings.net_parameters
        return ParameterScaling(
            means=[getattr(self, f"{name}_avg") for name in names],
            inverse_deviations=[getattr(self, f"{name}_inv_std") for name in names],
        )

    def forward(
        self,
        descriptor: Tensor,
        type_counts: tuple[int, ...],
        *,
        force: bool = True,
        parameters: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return atomic energies `(nreal,)` [eV] and dE/dD `(nreal, dim_in)`.

        See `Fitting` and `Conditioned`.
        """
        x = descriptor.to(self.dtype)
        if parameters is not None:
            scaling = self.scaling()
            centred = parameters.to(self.dtype) - torch.cat(scaling.means)
            x = torch.cat([x, centred * torch.cat(scaling.inverse_deviations)], dim=1)
        x = self._append_case(x)
        energy, slope = self._evaluate_networks(x, type_counts, force=force)
        # Atoms are sorted by type.
        bias = [
            type_bias.expand(count)
            for type_bias, count in zip(self.bias_atom_e, type_counts, strict=True)
        ]
        energy = energy + torch.cat(bias)
        if slope is None:
            return energy, None
        # The other columns are parameters and the branch, on which no position has an influence.
        return energy, slope[:, : descriptor.shape[1]].to(descriptor.dtype)

    def _append_case(self, x: Tensor) -> Tensor:
        """Append the columns that say which branch of a multi-task model this is."""
        if self.case_embd is None:
            return x
        return torch.cat([x, self.case_embd.expand(len(x), -1)], dim=1)

    def _vacuum_rows(self, x: Tensor) -> Tensor:
        """Return x of atoms without neighbours: one row, or with parameters one for each atom."""
        if not self.numb_parameters:
            return self._append_case(x.new_zeros(1, self.dim_in))
        return torch.cat([x.new_zeros(len(x), self.dim_in), x[:, self.dim_in :]], dim=1)

    def _evaluate_networks(
        self, x: Tensor, type_counts: tuple[int, ...], *, force: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return energies `(nreal,)` without bias and slopes `(nreal, width)` of all atoms.

        Types with an entry in `atom_ener` lose what their network has in vacuum.
        """
        subtract_vacuum = [energy is not None for energy in self.vacuum]
        if self.mixed_types:
            network = self.filter_layers[0]
            energy, slope = self._evaluate(network, x, force=force)
            if any(subtract_vacuum):  # as in deepmd-kit, from the atoms of all types
                vacuum, _ = self._evaluate(network, self._vacuum_rows(x), force=False)
                energy = energy - vacuum
            return energy.double().squeeze(1), slope
        if force and not any(subtract_vacuum):  # the usual case: all networks overlap on a GPU
            networks = [self.filter_layers[k] for k in range(len(type_counts))]
            flat = [tensor for network in networks for tensor in network.flat]
            energy, slope = energy_and_slope(
                self.activation, networks[0].copies, type_counts, x, *flat
            )
            return energy.double().squeeze(1), slope
        energies = []
        slopes = []
        for k, x_k in enumerate(torch.split(x, list(type_counts))):
            rows = torch.cat([x_k, self._vacuum_rows(x_k)]) if subtract_vacuum[k] else x_k
            energy, slope = self._evaluate(self.filter_layers[k], rows, force=force)
            if subtract_vacuum[k]:
                energy = energy[: len(x_k)] - energy[len(x_k) :]
            energies.append(energy.double())
            if slope is not None:
                slopes.append(slope[: len(x_k)])
        return torch.cat(energies).squeeze(1), torch.cat(slopes) if force else None

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


def _check_width(name: str, values: Tensor | None, number: int, whose: str) -> Tensor:
    """Return the values if each frame or atom has `number` of them."""
    if values is None or values.shape[-1] != number:
        width = "none" if values is None else str(values.shape[-1])
        raise ModelError(
            f"the model reads {number} parameters {whose} ({name}, fitting_net/numb_{name}); "
            f"found {width}"
        )
    return values


# ----- energy and slope of networks --------------------------------------------------------------


class EnergyAndSlope(torch.autograd.Function):
    """E and x̄ = dE/dx of networks with one output, with ONE backward pass for both.

    The forward pass sends values up the layers and the adjoint of E down. The backward pass needs
    the gradient of ⟨Ê, E⟩ + ⟨ẋ, x̄⟩, with ẋ the cotangent of the slope. The second term is the
    derivative of ΣE along ẋ: the backward pass sends ẋ up as a tangent, and takes the adjoints that
    belong to tangents from the forward pass. On a GPU the networks overlap.

    Arguments: activation, copies of every hidden layer, rows of each network, x `(n, width)`, then
    matrix, bias, idt of every layer of every network.

    Reference: autograd of `layers.plain_values`; `test_energy_and_slope` compares both.
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
        """Return E `(n, 1)` and x̄ `(n, width)`."""
        networks = unflatten(flat, len(counts))
        energies = []
        saved = []
        slope = x.new_empty(x.shape)  # each network writes its rows
        with triton_support.Branches(x.device, len(counts)) as branches:
            by_type = zip(networks, x.split(counts), slope.split(counts), strict=True)
            for number, (network, x_part, slope_part) in enumerate(by_type):
                with branches.chain(number):
                    energy, tape = _forward(f, copies, network, x_part, slope_out=slope_part)
                energies.append(energy)
                saved += [*tape.inputs[1:], *tape.keeps, *tape.output_bars]
        ctx.activation = f
        ctx.copies = copies
        ctx.counts = counts
        ctx.save_for_backward(x, *flat, *saved)
        return layers.joined(energies), slope

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, energy_hat: Tensor, slope_hat: Tensor) -> Any:
        """Return the cotangents of x and of every layer's tensors."""
        counts = ctx.counts
        depth = len(ctx.copies)
        x, *network_tensors_and_tapes = ctx.saved_tensors
        n_tensors = 3 * (depth + 1) * len(counts)
        networks = unflatten(network_tensors_and_tapes[:n_tensors], len(counts))
        saved = iter(network_tensors_and_tapes[n_tensors:])
        x_hats: list[Tensor] = []
        tensor_hats: list[Tensor | None] = []
        with triton_support.Branches(x.device, len(counts)) as branches:
            by_type = zip(
                networks,
                x.split(counts),
                energy_hat.split(counts),
                slope_hat.split(counts),
                strict=True,
            )
            for number, (network, x_part, energy_hat_part, slope_hat_part) in enumerate(by_type):
                tape = _Tape(
                    inputs=[x_part, *(next(saved) for _ in range(depth))],
                    keeps=[next(saved) for _ in range(depth)],
                    output_bars=[next(saved) for _ in range(depth)],
                )
                with branches.chain(number):
                    x_hat, network_hats = _backward(
                        ctx.activation,
                        ctx.copies,
                        network,
                        tape,
                        energy_hat=energy_hat_part,
                        x_dot=slope_hat_part,
                    )
                x_hats.append(x_hat)
                tensor_hats += network_hats
        return None, None, None, layers.joined(x_hats), *tensor_hats


# torch leaves `apply` untyped.
energy_and_slope: Callable[..., tuple[Tensor, Tensor]] = EnergyAndSlope.apply


class _Tape(NamedTuple):
    """What the backward pass of one network reads, by hidden layer from the first to the last."""

    inputs: list[Tensor]  # x of each hidden layer, and of the last linear layer
    keeps: list[Tensor]  # see `layers`
    output_bars: list[Tensor]  # ȳ = dE/dy


def _forward(
    f: Activation,
    copies: Sequence[Copies],
    network: Sequence[LayerTensors],
    x: Tensor,
    *,
    slope_out: Tensor,
) -> tuple[Tensor, _Tape]:
    """Return E `(n, 1)`; write x̄ `(n, width)` to `slope_out`."""
    *hidden, last = network
    inputs = [x]
    keeps = []
    for layer, layer_copies in zip(hidden, copies, strict=True):
        y, keep = layers.forward(f, layer, inputs[-1], layer_copies)
        inputs.append(y)
        keeps.append(keep)
    energy = torch.addmm(last.bias, inputs[-1], last.matrix)

    y_bar = last.matrix.t().expand(x.shape[0], -1)  # dE/dy of the last hidden layer
    output_bars = []
    for index in reversed(range(len(hidden))):
        layer = hidden[index]
        output_bars.append(y_bar)
        h_bar = layers.slope(f, keeps[index], layer.idt, y_bar)
        out = slope_out if index == 0 else None
        y_bar = layers.down(h_bar, layer, y_bar, copies[index], out)
    if not hidden:
        slope_out.copy_(y_bar)
    return energy, _Tape(inputs, keeps, output_bars[::-1])


def _backward(
    f: Activation,
    copies: Sequence[Copies],
    network: Sequence[LayerTensors],
    tape: _Tape,
    *,
    energy_hat: Tensor,
    x_dot: Tensor,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return x̂, and the gradients of matrix, bias and idt of every layer, from Ê and ẋ."""
    *hidden, last = network
    input_dots = [x_dot]  # the tangent of each entry of `tape.inputs`
    h_dots = []
    for layer, layer_copies, keep in zip(hidden, copies, tape.keeps, strict=True):
        x_dot = input_dots[-1]
        h_dot = torch.mm(x_dot, layer.matrix)
        h_dots.append(h_dot)
        y_dot = layers.tangent(
            f, keep, idt=layer.idt, h_dot=h_dot, x_dot=x_dot, copies=layer_copies
        )
        input_dots.append(y_dot)

    # The last layer is linear: Ŵ = yᵀÊ + Σ_atoms ẏ, because dE/dy is W itself.
    last_dot_sum = input_dots[-1].sum(0).unsqueeze(1)
    last_matrix_hat = torch.addmm(last_dot_sum, tape.inputs[-1].t(), energy_hat)
    layer_hats: list[tuple[Tensor | None, ...]] = [(last_matrix_hat, energy_hat.sum(0), None)]
    y_hat = torch.mm(energy_hat, last.matrix.t())
    for index in reversed(range(len(hidden))):
        layer = hidden[index]
        h_hat_and_bar, bias_hat, idt_hat = layers.cotangents(
            f,
            tape.keeps[index],
            idt=layer.idt,
            h_dot=h_dots[index],
            y_hat=y_hat,
            y_bar=tape.output_bars[index],
        )
        # Ŵ = xᵀĥ + ẋᵀh̄ as one product.
        x_and_dot = torch.cat([tape.inputs[index], input_dots[index]])
        matrix_hat = torch.mm(x_and_dot.t(), h_hat_and_bar.flatten(0, 1))
        layer_hats.append((matrix_hat, bias_hat, idt_hat))
        y_hat = layers.down(h_hat_and_bar[0], layer, y_hat, copies[index])
    return y_hat, [hat for hats in reversed(layer_hats) for hat in hats]
