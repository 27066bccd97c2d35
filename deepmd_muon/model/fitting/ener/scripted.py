"""The `ener` fitting net for TorchScript; see `deepmd_muon.model.scripted.interface`."""

import torch
from torch import Tensor

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.fitting.ener.module import EnergyFitting
from deepmd_muon.model.scripted.dense import Act, Dense, act_of, dense_layers, energy_and_slope


class ScriptedEnergyFitting(torch.nn.Module):
    """Networks from descriptor to atomic energy, and the derivative of the energy."""

    #: The settings that this form has.
    covers = Coverage(
        frozenset(
            {
                *("neuron", "resnet_dt", "activation_function", "precision", "trainable", "seed"),
                *("atom_ener", "rcond", "numb_fparam", "numb_aparam", "use_aparam_as_mask"),
                *("default_fparam", "dim_case_embd"),
            }
        )
    )
    act: Act
    nets: list[list[Dense]]
    branch: Tensor
    bias: Tensor
    vacuum: list[bool]
    parameter_mean: Tensor
    parameter_scale: Tensor
    default_fparam: Tensor

    def __init__(self, module: EnergyFitting) -> None:
        super().__init__()
        self.act = act_of(module.settings.activation_function)
        self.mixed_types = module.mixed_types
        # ModuleList forgets the type of its elements.
        self.nets = [dense_layers(net) for net in module.filter_layers.networks]  # type: ignore[arg-type]
        self.numb_fparam = module.settings.numb_fparam
        self.numb_aparam = module.settings.numb_aparam
        # TorchScript wants tensors: those that the settings do not need are empty.
        empty = torch.zeros(0, dtype=module.dtype)
        self.register_buffer("branch", _copy(module.case_embd, empty))
        scaling = module.scaling()
        self.register_buffer("parameter_mean", torch.cat([empty, *scaling.means]).detach())
        inverse_deviations = torch.cat([empty, *scaling.inverse_deviations])
        self.register_buffer("parameter_scale", inverse_deviations.detach())
        self.register_buffer("default_fparam", _copy(module.default_fparam_tensor, empty))
        has_vacuum_energy = [energy is not None for energy in module.vacuum]
        if self.mixed_types:  # as in deepmd-kit, for the atoms of all types
            has_vacuum_energy = [any(has_vacuum_energy)] * len(has_vacuum_energy)
        self.vacuum = has_vacuum_energy
        bias = module.bias_atom_e.detach()[:, 0].clone()
        # With parameters, the value in vacuum differs between atoms.
        if module.numb_parameters == 0:
            bias = bias - self._in_vacuum(module.dim_in)
        self.register_buffer("bias", bias)

    @torch.no_grad()
    def _in_vacuum(self, width: int) -> Tensor:
        """Return the networks' values without neighbours `(ntypes,)` [eV].

        They are 0 for types without a vacuum energy.
        """
        row = torch.cat([self.branch.new_zeros(width), self.branch]).unsqueeze(0)
        nets = self.nets * len(self.vacuum) if self.mixed_types else self.nets
        values = [
            float(energy_and_slope(self.act, net, row)[0]) if has_vacuum_energy else 0.0
            for net, has_vacuum_energy in zip(nets, self.vacuum, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float64)

    @torch.jit.export
    def energy_and_slope(
        self, descriptor: Tensor, counts: list[int], parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return energies `(ncentre,)` [eV] and dE/dD like `descriptor`."""
        x = descriptor.to(self.branch.dtype)
        with_parameters = self.parameter_mean.shape[0] > 0
        if with_parameters:
            # With use_aparam_as_mask these are the frame parameters alone.
            read = parameters[:, : self.parameter_mean.shape[0]]
            scaled = (read.to(self.branch.dtype) - self.parameter_mean) * self.parameter_scale
            x = torch.cat([x, scaled], dim=1)
        if self.branch.shape[0] > 0:
            x = torch.cat([x, self.branch.expand(x.shape[0], -1)], dim=1)
        rows_by_type = [x] if self.mixed_types else list(torch.split(x, counts))
        energies: list[Tensor] = []
        slopes: list[Tensor] = []
        for index in range(len(rows_by_type)):
            energy, slope = energy_and_slope(self.act, self.nets[index], rows_by_type[index])
            if with_parameters and self.vacuum[index]:
                empty = rows_by_type[index].clone()
                empty[:, : descriptor.shape[1]] = 0.0
                energy = energy - energy_and_slope(self.act, self.nets[index], empty)[0]
            energies.append(energy)
            slopes.append(slope)
        bias = torch.repeat_interleave(self.bias, torch.tensor(counts, device=self.bias.device))
        total = torch.cat(energies).squeeze(1).to(torch.float64) + bias
        slope = slopes[0] if len(slopes) == 1 else torch.cat(slopes)  # not a copy of the only one
        return total, slope[:, : descriptor.shape[1]].to(descriptor.dtype)


def _copy(tensor: Tensor | None, empty: Tensor) -> Tensor:
    return (empty if tensor is None else tensor).detach().clone()
