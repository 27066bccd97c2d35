"""Kernels compiled ahead of a computation: what is launched meanwhile, and what is launched afterwards."""

import shutil
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from deepmd_muon.model.nn import compile_ahead as compile_ahead_module
from deepmd_muon.model.nn.compile_ahead import _ZeroedMemory, compile_ahead
from deepmd_muon.optim.cuda import keep_launchers_apart
from deepmd_muon.train.step import step

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@triton.jit
def fill_kernel(out, value: tl.constexpr):
    tl.store(out + tl.program_id(0), value)


@triton.jit
def wrong_kernel(out):
    tl.store(out, tl.no_such_function(out))


class Filled(torch.autograd.Function):
    """Fills its result with 3 and its gradient with 5, by kernels; the gradient is indexed by the result."""

    @staticmethod
    def forward(ctx, x):
        index = torch.empty(8, dtype=torch.int64, device=x.device)
        fill_kernel[(8,)](index, 3)
        ctx.save_for_backward(index)
        return x[index].clone()

    @staticmethod
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        scale = torch.empty(8, dtype=gradient.dtype, device=gradient.device)
        fill_kernel[(8,)](scale, 5)
        return scale[index] * gradient


def gradient_of_filled(x):
    (gradient,) = torch.autograd.grad(Filled.apply(x).sum(), x)
    return gradient


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler")
def test_a_launcher_that_is_loaded_again_leaves_the_launcher_of_another_thread(
    tmp_path, monkeypatch
):
    from triton.runtime import build

    def load(number):
        return build.compile_module_from_src(
            LAUNCHER.replace("NUMBER", str(number)), "__triton_launcher"
        )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    keep_launchers_apart()
    load(1)
    other = load(2)  # another thread has it, and has not read its function
    load(1)
    assert other.launch() == 2


def test_allocations_are_zero_in_forward_and_backward_without_torch_compiler():
    class Allocating(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.new_empty(gradient.shape)

    was_imported = "torch._dynamo" in sys.modules
    x = torch.ones(1000, requires_grad=True)
    with _ZeroedMemory(), torch.autograd.set_multithreading_enabled(False):
        y = Allocating.apply(x)
        y.sum().backward()
    assert not y.any()
    assert not x.grad.any()
    assert ("torch._dynamo" in sys.modules) == was_imported


@pytest.mark.parametrize("tf32", [False, True])
def test_kernels_of_a_step_are_compiled_for_its_products(monkeypatch, tf32):
    """Kernels have the precision of products as a constant: in another one they would be useless."""
    precisions = []
    monkeypatch.setattr(step, "usable", lambda _: True)
    monkeypatch.setattr(
        compile_ahead_module,
        "compile_ahead",
        lambda *_: precisions.append(torch.get_float32_matmul_precision()),
    )
    optimizer = SimpleNamespace(zero_grad=lambda set_to_none: None)
    training_step = step.TrainingStep(
        strategy=SimpleNamespace(cuts_parameters=False),
        loss=None,
        optimizer=optimizer,
        guard=None,
        tf32=tf32,
    )
    vars(training_step)["_trained"] = [torch.zeros(1)]
    training_step.compile_kernels(batch=None, lr_fraction=1.0)
    assert precisions == ["high" if tf32 else "highest"]


class TestOnGpu:
    pytestmark = on_gpu

    def test_computation_is_right_after_its_kernels_were_compiled_ahead(self):
        x = torch.ones(8, device="cuda", requires_grad=True)
        rehearsed = []
        threads = []

        def compute():
            threads.append(threading.get_ident())
            rehearsed.append(gradient_of_filled(x))

        compile_ahead(compute, x.device)
        assert threads == [threading.get_ident()]
        # In the rehearsal no kernel ran: index and scale were zero.
        assert rehearsed[0].tolist() == [0.0] * 8
        assert gradient_of_filled(x).tolist() == [5.0] * 8
        compile_ahead(compute, x.device)  # nothing is left to compile, so everything runs
        assert rehearsed[1].tolist() == [5.0] * 8

    def test_error_of_a_kernel_occurs_in_the_computation_not_in_the_rehearsal(self):
        out = torch.zeros(1, device="cuda")
        compile_ahead(lambda: wrong_kernel[(1,)](out), out.device)
        for _ in range(2):
            with pytest.raises(Exception, match="no_such_function"):
                wrong_kernel[(1,)](out)

    def test_failing_rehearsal_leaves_the_computation_alone(self):
        x = torch.ones(8, device="cuda", requires_grad=True)

        def compute():
            gradient_of_filled(x)
            raise ValueError("zeros are not expected here")

        compile_ahead(compute, x.device)
        assert gradient_of_filled(x).tolist() == [5.0] * 8
