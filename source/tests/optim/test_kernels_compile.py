"""Every kernel compiled for an H200 without a GPU: registers, spills and shared memory are listed and must fit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kernel_cases import COEFFICIENTS, default_choice, fits, forget_workspaces
from offline import MULTIPROCESSORS, Recorded, Recorder, recorded_launches, resources

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.cuda import launch_in_threads
from deepmd_muon.optim.polar import SCHEDULES, dispatch, symmetric_launch
from deepmd_muon.optim.polar.orthogonalization import run_kernels
from deepmd_muon.optim.polar.tables import Application
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.magma import SCORE_START
from deepmd_muon.optim.update import fused, fused_steps
from deepmd_muon.optim.update.fused import FusedMuon
from deepmd_muon.optim.update.gradients import StepControl

REGISTERS, SHARED = (
    65536,
    228 * 1024,
)  # of a multiprocessor; a program has 1 KiB of shared memory less
# Spills that are known, all outside of the loops [bytes]: the two largest tiles of whole matrices (with 16 warps the
# second spilled more), the last step of the largest products, one launch of 30, exact updates, faster so than with half
# the tile, two registers of the fused step in bfloat16, and the tallest strips, faster so than narrower ones where these
# do not all run at once.
# Another compiler places registers otherwise: what it spills is listed, and what does not fit is still an error.
MEASURED = importlib.metadata.version("triton").startswith(("3.6.", "3.7."))
SPILLED = {
    "small_matrices(MASK=16,": 64,
    "small_matrices(MASK=32,": 256,
    "advance(DTYPE=bf16,": 8,  # none with Triton 3.7
    "strips(MASK=4, WIDE=64,": 24,  # 16 with Triton 3.7
    "strips(MASK=4, WIDE=32,": 16,  # none with Triton 3.6
    "update(READ=0, WRITE=1, KEEP=False, CHUNK=0, T=128, N=256,": 624,
    "update(READ=0, WRITE=4, KEEP=False, CHUNK=0, TYPE=fp32, T=128, N=256,": 32,
    "update(READ=0, WRITE=5, KEEP=False, CHUNK=0, TYPE=fp32, T=128, N=256,": 48,
    "update(READ=0, WRITE=0, KEEP=True, CHUNK=1024, T=128, N=256,": 64,
    "update(READ=1, WRITE=0, KEEP=True, CHUNK=1024, T=128, N=256,": 96,
    "update(READ=2, WRITE=0, KEEP=True, CHUNK=1024, T=128, N=256,": 96,
}
# Shapes and batches that reach every tile of every implementation.
CASES = {
    "whole": [(1, 17, 33), (1, 30, 200), (1, 40, 60), (1, 60, 128), (1, 64, 250), (1, 127, 127)],
    "strips": [
        (1, 20, 400),
        (1, 60, 400),
        (1, 128, 384),
        (9, 32, 576),
        (6, 128, 768),
        (2, 240, 240),
        (2, 240, 1600),
    ],
    "symmetric": [
        *[(1, 500, 700), (1, 500, 2000), (40, 768, 768), (40, 768, 2048), (40, 2048, 768)],
        *[(1, 8192, 8192), (1, 8191, 8191), (1, 16384, 8192), (3, 2048, 8192), (3, 8192, 2048)],
    ],
}
# A kernel takes one to four seconds, the large products of `symmetric` half a minute: by default the smallest tiles and
# the largest of the others, with -m slow all.
QUICK_CASES = {
    "whole": [(1, 17, 33), (1, 127, 127)],
    "strips": [(1, 20, 400), (2, 240, 1600)],
}
ORTHOGONALIZATION = [
    *QUICK_CASES.items(),
    *(pytest.param(name, shapes, marks=pytest.mark.slow) for name, shapes in CASES.items()),
]


@pytest.fixture(scope="module")
def listing():
    """Collect a line per kernel; `pytest -s` shows them."""
    lines: list[str] = []
    yield lines
    print("\nkernels compiled for sm_90 (H200):", *lines, sep="\n  ")


def check(found, folder, listing):
    """Compile what was recorded, each kind once, and see that it fits, as often as programs must run at once."""
    grids: dict[Recorded, int] = {}
    for launch in found:
        grids[launch.compiled_for] = max(grids.get(launch.compiled_for, 0), launch.grid)
    assert grids
    for launch, grid in grids.items():
        need = resources(launch, folder)
        line = f"{launch}: {need}"
        if line not in listing:
            listing.append(line)
        at_once = -(-grid // MULTIPROCESSORS) if launch.cooperative else 1
        assert at_once * need.registers * need.threads <= REGISTERS, line
        assert at_once * (need.shared + 1024) <= SHARED, line
        if MEASURED:
            known = [most for name, most in SPILLED.items() if line.startswith(name)]
            assert need.spilled <= max(known, default=0), line


@pytest.mark.parametrize(("name", "shapes"), ORTHOGONALIZATION)
def test_orthogonalization(name, shapes, tmp_path, listing):
    shapes = [shape for shape in shapes if fits(name, shape[1:])]
    assert shapes
    with recorded_launches() as found:
        for shape in shapes:
            run_kernels(name, [torch.empty(shape)], COEFFICIENTS)
    forget_workspaces()
    check(found, tmp_path, listing)
    if name == "symmetric":  # inputs and results were in tiles, turned or not, and elsewhere
        assert all(f"READ={i}" in "".join(map(str, found)) for i in range(3))
        assert all(f"WRITE={i}" in "".join(map(str, found)) for i in range(4))


def test_every_implementation_is_compiled():
    assert {*CASES, "torch"} == set(dispatch.IMPLEMENTATIONS)
    assert {*QUICK_CASES} < {*CASES}


def test_the_search_of_tiles_launches_every_tile(monkeypatch):
    """The benchmark passes kernels their arguments itself."""
    path = Path(__file__).parents[2] / "benchmarks" / "kernel_tiles.py"
    spec = importlib.util.spec_from_file_location("kernel_tiles", path)
    search = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(search)
    monkeypatch.setattr(search, "timed", lambda run: (run(), 1.0)[1])
    with recorded_launches() as found:
        for name in ("symmetric_product", "update"):
            monkeypatch.setattr(search, name, Recorder(getattr(search, name), found))
        rows = list(search.products("1x256x512"))
    launched = [launch.kernel.__name__ for launch in found]
    assert launched.count("symmetric_product") == 2 * len(search.SYMMETRIC)
    assert launched.count("update") == 2 * len(search.UPDATE)
    assert len(rows) == len(search.SYMMETRIC) + 2 * len(search.UPDATE)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2048, 8192), (3, 8192, 2048), (1, 4096, 4096)])
def test_updates_by_the_last_product(shape, tmp_path, listing):
    with recorded_launches() as found:
        targets, squares = (
            torch.zeros(shape[0], 2, dtype=torch.int64),
            torch.zeros(shape[0], 1, dtype=torch.float64),
        )
        numbers = torch.zeros(5, dtype=torch.float64)
        given = Application([targets], [squares], torch.float32, torch.zeros(3), numbers)
        symmetric_launch.apply_by_products(
            [torch.empty(shape)], SCHEDULES["polar-express-5"].coefficients, given
        )
    found = [
        launch for launch in found if f"WRITE={5 if shape[1] > shape[2] else 4}" in str(launch)
    ]
    check(found, tmp_path, listing)


def test_kernels_are_compiled_ahead_of_the_launches_that_need_them(monkeypatch):
    """The shapes are those of DPA-3 and se_e2_a, whose strips need several launches."""
    checked = []
    monkeypatch.setattr(
        fused_steps, "check", lambda name, device: checked.append(name)
    )  # compares numbers
    shapes = [
        (12, 64, 320),
        (6, 128, 240),
        (6, 320, 128),
        (6, 128, 768),
        (2, 240, 240),
        (1, 240, 1600),
    ]
    shapes += [(2, 25, 50), (2, 50, 100), (1, 128, 128), (6, 2, 128), (6, 32, 128)]
    matrices = [torch.empty(shape) for shape in shapes]
    with recorded_launches() as found:
        for call in fused_steps.compilations(matrices, COEFFICIENTS):
            call()
        count = len(found)
        for name in ("whole", "strips"):
            run_kernels(
                name,
                [x for x in matrices if default_choice(x.shape[1:], x.shape[0]) == name],
                COEFFICIENTS,
            )
    forget_workspaces()
    ahead, needed = (
        {launch.compiled_for for launch in some} for some in (found[:count], found[count:])
    )
    assert sorted(checked) == ["strips", "whole"]
    assert len({launch.kernel for launch in needed}) == 3  # with that of the addresses
    assert needed <= ahead


def test_first_launches_run_beside_each_other_and_their_errors_wait():
    meeting = threading.Barrier(2, timeout=60)
    done = []

    def fail():
        meeting.wait()
        raise RuntimeError("no compiler")

    with mock.patch.object(os, "cpu_count", return_value=2):
        launch_in_threads([fail, lambda: done.append(meeting.wait())], torch.device("cpu"))
    assert len(done) == 1


def test_first_launches_use_the_stream_of_their_caller():
    """Else they read tables of addresses that its stream has not written yet."""
    used = []

    @contextlib.contextmanager
    def use(stream):
        used.append(stream)
        yield

    with (
        mock.patch.object(torch.cuda, "current_stream", lambda device: f"that of {device}"),
        mock.patch.object(torch.cuda, "stream", use),
    ):
        launch_in_threads([lambda: used.append("launch")], torch.device("cuda", 0))
    assert used == ["that of cuda:0", "launch"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fused_steps(dtype, tmp_path, listing):
    settings = HybridMuonConfig(flash_muon=False, precision="float32").explicit()
    view = MatrixView(2, 8, 36, "columns", (20, 16))
    with recorded_launches() as found, torch.no_grad():
        p, m = torch.ones(2, 8, 36, dtype=dtype), torch.ones(2, 8, 36, dtype=dtype)
        fused = FusedMuon(
            [p],
            [m],
            [torch.full((4,), SCORE_START, device=p.device)],
            [view],
            settings,
            recording=False,
        )
        fused.step([torch.ones_like(p)], 0.1, StepControl(), maximize=False)
    check(found, tmp_path, listing)


class Log:
    """Stands in for the second stream, and notes among the launches where it begins and ends."""

    def __init__(self, notes):
        self.notes = notes

    def fork(self):
        self.notes.append("fork")

    def __enter__(self):
        self.notes.append("beside:")

    def __exit__(self, *error):
        self.notes.append("join")


def test_only_the_larger_matrices_stand_between_first_and_last_launch(monkeypatch):
    views = [MatrixView(1, 16, 16), MatrixView(1, 240, 240), MatrixView(1, 8, 24)]
    with recorded_launches() as found, torch.no_grad():

        def polar_factors(matrices, settings):
            found.append(", ".join("x".join(map(str, x.shape)) for x in matrices))
            return [torch.zeros_like(x) for x in matrices]

        monkeypatch.setattr(fused, "polar_factors", polar_factors)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        lists = [[torch.ones(view.rows, view.columns) for view in views] for _ in range(3)]
        scores = [torch.full((1,), SCORE_START, device=torch.device("cpu")) for _ in views]
        step = FusedMuon(*lists[:2], scores, views, HybridMuonConfig().explicit())
        step._side_stream = Log(found)
        step.step(lists[2], 0.1, StepControl(), maximize=False)
    names = [note if isinstance(note, str) else note.kernel.__name__ for note in found]
    assert names == [
        *("write_addresses", "advance", "fork", "1x240x240"),
        *("beside:", "combine", "1x16x16, 1x8x24", "write_addresses", "join", "apply"),
    ]
