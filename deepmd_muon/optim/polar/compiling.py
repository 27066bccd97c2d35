"""Calls that compile kernels ahead of their first use, one kernel each, to be made in threads beside each other.

Triton compiles outside of Python's lock, and most kernels of this package take it seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.polar import dispatch
from deepmd_muon.optim.polar.address_table import AddressTable, captured_addresses
from deepmd_muon.optim.polar.one_launch import launches_for, start_launch
from deepmd_muon.optim.polar.run import check, choices
from deepmd_muon.optim.polar.schedules import Coefficients
from deepmd_muon.optim.polar.tables import Inputs

#: Implementations whose kernels are compiled for classes of shapes, so that zeros of the same shapes reach them.
_BY_CLASS = ("whole", "strips", "tiles")


def compilations(
    matrices: Sequence[Tensor], coefficients: Coefficients, operand: torch.dtype, allowed: Collection[str]
) -> list[Callable[[], object]]:
    """Return calls that compile and check the kernels which orthogonalize such matrices, each another one.

    Parameters
    ----------
    matrices, coefficients, operand, allowed
        As in `orthogonalize_with_kernels`; only shapes, dtypes and the device of `matrices` matter, and they are kept
        as long as the calls.

    Returns
    -------
    list of callables
        A call raises what the compiler or the driver raises.
    """
    device = matrices[0].device
    usable = tuple(name for name in allowed if name not in dispatch.FAILED)
    geometry = tuple((tuple(x.shape), x.stride(), x.dtype) for x in matrices)
    chosen = choices(geometry, torch.cuda.get_device_capability(device), operand, usable)
    calls: list[Callable[[], object]] = [functools.partial(captured_addresses, matrices[:1])]
    for name in dict.fromkeys(chosen):
        if name == "torch":
            continue
        calls.append(functools.partial(check, name, device))
        if name in _BY_CLASS:
            calls += _launches(name, [x for x, own in zip(matrices, chosen, strict=True) if own == name], coefficients)
    return calls


def _launches(name: str, matrices: Sequence[Tensor], coefficients: Coefficients) -> list[Callable[[], object]]:
    """Return one launch for each kernel that these matrices need."""
    device = matrices[0].device
    plan = launches_for(name, tuple((tuple(x.shape), x.stride(), x.dtype) for x in matrices), device)
    inputs = Inputs(AddressTable(len(matrices), device).of(matrices), matrices)
    different = {tuple(launch.constants.items()): launch for launch in plan.launches}
    out = torch.empty(plan.out_size, dtype=torch.float32, device=device)
    return [functools.partial(start_launch, name, launch, inputs, coefficients, out) for launch in different.values()]
