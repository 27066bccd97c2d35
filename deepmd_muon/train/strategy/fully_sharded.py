"""Stages 2 and 3: torch's FSDP2, which keeps between steps only a part of the model on each rank."""

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
from deepmd_muon.train.ranks.ranks import Ranks, local_part
from deepmd_muon.train.strategy.agreement import SIGNALS, SeveralRanks
from deepmd_muon.train.strategy.base import Reduced


def sharding_mesh(ranks: Ranks, replicate_degree: int = 1) -> DeviceMesh:
    """Make the mesh that a model is sharded over; `replicate_degree` groups each hold the whole model (HSDP)."""
    size = ranks.size
    if size % replicate_degree:
        raise TrainingError(
            f"training/data_parallel_replicate_degree is {replicate_degree}, which does not divide {size} processes"
        )
    # Neighbouring ranks share a model: on most machines they sit in one node.
    shape, names = (replicate_degree, size // replicate_degree), ("replicate", "shard")
    hybrid = replicate_degree > 1
    mesh = init_device_mesh(
        ranks.device.type,
        shape if hybrid else (size,),
        mesh_dim_names=names if hybrid else names[1:],
    )
    for group in mesh.get_all_groups():
        _set_pg_timeout(
            ranks.timeout, group
        )  # a mesh makes groups that wait for ten minutes and more
    return mesh


class FullySharded(SeveralRanks):
    """FSDP2 in two units, or with several branches in one for each fitting net and one for the rest.

    On a mesh of two dimensions (HSDP) the model is cut along the second and repeated along the first.

    A fitting net gives energies and their slopes in one forward pass, so it is a unit of its own: its parameters
    are gathered while the descriptor works, and its gradients are scattered while the descriptor's are computed. The
    rest belongs to the root: the descriptor's second half, the pull-back of the slopes to the edges, is called after
    its forward pass, when FSDP2 would have freed a unit of its own.

    Fitting nets that share weights belong to the root as well: a parameter has one unit. So do all where ranks train
    different branches, because the ranks gather and scatter a unit together.

    Parameters
    ----------
    ranks, model, mesh
        The processes, their model (whose parameters are sharded in place), and their device mesh.
    reshard_after_forward
        Whether the gathered parameters are freed between forward and backward pass (stage 3).
    stratified
        Whether ranks train different branches in a step. A gradient is then the mean over the ranks that have it.
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
        fittings = [] if stratified else _own_fitting_nets(model)
        own = {p for net in fittings for p in net.parameters()}
        rest = (
            "descriptor" if isinstance(model, EnergyModel) else "parts that branches train together"
        )
        parts = [
            *(("fitting net", {*net.parameters()}) for net in fittings),
            (rest, {*model.parameters()} - own),
        ]
        for unit, params in parts:
            dtypes = sorted(
                {str(p.dtype).removeprefix("torch.") for p in params if p.requires_grad}
            )
            if len(dtypes) > 1:
                raise TrainingError(
                    f"the parameters of the {unit} are {' and '.join(dtypes)}; zero_stage 2 and 3 need one precision "
                    "for each of descriptor and fitting net, for both where branches share fitting nets or are "
                    "stratified: use zero_stage 0 or 1"
                )
        self._mesh = mesh
        self._units: list[FSDPModule] = []
        # By parameter of a stratified run: whether this rank's backward passes of the step gave it a gradient.
        self._reached: list[bool] | None = (
            [False for _ in model.parameters()] if stratified else None
        )
        for module in (*fittings, model):
            # FSDP2 registers hooks on outputs of the forward pass, which must not be views; this hook runs first.
            module.register_forward_hook(_without_views)
            if stratified:
                module.register_forward_hook(self._fill_gradients)
            self._units.append(
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
            )
        *nets, root = self._units
        if isinstance(model, Branches):
            for one in branches_of(model).values():
                # FSDP2 gathers at calls of its root.
                one.forward = functools.partial(model, one.forward)  # type: ignore[method-assign]
            for each in self._units:
                each.set_modules_to_backward_prefetch(
                    [root]
                )  # instead of nets that other branches called last
        else:
            root.set_modules_to_forward_prefetch(nets)
            root.set_modules_to_backward_prefetch(nets)

    def _fill_gradients(self, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        """Give parameters zeros that this rank's branch has no gradient for: the ranks scatter gradients together."""

        def fill() -> None:
            assert self._reached is not None
            for number, p in enumerate(module.parameters()):
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
                elif p.requires_grad:
                    self._reached[number] = True

        queued: list[bool] = []

        def queue(_: Tensor) -> None:
            if not queued:
                queued.append(True)
                torch.autograd.Variable._execution_engine.queue_callback(fill)

        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # FSDP2 ends the backward pass in such a callback, too. Its hook on this tensor comes later.
                tensor.register_hook(queue)

    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Return the gradients, which FSDP2 has averaged in the backward pass."""
        if self._reached is not None:
            self._average_over_those_reached(self._reached)
        grads = [local_part(p.grad) for p in self.model.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(grads).double().square()
        summed = self.ranks.sum(
            torch.cat([self._loss_and_requests(loss.double()), square.reshape(1)])
        )
        with self.ranks.waiting():
            numbers = summed.tolist()
        self._agree(numbers[1 : 1 + len(SIGNALS)])
        # Under HSDP every element is held, and counted, once in each group.
        replicas = self._mesh.size(0) if self._mesh.ndim > 1 else 1
        return Reduced(grads, (summed[-1] / replicas).sqrt(), summed[0] / self.ranks.size)

    def _average_over_those_reached(self, reached: list[bool]) -> None:
        """Turn means over all ranks into means over the ranks that have a gradient; remove those that none has."""
        with self.ranks.waiting():
            counts = self.ranks.sum(
                torch.tensor(reached, dtype=torch.float64, device=self.ranks.device)
            ).tolist()
        for p, count in zip(self.model.parameters(), counts, strict=True):
            if p.grad is not None and count:
                local_part(p.grad).mul_(self.ranks.size / count)
            else:
                p.grad = None  # an optimizer leaves it alone
        reached[:] = [False] * len(reached)

    def reshard(self) -> None:
        """Free the parameters that a forward-only pass has gathered."""
        for unit in self._units:
            unit.reshard()

    def _take_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
        """Take this rank's part of the state, by torch's own naming of parts."""
        groups, state = [], {}
        for group in whole["param_groups"]:
            names = list(group["param_names"])
            groups.append({**group, "params": names})
            numbered = zip(group["params"], names, strict=True)
            state.update({name: whole["state"][i] for i, name in numbered if i in whole["state"]})
        # The whole state was checked when an optimizer of the whole model loaded it. Parameters without a gradient, as
        # some in the last layer of DPA-3, have none.
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_optimizer_state_dict(
            self.model, optimizer, {"state": state, "param_groups": groups}, options=options
        )
        # torch has made state for these by a step of length 0, which Adam counts.
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if name not in state:
                    optimizer.state.pop(parameter, None)


def _own_fitting_nets(model: EnergyModel | Branches) -> list[nn.Module]:
    """Return the fitting nets that share no parameter with another one."""
    nets: list[nn.Module] = [one.atomic_model.fitting_net for one in branches_of(model).values()]
    users = Counter(p for net in nets for p in net.parameters())
    return [net for net in nets if all(users[p] == 1 for p in net.parameters())]


def _without_views(module: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x._is_view() else x, out)
