"""The Triton kernel that gathers the neighbours of a batch; `ResidentSystem.gather` defines its results."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN202
# Reason for both: Triton compiles these functions. Their arguments are of its own language, not of Python's, and a
# branch that is decided at compile time must be a statement.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _gather_kernel(
    neighbor,
    shift,
    all_neighbors,
    all_shifts,
    numbers,
    frame,
    atom,
    natoms,
    nnei,
    periodic: tl.constexpr,
    block: tl.constexpr,
):
    """Copy the neighbours of one atom, counted within the batch, and their cell translations."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    here = tl.load(frame + row)
    source = (tl.load(numbers + here) * natoms + tl.load(atom + row)) * nnei
    real = column < nnei
    found = tl.load(all_neighbors + source + column, real, -1).to(tl.int64)
    tl.store(neighbor + row * nnei + column, tl.where(found < 0, found, found + here * natoms), real)
    if periodic:
        for k in tl.static_range(3):
            part = tl.load(all_shifts + (source + column) * 3 + k, real, 0)
            tl.store(shift + (row * nnei + column) * 3 + k, part, real)


def gather_neighbors(
    index: torch.Tensor,
    shift: torch.Tensor | None,
    numbers: torch.Tensor,
    frame: torch.Tensor,
    atom: torch.Tensor,
    natoms: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return neighbours and cell translations of the atoms of some frames.

    Parameters
    ----------
    index, shift
        Neighbours within their frame, int32 `(nframes·natoms, nnei)`, and their translations `(…, nnei, 3)`, of all
        frames there are.
    numbers
        The frames of the batch.
    frame, atom
        Which of them, and which of its atoms, each row of the result belongs to, int64 `(nreal,)`.
    natoms
        Atoms of a frame.
    """
    nnei = index.shape[1]
    neighbor = index.new_empty(frame.shape[0], nnei, dtype=torch.int64)
    found = None if shift is None else shift.new_empty(frame.shape[0], nnei, 3)
    _gather_kernel[(frame.shape[0], triton.cdiv(nnei, BLOCK))](
        neighbor,
        neighbor if found is None else found,
        index,
        index if shift is None else shift,
        numbers,
        frame,
        atom,
        natoms,
        nnei,
        periodic=shift is not None,
        block=BLOCK,
    )
    return neighbor, found
