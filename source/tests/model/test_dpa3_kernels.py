"""The passes over DPA-3's angles and edges: in any order of autograd's, and by kernels on a GPU.

`test_model_kernels` runs the kernels in Triton's interpreter.
"""

import functools
import itertools
import threading

import pytest
import torch
from dpa3_passes import angle_results, derivative, distance, edge_results, edge_sum_results, node_results

from deepmd_muon.model.descriptor.dpa3.geometry import incoming
from deepmd_muon.model.nn import triton_support

PASSES = {"angles": angle_results, "edges": edge_results}
SIZES = {"angles": {"width": 30, "atoms": 192, "n_a": 32, "n_m": 64}, "edges": {"width": 120, "atoms": 192, "n_e": 64}}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("curve", ["silut:1.0", "linear"])
def test_the_last_pass_waits_for_the_third(name, curve):
    # autograd runs first what was recorded last, by counts of each thread: here the force's nodes count from 0
    found = []

    def derive(energy, positions):
        thread = threading.Thread(target=lambda: found.append(derivative(energy, positions)))
        thread.start()
        thread.join()
        return found[0]

    compute = functools.partial(PASSES[name], torch.float64, tail=True, curve=curve)
    wanted = compute()
    assert distance(compute(derive=derive), [x.detach() for x in wanted]) < 1e-13


def test_empty_slots_burden_no_atom():
    neighbor = torch.tensor([[1, 0, 2], [0, 0, 2], [1, 0, 0]])
    empty = torch.tensor([[False, True, False], [False, True, False], [False, True, True]])
    order, start, tiles, used = incoming(neighbor, empty)
    assert (tiles.tolist(), used.item()) == ([0, 1, 2], 3)
    edges = [order[first:end].tolist() for first, end in itertools.pairwise(start)]
    assert edges == [[3], [0, 6], [2, 5]]
    assert order.dtype == start.dtype == torch.int64
    assert [len(x) for x in incoming(neighbor)] == [9, 4, 3, 1]
    assert incoming(neighbor).start.tolist() == [0, 5, 7, 9]
    wide = torch.zeros(3, 40, dtype=torch.int64)
    tiles, used = incoming(wide, torch.arange(40) >= torch.tensor([[33], [0], [32]]))[2:]
    assert (tiles.tolist(), used.item()) == ([0, 2, 3, 1, 4, 5], 3)


@pytest.mark.gpu
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("large", [True, False])
def test_kernels_keep_single_precision(name, force, tail, large):
    """Also as operators; on the same inputs they give the same bits."""
    sizes = SIZES[name] if large else {"width": 37, "reach": [37, 20, 0]}
    compute = functools.partial(PASSES[name], device="cuda", tail=tail, force=force, **sizes)
    assert triton_support.usable(torch.device("cuda"))
    found = compute(torch.float32)
    wanted = [x.detach().cpu() for x in compute(torch.float64)]  # in double precision torch's operations do the work
    assert distance(found, wanted) < 1e-6
    with triton_support.traced():
        assert distance(compute(torch.float32), wanted) < 1e-6
    again = compute(torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("compute", [node_results, edge_sum_results])
def test_kernels_of_nodes_and_edge_features(monkeypatch, compute, force):
    found = [compute(dtype, "cuda", force=force) for dtype in (torch.float32, torch.float64)]
    monkeypatch.setattr(triton_support, "usable", lambda _: False)
    wanted = [x.detach().cpu() for x in compute(torch.float64, "cuda", force=force)]
    assert distance(found[0], wanted) < 1e-6
    assert distance(found[1], wanted) < 1e-13
