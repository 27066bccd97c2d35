"""Work that takes long at the start of a run, most of it on a GPU, done in threads beside the rest of the start.

Python joins these threads when it ends: a process that exits within a call of CUDA may crash. A failure in
them occurs again where the result is needed, and is reported there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from deepmd_muon.optim import HybridMuon


def load_libraries() -> None:
    """Begin to load the largest library of torch in a thread, if torch has not been imported.

    Importing torch loads it under Python's lock, for a quarter of a second in which no other thread runs.
    """
    if "torch" not in sys.modules:
        _begin(_load_libraries)


def open_device() -> None:
    """Begin to create the CUDA context of the first GPU in a thread, before torch is imported.

    torch uses the same context. Processes that train together choose their device later, and nothing is begun where the
    environment variable DEVICE asks for the CPU, or where there is no driver.
    """
    several = {"WORLD_SIZE", "SLURM_PROCID"} & os.environ.keys()
    if os.environ.get("DEVICE", "").lower() != "cpu" and not several:
        _begin(_retain_context)


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collection while torch is imported: it finds nothing there, in a tenth of the time.

    Later collections skip what was imported. Nothing is changed in a process that has imported torch.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def warm_up(device: torch.device) -> None:
    """Load Triton and kernels of torch in threads, while data are read; nothing on a CPU."""
    if device.type == "cuda":
        _begin(_name_cache)
        _begin(_use_libraries, device)


def compile_kernels(optimizer: HybridMuon) -> None:
    """Compile an optimizer's kernels in a thread, while data are read; its first step waits for them."""
    _begin(_compile, optimizer)


def _begin(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="deepmd_muon-early-start").start()


def _load_libraries() -> None:
    """Load the library and what torch loads before it, in torch's order and modes; torch reports what is missing."""
    with contextlib.suppress(OSError, ValueError):
        found = importlib.util.find_spec("torch")
        if found is not None and found.origin is not None:
            folder = Path(found.origin).parent / "lib"
            ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(folder / "libtorch_cpu.so"))


def _retain_context() -> None:
    """Retain the primary context by the driver's own functions; they say by a number that they failed."""
    with contextlib.suppress(
        OSError, AttributeError
    ):  # no driver, or an odd one: torch will report it
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _name_cache() -> None:
    """Let Triton hash its own files, which takes a third of a second: it names its cache by the hash, and keeps it."""
    with contextlib.suppress(Exception):  # not installed, or a version that names it in another way
        from triton.runtime import cache

        cache.triton_key()


def _use_libraries(device: torch.device) -> None:
    import torch

    from deepmd_muon.model.neighbors.atoms import Cells
    from deepmd_muon.model.nn import triton_support

    with contextlib.suppress(Exception), torch.cuda.device(device):
        for dtype in (torch.float64, torch.float32):
            x = torch.zeros(16, 16, dtype=dtype, device=device)
            torch.addmm(x[0], x, x)
        triton_support.usable(device)
        # Operations that write frames to the device and read them there.
        row = torch.zeros(1, dtype=torch.int64, device=device)
        for values in (
            *Cells.of_some(torch.eye(3, dtype=torch.float64, device=device)[None], 1.0),
            row,
            row > 0,
        ):
            values.index_copy_(0, row, values.index_select(0, row))


def _compile(optimizer: HybridMuon) -> None:
    with contextlib.suppress(Exception):
        optimizer.compile_kernels()
