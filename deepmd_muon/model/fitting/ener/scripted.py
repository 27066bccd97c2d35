"""The `ener` fitting net for TorchScript; see `deepmd_muon.model.scripted.interface`."""

import torch

from deepmd_muon.model.fitting.ener.module import EnergyFitting
from deepmd_muon.model.scripted.dense import Act, Dense, act_of, dense_layers, energy_and_slope


class ScriptedEnergyFitting(torch.nn.Module):
    """Networks from descriptor to atomic energy, and the derivative of the energy."""

    act: Act
    nets: list[list[Dense]]
    branch: torch.Tensor
    bias: torch.Tensor

    def __init__(self, module: EnergyFitting) -> None:
        super().__init__()
        self.act = act_of(module.settings.activation_function)
        self.mixed_types = module.mixed_types
        self.nets = [dense_layers(net) for net in module.filter_layers.networks]  # type: ignore[arg-type]
        branch = module.case_embd
        self.register_buffer(
            "branch", torch.zeros(0, dtype=module.dtype) if branch is None else branch.detach().clone()
        )
        self.register_buffer("bias", module.bias_atom_e.detach()[:, 0] - self._in_vacuum(module))

    @torch.no_grad()
    def _in_vacuum(self, module: EnergyFitting) -> torch.Tensor:
        """Return the networks' values without descriptor `(ntypes,)`, 0 for types without a vacuum energy."""
        width = module.filter_layers[0].tensors[0].matrix.shape[0] - self.branch.shape[0]
        row = torch.cat([self.branch.new_zeros(width), self.branch]).unsqueeze(0)
        wanted = [energy is not None for energy in module.vacuum]
        if self.mixed_types:
            wanted = [any(wanted)] * len(wanted)
        nets = self.nets * len(wanted) if self.mixed_types else self.nets
        values = [
            float(energy_and_slope(self.act, net, row)[0]) if given else 0.0
            for net, given in zip(nets, wanted, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float64)

    @torch.jit.export
    def energy_and_slope(self, descriptor: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return energies `(ncentre,)` [eV] and dE/dD like `descriptor`."""
        x = descriptor.to(self.branch.dtype)
        if self.branch.shape[0] > 0:
            x = torch.cat([x, self.branch.expand(x.shape[0], -1)], dim=1)
        parts = [x] if self.mixed_types else list(torch.split(x, counts))
        energies: list[torch.Tensor] = []
        slopes: list[torch.Tensor] = []
        for index in range(len(parts)):
            energy, slope = energy_and_slope(self.act, self.nets[index], parts[index])
            energies.append(energy)
            slopes.append(slope)
        bias = torch.repeat_interleave(self.bias, torch.tensor(counts, device=self.bias.device))
        total = torch.cat(energies).squeeze(1).to(torch.float64) + bias
        return total, torch.cat(slopes)[:, : descriptor.shape[1]].to(descriptor.dtype)
