"""Matrix products in the requested precision, independent of the caller's torch settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_REDUCED = {"bf16", "tf32"}


@contextlib.contextmanager
def requested_precision() -> Iterator[None]:
    """Disable autocast, and multiply float32 matrices in float32.

    Autocast would round float32 operands to 16 bits; ``torch.set_float32_matmul_precision("high")`` and "medium" to
    TF32 or bf16. On the Gram matrix of a low-rank gradient either rounding error grows until the result is NaN. The
    caller's settings are restored on exit.
    """
    with torch._C._DisableAutocast():
        matmuls = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul  # type: ignore[attr-defined]  # set at runtime
        given = [matmul.fp32_precision for matmul in matmuls]
        if not _REDUCED.intersection(given):
            yield
            return
        try:
            word = torch.get_float32_matmul_precision()
        except RuntimeError:  # the caller uses the newer interface, which the older one cannot express
            word = None
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            if word is not None:
                torch.set_float32_matmul_precision(word)
            for matmul, value in zip(matmuls, given, strict=True):
                matmul.fp32_precision = "none"  # inherited from the backend or from torch.backends
                if matmul.fp32_precision != value:
                    matmul.fp32_precision = value
