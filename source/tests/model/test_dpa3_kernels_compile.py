"""The kernels of DPA-3, compiled for a Hopper GPU without one: what they spill at the sizes of DeePMD's example."""

import importlib.metadata
import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from compiled_launches import compiled_launches
from dpa3_passes import angle_results, edge_results

from deepmd_muon.model.descriptor.dpa3 import angles, edges
from deepmd_muon.model.descriptor.dpa3.kernels import angles as angle_kernels
from deepmd_muon.model.descriptor.dpa3.kernels import edges as edge_kernels

# Other compilers place registers otherwise.
MEASURED = importlib.metadata.version("triton").startswith(("3.6.", "3.7."))
# Spilled bytes at most. The order of statements decides about them: a step of DPA-3 took 3 % longer while both
# gradient kernels spilled 200 bytes more (H100, Triton 3.6).
SPILLED = {
    "angles": {"adjoint_kernel": 0, "tangent_kernel": 0, "gradient_kernel": 160},
    "edges": {"adjoint_kernel": 88, "tangent_kernel": 48, "gradient_kernel": 176},
}
CASES = {
    "angles": (angle_results, angles, angle_kernels, {"width": 30, "n_a": 32, "n_m": 64}),
    "edges": (edge_results, edges, edge_kernels, {"width": 120, "n_e": 64}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_spill_no_more_than_measured(name, monkeypatch, tmp_path):
    compute, module, launches, sizes = CASES[name]
    monkeypatch.setattr(module, "_kernels", lambda *_: launches)
    with compiled_launches(tmp_path) as usages:
        compute(torch.float32, tail=True, force=True, atoms=192, **sizes)
    by_kernel = {usage.kernel: usage for usage in usages}
    assert {"value_kernel", *SPILLED[name]} <= by_kernel.keys()
    assert all(usage.shared <= 227 * 1024 for usage in usages)
    if MEASURED:
        limits = SPILLED[name]
        spilled = {usage.kernel: usage.stack for usage in usages}
        assert {k: n for k, n in spilled.items() if n > limits.get(k, 0)} == {}, spilled
