"""Prepare a GPU in threads while a run reads its data.

Python joins these threads when it ends: a process that exits within a call of CUDA may crash. A
failure in a thread occurs again where the result is needed, and is reported there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from deepmd_muon.optim import HybridMuon


def warm_up(device: torch.device) -> None:
    """Load the libraries of a GPU and kernels of torch; nothing on a CPU."""
    if device.type == "cuda":
        _start(lambda: _use_libraries(device))


def compile_kernels(optimizer: HybridMuon) -> None:
    """Compile an optimizer's kernels; its first step waits for them."""
    _start(optimizer.compile_kernels)


def _start(work: Callable[[], object]) -> None:
    def attempt() -> None:
        with contextlib.suppress(Exception):
            work()

    threading.Thread(target=attempt, name="deepmd_muon-warm-up").start()


def _use_libraries(device: torch.device) -> None:
    import torch

    from deepmd_muon.model.neighbors.atoms import Cells
    from deepmd_muon.model.nn import triton_support

    with torch.cuda.device(device):
        for dtype in (torch.float64, torch.float32):
            x = torch.zeros(16, 16, dtype=dtype, device=device)
            torch.addmm(x[0], x, x)
        triton_support.usable(device)
        # Operations that write frames to the device and read them there.
        row = torch.zeros(1, dtype=torch.int64, device=device)
        boxes = torch.eye(3, dtype=torch.float64, device=device)[None]
        for values in (*Cells.of_some(boxes, rcut=1.0), row, row > 0):
            values.index_copy_(0, row, values.index_select(0, row))
