"""Messages for a full disk, lack of memory, a faulty device.

Finds torch's errors by class name, without torch.
"""

from __future__ import annotations

import errno
import re

from deepmd_muon.files import WriteError

_ADVICE = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or ask for a larger quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or write to another file system",
    errno.EROFS: "write to another place, or mount it writable",
    errno.EIO: "the disk or its connection fails: see the system's log, or write to another place",
}
_GPU_OUT_OF_MEMORY = re.compile(r"(CUDA|HIP|XPU) error: out of memory|_STATUS_ALLOC_FAILED")
_LESS = "use smaller batches (training/training_data/batch_size), a smaller sel or model"


def is_disk_failure(error: OSError) -> bool:
    """Return whether a disk is full, read-only or faulty: it would take no other file either."""
    return error.errno in _ADVICE


def failure_of(error: BaseException) -> str | None:
    """Describe a failure of the machine and its remedy; None for errors of another kind.

    Parameters
    ----------
    error
        An error of Python, NumPy or torch. Of errors of files, only a `WriteError` is described.
    """
    text = str(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, WriteError):
        advice = _ADVICE.get(error.errno or 0)
        return f"{error}; {advice}" if advice else text
    if "OutOfMemoryError" in kinds or _GPU_OUT_OF_MEMORY.search(text):
        return (
            f"the GPU has no memory left{_missing_memory(text)}: {_LESS}, or more GPUs with "
            "training/zero_stage 3"
        )
    host_out_of_memory = isinstance(error, MemoryError) or "DefaultCPUAllocator" in text
    if host_out_of_memory or getattr(error, "errno", 0) == errno.ENOMEM:
        return (
            f"this machine has no memory left{_missing_memory(text)}: {_LESS}, or end other "
            "programs"
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return "the system starts no more threads: raise the limit of processes (ulimit -u)"
    if "AcceleratorError" in kinds or text.startswith("CUDA error:"):
        line = text.partition("\n")[0]
        return (
            f"the GPU reports an error ({line}): see the system's log; training/capture off may "
            "show where it is"
        )
    return None


def _missing_memory(text: str) -> str:
    """Return the size that torch failed to allocate, in parentheses.

    If the message does not say it, return its first line.
    """
    size = re.search(r"ried to allocate ([\d.]+ ?(?:bytes|[KMGTPE]?i?B))", text)
    line = f"{size[1]} could not be allocated" if size else text.partition("\n")[0]
    return f" ({line})" if line else ""
