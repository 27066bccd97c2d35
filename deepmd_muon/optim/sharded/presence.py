"""Whether ranks agree which gradients there are, where a missing one would make them take different steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.sharded.errors import MissingGradientError
from deepmd_muon.optim.sharded.groups import group_of
from deepmd_muon.optim.sharded.members import Member


class Presence:
    """Compares the gradients of some parameters among the ranks that have them, by one small all-reduce.

    On a CPU the comparison is read at once. On a GPU it is read when the next one begins, so that the host does not
    wait for the device: all ranks then raise together, one step late.

    Parameters
    ----------
    members
        Parameters that do not travel: one without a gradient takes no step on its rank, whatever the others do.
    device
        Where collectives run.
    """

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self._device = device
        kinds: dict[tuple[int, ...], list[Member]] = defaultdict(list)
        for member in members:
            kinds[tuple(sorted(member.layout.ranks))].append(member)
        self._kinds = [(group_of(ranks, device), kinds[ranks]) for ranks in sorted(kinds) if len(ranks) > 1]
        self._found: list[tuple[bool, ...]] = []
        self._here: list[Tensor] = []
        self._arrived = [self._room(len(members)) for _, members in self._kinds]
        self._pending = False
        self._copied: torch.cuda.Event | None = None

    def compare(self) -> None:
        """Raise what the last comparison has found, and begin one of the gradients that are there now.

        Raises
        ------
        MissingGradientError
            On all ranks of a group alike.
        """
        self._read()
        found = [tuple(member.p.grad is not None for member in members) for _, members in self._kinds]
        if found != self._found:
            self._found = found
            self._here = [
                torch.tensor([there, [not x for x in there]], dtype=torch.int32, device=self._device) for there in found
            ]
        for (group, _), here, arrived in zip(self._kinds, self._here, self._arrived, strict=True):
            flags = here.clone()
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
            arrived.copy_(flags, non_blocking=True)
        self._pending = True
        if self._device.type == "cuda":
            self._copied = torch.cuda.current_stream(self._device).record_event()
        else:
            self._read()

    def _room(self, count: int) -> Tensor:
        """Return host memory for what arrives; pinned, so that copies from a GPU do not hold the host up."""
        return torch.empty(2, count, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def _read(self) -> None:
        if not self._pending:
            return
        self._pending = False
        if self._copied is not None:
            self._copied.synchronize()  # of the last step, long past
        names = [
            str(member)
            for (_, members), arrived in zip(self._kinds, self._arrived, strict=True)
            for member, here, missing in zip(members, *arrived.tolist(), strict=True)
            if here and missing
        ]
        if names:
            late = "" if self._device.type == "cpu" else "the last step was not the same on all ranks; "
            raise MissingGradientError(
                f"{late}some ranks have a gradient, and others have none, of {', '.join(names)}; "
                "give it a gradient on every rank (zeros will do) or on none"
            )
