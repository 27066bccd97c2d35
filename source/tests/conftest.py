"""Tiers of the tests and the order of their files; property tests draw the same 40 examples in every run.

With HYPOTHESIS_PROFILE=default property tests draw others each time, and more.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

# Before torch is imported: tests run beside each other, and sums have one order. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # No deadline and no check of the time examples take: a slow machine must only make tests slow.
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile(
        "repeatable", max_examples=40, derandomize=True, database=None, **patient
    )
    settings.register_profile("default", max_examples=200, **patient)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

TESTS = Path(__file__).parent
# Files of `pytest -m quick`: less than a minute together, on one core. A test says that each pattern finds files.
QUICK = (
    *("argcheck/*.py", "loss/*.py", "style/*.py"),
    *("data/test_data_sampling.py", "data/test_data_systems.py", "data/test_data_statistics.py"),
    *("model/test_model_build.py", "checkpoint_file/test_checkpoint_file.py"),
    *("optim/test_*routing*.py", "optim/test_*build*.py"),
    *("train/test_learning_rate.py", "train/test_ema.py", "train/test_report.py"),
)
# Tests in these files that take long: they start processes that import torch.
NOT_QUICK = (
    "test_code_of_the_extension_page_runs",
    "test_importing_",
)
# Marks of tests that run only where they are asked for.
APART = ("slow", "hours", "gpu", "deepmd_kit", "lammps", "torch_sim", "metatomic", "frameworks")
# The longest files come first, in this order, so that parallel workers end together.
LONGEST = (
    "train_parallel/*.py",
    "optim_sharded/test_sharded_step.py",
    "model/test_model_kernels.py",
    "train/test_replay.py",
    "train/test_commands_on_files.py",
    "optim/test_kernels.py",
    "deploy/test_compress.py",
    "doc/*.py",
    "explore/test_explore.py",
    "fuzz/*.py",
    "train/*.py",
    "model/*.py",
    "examples/*.py",
    "deploy/*.py",
    "benchmarks/*.py",
    "optim/*.py",
)


@pytest.fixture(autouse=True)
def package_log() -> Iterator[None]:
    """Give the package's log its level and its handlers back, which a run sets."""
    logger = logging.getLogger("deepmd_muon")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:] = handlers


@pytest.fixture
def as_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let runs take the CPU and one thread: sums then have one order, and equality can be exact."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("DEVICE", "cpu")
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_search_for_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs not search their data for faults: it takes a fifth of a short run, and has tests of its own."""
    monkeypatch.setattr("deepmd_muon.train.systems.suspicions", lambda systems: [])


@pytest.fixture(params=["torch", pytest.param("kernels", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return where neighbours are searched: by torch on the CPU, or by kernels on a GPU or in the interpreter."""
    import torch

    from deepmd_muon.model.nn import triton_support

    if request.param == "kernels":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("there is no GPU; in the interpreter, test_model_kernels runs the kernels")
        monkeypatch.setattr("deepmd_muon.model.neighbors.kernels.BLOCK", 128)
    monkeypatch.setattr(triton_support, "usable", lambda _: request.param == "kernels")
    return torch.device("cpu")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, and bring the longest files to the front."""
    for item in items:
        apart = any(item.get_closest_marker(name) for name in APART)
        if not apart and not item.name.startswith(NOT_QUICK) and _is_quick(item.path):
            item.add_marker(pytest.mark.quick)
    items.sort(key=lambda item: _place(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import without garbage collection, which took a sixth of that time, and exclude what is imported from it.

    Afterwards it starts a tenth as often as by default, which took a thirtieth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(7000, 10, 10)


@functools.cache
def _is_quick(path: Path) -> bool:
    return any(path.relative_to(TESTS).match(pattern) for pattern in QUICK)


@functools.cache
def _place(path: Path) -> int:
    """Return the first pattern of the longest files that a file matches, or a place behind them all."""
    return next(
        (i for i, pattern in enumerate(LONGEST) if path.relative_to(TESTS).match(pattern)),
        len(LONGEST),
    )
