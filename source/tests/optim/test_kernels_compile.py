"""The kernels compiled for sm_90 without a GPU: registers, spills and shared memory must fit."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

SHARED_LIMIT = 227 * 1024
TABLES = {"table": "*i64", "addresses": "*i64", "coefficients": "*fp32", "out": "*fp32"}
SHARED = {"programs": "*i32", **TABLES}
WORKSPACE = {"half": "*fp16", "sums": "*fp64", "counters": "*i32"}


def resources(kernel, signature, constants, warps, stages, tmp_path):
    """Compile and return registers, stack bytes (spills) and shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return registers, stack, compiled.metadata.shared


def fits(found, spilled=0):
    registers, stack, shared = found
    print(f"{registers} registers, {stack} bytes spilled, {shared} bytes of shared memory")
    assert registers <= 255
    assert stack <= spilled
    assert shared <= SHARED_LIMIT


# The two largest tiles spill a little, outside of the loop; with 16 warps 128 × 128 spilled more.
@pytest.mark.parametrize(("tile", "spilled"), [(0, 0), (2, 0), (3, 0), (4, 64), (5, 256)])
def test_whole_matrices(tile, spilled, tmp_path):
    from deepmd_muon.optim.polar.kernels import small_matrices

    fits(resources(small_matrices, TABLES, {"MASK": 1 << tile, "STEPS": 10}, 8, 3, tmp_path), spilled)


@pytest.mark.parametrize(("height", "warps"), [(32, 4), (64, 4), (128, 8)])
def test_strips(height, warps, tmp_path):
    from deepmd_muon.optim.polar.cooperative import strips

    fits(resources(strips, SHARED | WORKSPACE, {"MP": height, "NS": 64, "STEPS": 10}, warps, 3, tmp_path))


@pytest.mark.parametrize(("tile", "symmetric"), [(32, 32), (64, 32), (64, 64)])
def test_tiles_fit_twice_on_a_multiprocessor(tile, symmetric, tmp_path):
    from deepmd_muon.optim.polar.cooperative import tiles

    constants = {"T": tile, "G": symmetric, "K": 64, "STEPS": 10}
    found = resources(tiles, {**SHARED, "single": "*fp32", **WORKSPACE}, constants, 4, 4, tmp_path)
    fits(found)
    assert 2 * 128 * found[0] <= 65536
    assert 2 * (found[2] + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", ["SMALL", "MEDIUM", "LARGE"])
def test_products_use_the_matrix_units_without_spills(name, tmp_path):
    from deepmd_muon.optim.polar import products, symmetric

    b = getattr(products, name)
    high, t, k = b.tile * b.ratio, b.tile, b.depth
    signature = {
        "tall": f"tensordesc<fp16[{high}, {k}]>",
        "flat": f"tensordesc<fp16[{t}, {k}]>",
        "first": f"tensordesc<fp16[{high}, {t}]>",
        "second": f"tensordesc<fp16[{high}, {t}]>",
        "target": f"tensordesc<fp16[{high}, {t}]>",
        "mirror": f"tensordesc<fp16[{t}, {high}]>",
        "weights": "*fp32",
        "step": "i32",
        "order": "i32",
        "depth": "i32",
    }
    constants = {"ADDENDS": 2, "EVEN": b.ratio == 1, "T": t, "R": b.ratio, "K": k}
    fits(resources(symmetric.symmetric_product, signature, constants, b.warps, b.stages, tmp_path))
    rows, half = b.update_rows, b.update_columns // 2
    signature = {
        "polynomial": f"tensordesc<fp16[{rows}, {k}]>",
        "current": f"tensordesc<fp16[{k}, {b.update_columns}]>",
        "master": f"tensordesc<fp32[{rows}, {half}]>",
        "following": f"tensordesc<fp16[{rows}, {half}]>",
        "table": "*i64",
        "weights": "*fp32",
        "out": "*fp32",
        "step": "i32",
        "order": "i32",
        "width": "i32",
    }
    constants = {"LAST": False, "T": rows, "N": b.update_columns, "K": k}
    fits(resources(symmetric.update, signature, constants, b.warps, b.stages, tmp_path))
