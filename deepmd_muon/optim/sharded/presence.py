"""What ranks must agree on in every step: which gradients there are, and whether the step is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.errors import MissingGradientError
from deepmd_muon.optim.sharded.process_groups import agreeing_groups, check_names


class ComparedParameter(NamedTuple):
    """A parameter of which a gradient that is missing on some ranks only would let replicas differ.

    Attributes
    ----------
    p
        The parameter.
    name
        What messages call it; the same on all its ranks, and in the same order.
    ranks
        Those that have it, in ascending order.
    """

    p: Tensor
    name: str
    ranks: tuple[int, ...]


class GradientPresence:
    """Compares the gradients of some parameters among the ranks that have them, by one small all-reduce.

    On a CPU the result is read at once. On a GPU it is read when the next comparison begins, or by `raise_deferred`, so
    that the host does not wait for the device: all ranks then raise together, one step late.

    Parameters
    ----------
    watched
        Parameters that do not travel: one without a gradient takes no step on its rank, whatever the others do.
    ranks
        All sets of ranks on which parameters live; a set that is part of another agrees with the larger one.
    device
        Where collectives run.
    late
        Whether to read a comparison when the next one begins; None for what the device needs.

    Raises
    ------
    PlanMismatchError
        On all ranks of a group, when some of them have other parameters than the others.
    """

    def __init__(
        self,
        compared: Sequence[ComparedParameter],
        ranks: Sequence[tuple[int, ...]],
        device: torch.device,
        *,
        late: bool | None = None,
    ) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._late = on_gpu if late is None else late
        self._copied = torch.cuda.Event() if on_gpu else None
        self._groups: list[dist.ProcessGroup] = []
        self._members: list[list[Tensor]] = []  # of every group: this rank's parameters …
        self._places: list[list[int]] = []  # … where their flags are …
        self._names: list[list[str]] = []  # … and the names of all ranks' parameters, one for each flag
        rest = [each for each in compared if len(each.ranks) > 1]
        for among, group in agreeing_groups(ranks, device):
            mine = [each for each in rest if set(each.ranks) <= set(among)]
            rest = [each for each in rest if not set(each.ranks) <= set(among)]
            known = check_names([(each.ranks, each.name) for each in mine], among, group, device)
            self._groups.append(group)
            self._members.append([each.p for each in mine])
            self._places.append([known[each.ranks, each.name] for each in mine])
            self._names.append([name for _, name in known])
        # Host memory for what arrives; pinned, so that copies from a GPU do not hold the host up.
        self._arrived = [torch.zeros(2, len(names), device="cpu", pin_memory=on_gpu) for names in self._names]
        self._found: list[list[bool]] | None = None
        self._here: list[Tensor] = []
        self._pending = False

    def compare(self, flags: Tensor | None = None) -> Tensor | None:
        """Raise what the last comparison has found, and begin one of the gradients that are there now.

        While a CUDA graph is captured only `flags` are compared: a graph repeats the gradients it was captured with.

        Parameters
        ----------
        flags
            Float32 (n,), taken along: ranks have as many, and on each the largest counts.

        Returns
        -------
        Tensor or None
            Float32 (n,): the largest of all ranks.

        Raises
        ------
        MissingGradientError
            On all ranks that agree, also those that do not have the parameter.
        """
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not capturing:
            self.raise_deferred()
            self._look()
        for k, group in enumerate(self._groups):
            here = None if capturing or not self._names[k] else self._here[k]
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
        """Raise what the last comparison has found, once; without communication, and alike on all ranks.

        Raises
        ------
        MissingGradientError
            As `compare`.
        """
        if not self._pending:
            return
        self._pending = False
        if self._copied is not None:
            self._copied.synchronize()  # of the last step, long past
        names = [
            name
            for known, arrived in zip(self._names, self._arrived, strict=True)
            for name, here, missing in zip(known, *arrived.tolist(), strict=True)
            if here and missing
        ]
        if names:
            late = "the last step was not the same on all ranks; " if self._late else ""
            raise MissingGradientError(
                f"{late}some ranks have a gradient, and others have none, of {', '.join(names)}; "
                "give it a gradient on every rank (zeros will do) or on none"
            )

    def _look(self) -> None:
        """Write down on the device which gradients are here, where that has changed: float32 (2 n,), here or not."""
        found = [[p.grad is not None for p in members] for members in self._members]
        if found == self._found:
            return
        self._found = found
        self._here = []
        for names, places, there in zip(self._names, self._places, found, strict=True):
            flags = torch.zeros(2, len(names), device="cpu")
            for place, is_there in zip(places, there, strict=True):
                flags[0 if is_there else 1, place] = 1.0
            self._here.append(flags.view(-1).to(self._device))
