"""Stages 2 and 3: torch's FSDP2; between steps each rank keeps a part of the model."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_leaves, tree_map

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches, branches_of
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.process.signals import SIGNALS
from deepmd_muon.train.ranks.ranks import Ranks, local_part
from deepmd_muon.train.strategy.base import Reduced, SeveralRanks


def sharding_mesh(ranks: Ranks, replicate_degree: int = 1) -> DeviceMesh:
    """Make the mesh that a model is sharded over.

    `replicate_degree` groups of ranks each hold the whole model (HSDP).
    """
    if ranks.size % replicate_degree:
        raise TrainingError(
            f"training/data_parallel_replicate_degree is {replicate_degree}, "
            f"which does not divide {ranks.size} processes"
        )
    device = ranks.device.type
    if replicate_degree > 1:
        # Neighbouring ranks share a model: on most machines they are in one node.
        shape = (replicate_degree, ranks.size // replicate_degree)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device, (ranks.size,), mesh_dim_names=("shard",))
    for group in mesh.get_all_groups():
        # A mesh makes groups that wait for ten minutes and more.
        _set_pg_timeout(ranks.timeout, group)
    return mesh


class FullySharded(SeveralRanks):
    """FSDP2 in two units, with several branches one for each fitting net and one for the rest.

    On a mesh of two dimensions (HSDP) the model is cut along the second and repeated along the
    first.

    A fitting net gives energies and their slopes in one forward pass, so it is a unit: its
    parameters are gathered while the descriptor works, and its gradients are scattered while the
    descriptor's are computed. The rest belongs to the root. The second half of the descriptor, the
    pull-back of the slopes to the edges, is called after its forward pass; FSDP2 would have freed a
    unit by then.

    Fitting nets that share weights belong to the root as well, because a parameter has one unit. If
    ranks train different branches, all nets do, because the ranks gather and scatter a unit
    together.

    Parameters
    ----------
    ranks, model, mesh
        The processes, their model (its parameters are sharded in place), and their device mesh.
    reshard_after_forward
        Whether the gathered parameters are freed between forward and backward pass (stage 3).
    stratified
        Whether ranks train different branches in a step. A gradient is then the mean over the ranks
        that have it.
    """

    cuts_parameters: ClassVar[bool] = True
    reads_on_host = "training/zero_stage is above 1"

    def __init__(
        self,
        ranks: Ranks,
        model: EnergyModel | Branches,
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool,
        stratified: bool = False,
    ) -> None:
        super().__init__(ranks, model)
        self._mesh = mesh
        nets = [] if stratified else _unshared_fitting_nets(model)
        _require_one_dtype(model, nets)
        # By parameter of a stratified run: whether this rank's backward passes gave it a gradient.
        self._has_gradient: list[bool] | None = None
        if stratified:
            self._has_gradient = [False for _ in model.parameters()]
        self._units: list[FSDPModule] = []
        for module in (*nets, model):
            # FSDP2 registers hooks on outputs of the forward pass, which must not be views. This
            # hook is registered first, so it runs first.
            module.register_forward_hook(_without_views)
            if stratified:
                module.register_forward_hook(self._fill_gradients)
            self._units.append(
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
            )
        *net_units, root = self._units
        if isinstance(model, Branches):
            for branch_model in branches_of(model).values():
                # FSDP2 gathers at calls of its root, so each branch is called through it.
                forward = functools.partial(model, branch_model.forward)
                branch_model.forward = forward  # type: ignore[method-assign]
            for unit in self._units:
                # By default FSDP2 prefetches the nets that other branches called last.
                unit.set_modules_to_backward_prefetch([root])
        else:
            root.set_modules_to_forward_prefetch(net_units)
            root.set_modules_to_backward_prefetch(net_units)

    def _fill_gradients(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Give zeros to parameters that this rank's branch has no gradient for.

        A forward hook. The ranks scatter gradients together, so each must have all of them.
        """

        def fill() -> None:
            assert self._has_gradient is not None
            for i, p in enumerate(module.parameters()):
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
                elif p.requires_grad:
                    self._has_gradient[i] = True

        is_queued = False

        def queue(_: Tensor) -> None:
            nonlocal is_queued
            if not is_queued:
                is_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(fill)

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # FSDP2 ends the backward pass in such a callback, too. It registers its hook on
                # this tensor later, so `fill` runs before.
                tensor.register_hook(queue)

    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Return the gradients, which FSDP2 has averaged in the backward pass."""
        if self._has_gradient is not None:
            self._average_over_ranks_with_gradient(self._has_gradient)
        gradients = [local_part(p.grad) for p in self.model.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).double().square()
        summed = self.ranks.sum(
            torch.cat([self._loss_and_requests(loss.double()), square.reshape(1)])
        )
        with self.ranks.waiting():
            numbers = summed.tolist()  # the loss, a count for each signal, the square of the norm
        self._agree(numbers[1 : 1 + len(SIGNALS)])
        # Under HSDP every element is held, and counted, once in each group.
        replicas = self._mesh.size(0) if self._mesh.ndim > 1 else 1
        norm = (summed[-1] / replicas).sqrt()
        return Reduced(gradients, norm, summed[0] / self.ranks.size)

    def _average_over_ranks_with_gradient(self, has_gradient: list[bool]) -> None:
        """Turn means over all ranks into means over the ranks that have a gradient.

        Gradients that no rank has are removed: an optimizer then leaves the parameter alone.
        """
        present = torch.tensor(has_gradient, dtype=torch.float64, device=self.ranks.device)
        with self.ranks.waiting():
            counts = self.ranks.sum(present).tolist()
        for p, count in zip(self.model.parameters(), counts, strict=True):
            if p.grad is not None and count:
                local_part(p.grad).mul_(self.ranks.size / count)
            else:
                p.grad = None
        has_gradient[:] = [False] * len(has_gradient)

    def reshard(self) -> None:
        """Free the parameters that a forward-only pass has gathered."""
        for unit in self._units:
            unit.reshard()

    def _take_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
        """Take this rank's part of the state, by torch's own naming of parts."""
        groups = []
        state_by_name = {}
        for group in whole["param_groups"]:
            names = list(group["param_names"])
            groups.append({**group, "params": names})
            for number, name in zip(group["params"], names, strict=True):
                if number in whole["state"]:
                    state_by_name[name] = whole["state"][number]
        # Not strict: parameters without a gradient, as some in the last layer of DPA-3, have no
        # state. The whole state was checked when an optimizer of the whole model loaded it.
        set_optimizer_state_dict(
            self.model,
            optimizer,
            {"state": state_by_name, "param_groups": groups},
            options=StateDictOptions(full_state_dict=True, strict=False),
        )
        # torch has made state for these by a step of length 0, which Adam would count.
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if name not in state_by_name:
                    optimizer.state.pop(parameter, None)


def _unshared_fitting_nets(model: EnergyModel | Branches) -> list[nn.Module]:
    """Return the fitting nets that share no parameter with another one."""
    models = branches_of(model).values()
    nets: list[nn.Module] = [branch_model.atomic_model.fitting_net for branch_model in models]
    users = Counter(p for net in nets for p in net.parameters())
    return [net for net in nets if all(users[p] == 1 for p in net.parameters())]


def _require_one_dtype(model: EnergyModel | Branches, nets: list[nn.Module]) -> None:
    """Refuse a unit of FSDP2 with parameters of several dtypes."""
    in_nets = {p for net in nets for p in net.parameters()}
    root = "descriptor" if isinstance(model, EnergyModel) else "parts that branches train together"
    units = [("fitting net", set(net.parameters())) for net in nets]
    for unit, params in (*units, (root, set(model.parameters()) - in_nets)):
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in params if p.requires_grad})
        if len(dtypes) > 1:
            raise TrainingError(
                f"the parameters of the {unit} are {' and '.join(dtypes)}; zero_stage 2 and 3 need "
                "one precision for each of descriptor and fitting net, for both where branches "
                "share fitting nets or are stratified: use zero_stage 0 or 1"
            )


def _without_views(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Copy views in the output of a forward pass, as a forward hook."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x._is_view() else x, output)
