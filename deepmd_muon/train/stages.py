"""What the ranks of a run share: nothing (stage 0), optimizer state (1), gradients too (2), parameters too (3).

The gradient of a step comes from one explicit backward pass, after which every gradient is there. So stages 0 and 1
need none of DistributedDataParallel's hooks and buckets: one all-reduce over all gradients, with the loss and the
requests to stop in its tail, is the whole communication before the update, and its order of summation is fixed.
Stages 2 and 3 are torch's FSDP2 around the whole model.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.optimizers import build_optimizer
from deepmd_muon.train.parallel import Ranks, cut_as, local_part

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
        return (ShardedOptimizer if stage else Replicated)(ranks, model, mesh)
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
    """Stage 0: every rank holds everything and works on its own batch; gradients are averaged.

    Parameters
    ----------
    ranks, model, mesh
        The processes, what they train, and their device mesh.

    Attributes
    ----------
    request
        Number of the signal that this process got, for the others to hear of.
    agreed
        Number of the signal that some rank had got before the last `average`; the same on all ranks.
    """

    def __init__(self, ranks: Ranks, model: EnergyModel, mesh: DeviceMesh) -> None:
        self.ranks = ranks
        self.model = model
        self.mesh = mesh
        self.request: int | None = None
        self.agreed: int | None = None

    def optimizer(self, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
        """Make the run's optimizer."""
        return build_optimizer(config, self.model, lr, replicas=self.mesh)

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

    def updated(self) -> None:
        """Bring the model up to date after the optimizer's step."""

    def rest(self) -> None:
        """Let go of what a forward pass without backward pass has left."""

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
        """Take the state of an optimizer of the whole model, parameters in the same order."""
        optimizer.load_state_dict(full)

    def _tail(self, loss: Tensor) -> Tensor:
        """Return what rides with the gradients: the loss, and one flag for each signal."""
        return torch.stack([loss, *(loss.new_tensor(float(self.request == number)) for number in _SIGNALS)])

    def _agree(self, summed: Sequence[float]) -> None:
        """Read of the summed tail which signal any rank has got."""
        counts = summed[1 : 1 + len(_SIGNALS)]
        self.agreed = next((int(number) for number, count in zip(_SIGNALS, counts, strict=True) if count), None)


class ShardedOptimizer(Replicated):
    """Stage 1: the optimizer's state is cut along the first dimension of every parameter; models are whole.

    The optimizer steps this rank's part of every parameter, and the parts are gathered into the models.
    """

    def __init__(self, ranks: Ranks, model: EnergyModel, mesh: DeviceMesh) -> None:
        super().__init__(ranks, model, mesh)
        self._cut = _cut_copy(model, mesh)
        self._pairs = list(zip(model.parameters(), self._cut.parameters(), strict=True))

    def optimizer(self, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
        """Make the run's optimizer, on this rank's parts."""
        return build_optimizer(config, self._cut, lr)

    def average(self, loss: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Average the gradients, and cut them like the parameters."""
        _, norm, mean = super().average(loss)
        for p, part in self._pairs:
            if p.grad is not None:
                part.grad = cut_as(p.grad, part)
            p.grad = None
        return [local_part(part.grad) for _, part in self._pairs if part.grad is not None], norm, mean

    @torch.no_grad()
    def updated(self) -> None:
        """Gather the parts that the ranks have stepped."""
        moved = [(p, part) for p, part in self._pairs if p.requires_grad]
        dtype = max((p.dtype for p, _ in moved), key=lambda dtype: dtype.itemsize)
        mine = torch.cat([local_part(part).reshape(-1).to(dtype) for _, part in moved])
        size = self.ranks.size
        rows = [[_rows(p, rank, size) for rank in range(size)] for p, _ in moved]
        counts = [[len(r) * _row_size(p) for r in each] for (p, _), each in zip(moved, rows, strict=True)]
        longest = max(sum(each[rank] for each in counts) for rank in range(size))
        sent = mine.new_zeros(longest)
        sent[: mine.numel()] = mine
        found = mine.new_empty(size * longest)
        dist.all_gather(list(found.chunk(size)), sent)
        pieces = [
            found[rank * longest :][: sum(each[rank] for each in counts)].split([each[rank] for each in counts])
            for rank in range(size)
        ]
        for k, (p, _) in enumerate(moved):
            parts = [pieces[0][k]] if p.ndim == 0 else [pieces[rank][k] for rank in range(size)]
            p.copy_(torch.cat(parts).view_as(p))

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
        """Take this rank's part of the state of an optimizer of the whole model."""
        _load_cut(self._cut, optimizer, full)


class FullySharded(Replicated):
    """Stages 2 and 3: FSDP2 around the whole model, which keeps between steps only a part of it on each rank.

    On a mesh of two dimensions (HSDP) the model is cut along the second and repeated along the first.

    The forward pass computes the forces with an explicit pass back through the networks, which needs all parameters
    at once; so the model is one unit. Stage 3 frees the gathered parameters between forward and backward pass.
    """

    def __init__(self, ranks: Ranks, model: EnergyModel, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
        super().__init__(ranks, model, mesh)
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad})
        if len(dtypes) > 1:
            raise TrainingError(
                f"the parameters are {' and '.join(dtypes)}; zero_stage 2 and 3 need one precision for descriptor and "
                "fitting net: set both alike, or use zero_stage 0 or 1"
            )
        # FSDP2 hooks onto what the forward pass returns, which must not be views; this hook runs before its own.
        model.register_forward_hook(_without_views)
        self._module: FSDPModule = fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)

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
        self._module.reshard()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
        """Take this rank's part of the state of an optimizer of the whole model."""
        _load_cut(self.model, optimizer, full)


def _without_views(model: nn.Module, given: tuple[Any, ...], out: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() if value._is_view() else value for name, value in out.items()}


def _cut_copy(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a copy of a model whose parameters are cut along their first dimension."""
    twin = copy.deepcopy(model)
    known: dict[nn.Parameter, nn.Parameter] = {}
    for module in twin.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if p not in known:
                placement = Shard(0) if p.ndim else Replicate()
                cut = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=None)
                known[p] = nn.Parameter(cut, requires_grad=p.requires_grad)
            setattr(module, name, known[p])
    return twin


def _rows(p: Tensor, rank: int, size: int) -> range:
    """Return the rows that a rank holds of a parameter cut along its first dimension; of a scalar, one."""
    if p.ndim == 0:
        return range(1)
    each = -(-p.shape[0] // size)
    return range(min(rank * each, p.shape[0]), min((rank + 1) * each, p.shape[0]))


def _row_size(p: Tensor) -> int:
    return p[0].numel() if p.ndim and p.shape[0] else 1


def _load_cut(module: nn.Module, optimizer: torch.optim.Optimizer, full: dict[str, Any]) -> None:
    """Load a full optimizer state into an optimizer of DTensors, through torch's own naming of its parameters."""
    groups, state = [], {}
    for group in full["param_groups"]:
        names = list(group["param_names"])
        groups.append({**group, "params": names})
        state.update({n: full["state"][i] for i, n in zip(group["params"], names, strict=True) if i in full["state"]})
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(module, optimizer, {"state": state, "param_groups": groups}, options=options)
