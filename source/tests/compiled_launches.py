"""Compile the launches of code for a Hopper GPU on a machine without one.

`compiled_launches` runs code with tensors on the CPU. Its launches do nothing; each is compiled once for sm_90 as the
GPU would compile it, with nested tuples and their sizes.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

TARGET = GPUTarget("cuda", 90, 32)


class Usage(NamedTuple):
    """What a program of a kernel takes."""

    kernel: str
    registers: int
    stack: int  # bytes, spilled registers
    shared: int  # bytes


@contextmanager
def compiled_launches(folder: Path):
    """Yield a list that fills with the `Usage` of the launches inside."""
    backend = make_backend(TARGET)
    usages: list[Usage] = []
    seen = set()

    def run(kernel, *args, grid, warmup, **kwargs):
        kwargs |= {"debug": False, "instrumentation_mode": ""}
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        key = (kernel, str(specialization), str(options))
        if key in seen:
            return
        seen.add(key)
        options, signature, constants, attributes = kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=TARGET, options=options.__dict__)
        usages.append(usage_of(kernel.__name__, compiled, folder))

    with mock.patch.object(triton.JITFunction, "run", run):
        yield usages


def usage_of(name: str, compiled, folder: Path) -> Usage:
    """Read what a compiled kernel takes."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return Usage(name, registers, stack, compiled.metadata.shared)
