"""What the ranks of a run share: nothing (stage 0), optimizer state (1), gradients too (2), parameters too (3).

The gradient of a step comes from one explicit backward pass, after which every gradient is there. So stages 0 and 1
need none of DistributedDataParallel's hooks and buckets: one all-reduce over all gradients, with the loss and the
requests to stop in its tail, is the whole communication before the update, and its order of summation is fixed.
Stages 2 and 3 are torch's FSDP2.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_map

from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.optimizers import build_optimizer
from deepmd_muon.train.parallel import Ranks, local_part

if TYPE_CHECKING:
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.optim.config import OptimizerConfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def distribute(stage: int, ranks: Ranks, model: EnergyModel, replicate_degree: int = 1) -> Replicated:
    """Lay a model, equal on all ranks, out as a stage says.

    Parameters
    ----------
    stage
        `zero_stage` of the input.
    ranks
        At least two processes.
    model
        On its device; stages 2 and 3 cut its parameters in place.
    replicate_degree
        At stages 2 and 3, the number of groups of ranks that each hold the whole model.

    Raises
    ------
    TrainingError
        When the ranks cannot form that many groups of equal size.
    """
    kind, size = ranks.device.type, ranks.size
    if stage < 2:
        mesh = init_device_mesh(kind, (size,), mesh_dim_names=("replicas",))
        return Replicated(ranks, model, mesh, state_in_parts=stage == 1)
    if size % replicate_degree:
        raise TrainingError(
            f"training/data_parallel_replicate_degree is {replicate_degree}, which does not divide {size} processes"
        )
    # Neighbouring ranks share a model: on most machines they sit in one node.
    shape, names = (replicate_degree, size // replicate_degree), ("replicate", "shard")
    hybrid = replicate_degree > 1
    mesh = init_device_mesh(kind, shape if hybrid else (size,), mesh_dim_names=names if hybrid else names[1:])
    for group in mesh.get_all_groups():
        _set_pg_timeout(ranks.timeout, group)  # a mesh makes groups that wait for ten minutes and more
    return FullySharded(ranks, model, mesh, reshard_after_forward=stage == 3)


class Replicated:
    """Stages 0 and 1: every rank holds the model and works on its own batch; gradients are averaged.

    Parameters
    ----------
    ranks, model, mesh
        The processes, what they train, and their device mesh.
    state_in_parts
        Whether each keeps a part of the optimizer's state instead of all of it.

    Attributes
    ----------
    request
        Number of the signal that this process got, for the others to hear of.
    agreed
        Number of the signal that some rank had got before the last `average`; the same on all ranks.
    """

    def __init__(self, ranks: Ranks, model: EnergyModel, mesh: DeviceMesh, *, state_in_parts: bool = False) -> None:
        self.ranks = ranks
        self.model = model
        self.mesh = mesh
        self._state_in_parts = state_in_parts
        self.request: int | None = None
        self.agreed: int | None = None

    def optimizer(self, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
        """Make the run's optimizer."""
        return build_optimizer(config, self.model, lr, replicas=self.mesh, state_in_parts=self._state_in_parts)

    def average(self, loss: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Average gradients and loss of all ranks, and let them agree on signals.

        Parameters
        ----------
        loss
            Of this rank's batch.

        Returns
        -------
        tuple
            The gradients that the optimizer will use, as far as this rank holds them; the norm of the whole gradient
            and the mean loss, the same on all ranks, and not finite where those of any rank are not.
        """
        params = [p for p in self.model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        dtype = max((g.dtype for g in grads), key=lambda dtype: dtype.itemsize)
        tail = torch.cat([self._tail(loss), loss.new_tensor([float(p.grad is not None) for p in params])])
        flat = self.ranks.sum(torch.cat([*(g.reshape(-1).to(dtype) for g in grads), tail.to(dtype)]))
        flat[: -tail.numel()].div_(self.ranks.size)
        *parts, summed = flat.split([*(g.numel() for g in grads), tail.numel()])
        with self.ranks.waiting():
            numbers = summed.tolist()
        self._agree(numbers)
        for p, g, part, there in zip(params, grads, parts, numbers[-len(params) :], strict=True):
            # An optimizer leaves a parameter that has a gradient nowhere alone.
            p.grad = part.view_as(g).to(g.dtype) if there else None
        found = [p.grad for p in params if p.grad is not None]
        return found, torch.nn.utils.get_total_norm(found), summed[0] / self.ranks.size

    def rest(self) -> None:
        """Let go of what a forward pass without backward pass has left."""

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
        """Take the state, or this rank's part of it, of an optimizer of the whole model in the same order."""
        optimizer.load_state_dict(full)

    def _tail(self, loss: Tensor) -> Tensor:
        """Return what rides with the gradients: the loss, and one flag for each signal."""
        return torch.stack([loss, *(loss.new_tensor(float(self.request == number)) for number in _SIGNALS)])

    def _agree(self, summed: Sequence[float]) -> None:
        """Read of the summed tail which signal any rank has got."""
        counts = summed[1 : 1 + len(_SIGNALS)]
        self.agreed = next((int(number) for number, count in zip(_SIGNALS, counts, strict=True) if count), None)


class FullySharded(Replicated):
    """Stages 2 and 3: FSDP2, which keeps between steps only a part of the model on each rank.

    On a mesh of two dimensions (HSDP) the model is cut along the second and repeated along the first.

    There are two units. The fitting net gives energies and their slopes in one forward pass, so it is a unit of its
    own: its parameters are gathered while the descriptor works, and its gradients are scattered while the descriptor's
    are computed. The rest belongs to the root: the descriptor's second half, the pull-back of the slopes to the edges,
    is called after its forward pass, when FSDP2 would have freed a unit of its own. Stage 3 frees the gathered
    parameters between forward and backward pass.
    """

    def __init__(self, ranks: Ranks, model: EnergyModel, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
        super().__init__(ranks, model, mesh)
        fitting = model.atomic_model.fitting_net
        own = set(fitting.parameters())
        for unit, params in (("fitting net", own), ("descriptor", set(model.parameters()) - own)):
            dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in params if p.requires_grad})
            if len(dtypes) > 1:
                raise TrainingError(
                    f"the parameters of the {unit} are {' and '.join(dtypes)}; zero_stage 2 and 3 need one precision "
                    "for each of descriptor and fitting net: use zero_stage 0 or 1"
                )
        self._units: list[FSDPModule] = []
        for module in (fitting, model):
            # FSDP2 hooks onto what a forward pass returns, which must not be views; this hook runs before its own.
            module.register_forward_hook(_without_views)
            self._units.append(fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward))
        fit, root = self._units
        root.set_modules_to_forward_prefetch([fit])
        root.set_modules_to_backward_prefetch([fit])

    def optimizer(self, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
        """Make the run's optimizer, on this rank's parts."""
        return build_optimizer(config, self.model, lr)

    def average(self, loss: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the gradients, which FSDP2 has averaged in the backward pass."""
        grads = [local_part(p.grad) for p in self.model.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(grads).double().square()
        summed = self.ranks.sum(torch.cat([self._tail(loss.double()), square.reshape(1)]))
        with self.ranks.waiting():
            numbers = summed.tolist()
        self._agree(numbers)
        # Under HSDP every element is held, and counted, once in each group.
        replicas = self.mesh.size(0) if self.mesh.ndim > 1 else 1
        return grads, (summed[-1] / replicas).sqrt(), summed[0] / self.ranks.size

    def rest(self) -> None:
        """Free the parameters that a forward pass without backward pass has left gathered."""
        for unit in self._units:
            unit.reshard()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
        """Take this rank's part of the state of an optimizer of the whole model, by torch's own naming of parts."""
        groups, state = [], {}
        for group in full["param_groups"]:
            names = list(group["param_names"])
            groups.append({**group, "params": names})
            numbered = zip(group["params"], names, strict=True)
            state.update({name: full["state"][i] for i, name in numbered if i in full["state"]})
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, optimizer, {"state": state, "param_groups": groups}, options=options)


def _without_views(module: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x._is_view() else x, out)
