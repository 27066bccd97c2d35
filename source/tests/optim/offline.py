"""Compile for an H200 what would be launched there, on a machine without a GPU.

`recorded_launches` runs the package's own code with CPU tensors that claim to be on a GPU, and notes the launches with
their arguments instead of starting them; `resources` compiles one of them for sm_90 and reads what it needs.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

MULTIPROCESSORS = 132
_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_OPTIONS = ("num_warps", "num_stages")


class OnGpu(TorchFunctionMode):
    """CPU tensors that say they are on the first GPU; what is asked for there is made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to:
            args = tuple(a for a in args if not isinstance(a, torch.device))
            return func(*args, **kwargs) if len(args) + len(kwargs) > 1 else args[0]
        return func(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One launch: the kernel, what it is compiled for, and its grid."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]
    cooperative: bool
    grid: int

    @property
    def compiled_for(self):
        """What decides the machine code; grids do not."""
        return dataclasses.replace(self, grid=0)

    def __str__(self):
        shown = ", ".join(f"{k}={v}" for k, v in (*self.constants, *self.options) if v is not None)
        return f"{self.kernel.__name__}({shown})"


def _kind(parameter, value):
    """Return the type of an argument as signatures spell it, or None for a constant."""
    if parameter.is_constexpr or value is None:
        return None
    if isinstance(value, torch.Tensor):
        return "*" + _NAMES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_NAMES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, float):
        return "fp32"
    if value == 1 and not parameter.do_not_specialize:
        return None
    return "i32" if -(2**31) <= value < 2**31 else "i64"


class Recorder:
    """Stands in for a kernel and notes its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            cooperative = kwargs.pop("launch_cooperative_grid", False)
            options = tuple((key, kwargs.pop(key)) for key in _OPTIONS if key in kwargs)
            parameters = self.kernel.params
            given = {p.name: value for p, value in zip(parameters, args, strict=False)} | kwargs
            assert set(given) == {p.name for p in parameters}, self.kernel
            signature, constants, aligned = [], [], []
            for i, parameter in enumerate(parameters):
                value = given[parameter.name]
                kind = _kind(parameter, value)
                signature.append((parameter.name, kind or "constexpr"))
                if kind is None:
                    constants.append((parameter.name, value))
                elif kind.startswith("*") or (
                    isinstance(value, int) and not parameter.do_not_specialize
                ):
                    aligned += [i] if kind.startswith("*") or value % 16 == 0 else []
            parts = (tuple(signature), tuple(constants), tuple(aligned), options)
            self.launches.append(Recorded(self.kernel, *parts, cooperative, grid[0]))

        return launch


@contextmanager
def recorded_launches():
    """Yield a list that fills with the launches of what is run inside with the package's own code."""
    launches: list[Recorded] = []
    modules = [
        module for name, module in sys.modules.items() if name.startswith("deepmd_muon.optim")
    ]
    with ExitStack() as stack:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.runtime.JITFunction):
                    stack.enter_context(mock.patch.object(module, name, Recorder(value, launches)))
        for name, value in {
            "is_current_stream_capturing": lambda: False,
            "current_stream": lambda device=None: mock.Mock(cuda_stream=0),
            "Stream": mock.Mock(),
            "Event": mock.Mock(),
            "stream": mock.MagicMock(),
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: mock.Mock(
                multi_processor_count=MULTIPROCESSORS
            ),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(OnGpu())
        yield launches


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one program of a kernel needs."""

    registers: int
    spilled: int
    shared: int
    threads: int

    def __str__(self):
        return f"{self.registers} registers, {self.spilled} bytes spilled, {self.shared} bytes of shared memory"


def resources(launch: Recorded, folder: Path) -> Resources:
    """Compile a launch for sm_90."""
    attributes = {(i,): [["tt.divisibility", 16]] for i in launch.aligned}
    source = ASTSource(
        launch.kernel,
        signature=dict(launch.signature),
        constexprs=dict(launch.constants),
        attrs=attributes,
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options)
    )
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return Resources(registers, stack, compiled.metadata.shared, 32 * compiled.metadata.num_warps)
