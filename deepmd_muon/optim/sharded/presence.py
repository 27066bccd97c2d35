"""Agreement of ranks in every step: which gradients exist, the settings of groups, and whether the step is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.cuda import is_capturing
from deepmd_muon.optim.errors import MissingGradientError, PlanMismatchError
from deepmd_muon.optim.sharded.agreement import KEYS, GroupColumns, difference
from deepmd_muon.optim.sharded.process_groups import agreeing_groups, check_names

# Settings are compared in this many steps, where no step has a collective for them to travel in.
_RARELY = 100


class ComparedParameter(NamedTuple):
    """A parameter whose replicas would diverge if only some ranks had its gradient.

    Names, and their order, must be the same on all its ranks, which ascend.
    """

    p: Tensor
    name: str
    ranks: tuple[int, ...]


class GradientPresence:
    """Compares by one small all-reduce which parameters have gradients on the ranks that hold them.

    On a CPU the result is read at once. On a GPU it is read when the next comparison begins, or by `raise_deferred`, so
    that the host does not wait for the device: all ranks then raise together, one step late.

    Parameters
    ----------
    compared
        Parameters whose step is not exchanged: a rank without a gradient would not step them.
    ranks
        All sets of ranks that hold parameters; a subset of another set is compared as part of that.
    late
        Whether to read a comparison when the next one begins; None: only on a GPU.
    columns
        Settings of groups, which travel in the same collective, or in one of their own in every hundredth step.

    Raises
    ------
    PlanMismatchError
        On all ranks of a group, when their parameters differ.
    """

    def __init__(
        self,
        compared: Sequence[ComparedParameter],
        ranks: Sequence[tuple[int, ...]],
        device: torch.device,
        *,
        late: bool | None = None,
        columns: GroupColumns | None = None,
    ) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._late = on_gpu if late is None else late
        self._copied = torch.cuda.Event() if on_gpu else None
        self._groups: list[dist.ProcessGroup] = []
        self._members: list[list[Tensor]] = []  # for each group: this rank's parameters,
        self._places: list[list[int]] = []  # the positions of their flags,
        self._names: list[list[str]] = []  # and the names of all ranks' parameters, one per flag
        self._columns, self._steps = columns, 0
        self._entries: list[list[tuple[int, int]]] = []  # this rank's groups of parameters: number, first column
        self._labels: list[list[str]] = []  # and all ranks'
        rest = [each for each in compared if len(each.ranks) > 1]
        groups = [] if columns is None else list(enumerate(columns.entries))
        for among, group in agreeing_groups(ranks, device):
            mine = [each for each in rest if set(each.ranks) <= set(among)]
            rest = [each for each in rest if not set(each.ranks) <= set(among)]
            known = check_names([(each.ranks, each.name) for each in mine], among, group, device)
            self._groups.append(group)
            self._members.append([each.p for each in mine])
            self._places.append([known[each.ranks, each.name] for each in mine])
            self._names.append([name for _, name in known])
            held = [(number, entry) for number, entry in groups if set(entry[0]) <= set(among)]
            groups = [each for each in groups if each not in held]
            found = check_names([entry for _, entry in held], among, group, device)
            self._entries.append([(number, len(known) + len(KEYS) * found[entry]) for number, entry in held])
            self._labels.append([name for _, name in found])
        # Host memory for the results; pinned, so that copies from a GPU are asynchronous.
        self._widths = [len(a) + len(KEYS) * len(b) for a, b in zip(self._names, self._labels, strict=True)]
        self._arrived = [torch.zeros(2, width, device="cpu", pin_memory=on_gpu) for width in self._widths]
        self._found: list[list[bool]] | None = None
        self._here: list[Tensor] = []
        self._pending = False

    def compare(self, flags: Tensor | None = None) -> Tensor | None:
        """Raise the error of the previous comparison, and start a comparison of the present gradients.

        `flags`, float32 (n,) on all ranks, are reduced in the same collective; the result is their maximum over ranks.
        During the capture of a CUDA graph only they are reduced: replays use the same gradients.

        Raises
        ------
        MissingGradientError
            On all ranks of the group, including those that do not hold the parameter.
        """
        capturing = is_capturing()
        if not capturing:
            self.raise_deferred()
            self._look()
        rarely = self._steps % _RARELY == 0
        self._steps += 1
        for k, group in enumerate(self._groups):
            wanted = self._names[k] or (self._labels[k] and (rarely or flags is not None))
            here = self._here[k] if wanted and not capturing else None
            sent = [x for x in (here, flags) if x is not None]
            if not sent:
                continue
            together = torch.cat(sent)
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            if here is not None:
                self._arrived[k].copy_(together[: len(here)].view(2, -1), non_blocking=True)
                self._pending = True
            if flags is not None:
                flags = together[len(together) - len(flags) :]
        if self._pending and not capturing:
            if self._copied is not None:
                self._copied.record(torch.cuda.current_stream(self._device))
            if not self._late:
                self.raise_deferred()
        return flags

    def raise_deferred(self) -> None:
        """Raise the error of the last comparison, once; identical on all ranks, without communication."""
        if not self._pending:
            return
        self._pending = False
        if self._copied is not None:
            self._copied.synchronize()  # recorded in the last step
        late = "the last step differed between ranks; " if self._late else ""
        read = [arrived.tolist() for arrived in self._arrived]
        for arrived in self._arrived:
            arrived.zero_()  # reported once
        names = [
            name
            for known, arrived in zip(self._names, read, strict=True)
            for name, here, missing in zip(known, *arrived, strict=False)
            if here and missing
        ]
        if names:
            raise MissingGradientError(
                f"{late}some ranks have a gradient of {', '.join(names)} and others have none; "
                "provide one on every rank (zeros suffice) or on none"
            )
        for known, labels, (largest, negated) in zip(self._names, self._labels, read, strict=True):
            for i, label in enumerate(labels):
                here = slice(len(known) + i * len(KEYS), len(known) + (i + 1) * len(KEYS))
                different = difference(label, largest[here], [-x for x in negated[here]])
                if different:
                    raise PlanMismatchError(f"{late}{different}; give all ranks the same settings")

    def _look(self) -> None:
        """Update the flags on the device if local gradients or settings have changed.

        Float32 (2, n): for parameters, 1 where the gradient is present, and where it is missing; for settings, value
        and negative, so that the maximum over ranks gives their largest and smallest.
        """
        found = [[p.grad is not None for p in members] for members in self._members]
        changed = self._columns is not None and self._columns.changed()
        if found == self._found and not changed:
            return
        self._found = found
        self._here = []
        for k, (places, there) in enumerate(zip(self._places, found, strict=True)):
            flags = torch.zeros(2, self._widths[k], device="cpu")
            for place, is_there in zip(places, there, strict=True):
                flags[0 if is_there else 1, place] = 1.0
            flags[:, len(self._names[k]) :] = -torch.inf  # of groups on other ranks
            for number, start in self._entries[k]:
                assert self._columns is not None
                values = torch.tensor(self._columns.values(number), device="cpu")
                flags[:, start : start + len(KEYS)] = torch.stack([values, -values])
            self._here.append(flags.view(-1).to(self._device))
