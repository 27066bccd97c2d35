"""Early start of a run on a GPU."""

import subprocess
import sys
import threading

import pytest

from deepmd_muon.train import early_start


@pytest.mark.parametrize(("name", "value"), [("DEVICE", "cpu"), ("WORLD_SIZE", "2"), ("SLURM_PROCID", "0")])
def test_no_device_is_opened_that_the_run_may_not_use(monkeypatch, name, value):
    monkeypatch.setattr(threading, "Thread", pytest.fail)
    monkeypatch.setenv(name, value)
    early_start.open_device()


def test_the_device_is_opened_meanwhile(monkeypatch):
    begun = threading.Event()
    monkeypatch.setattr(early_start, "_retain_context", begun.set)
    for name in ("DEVICE", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    early_start.open_device()
    assert begun.wait(60)


def test_a_missing_driver_is_no_error(monkeypatch):
    def missing(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(early_start.ctypes, "CDLL", missing)
    early_start._retain_context()


def test_libraries_are_loaded_only_for_a_torch_that_is_still_to_come(monkeypatch):
    monkeypatch.setattr(early_start, "_begin", pytest.fail)
    early_start.load_libraries()  # this process has imported torch
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("DEVICE", "cpu")
    early_start.load_libraries()
    monkeypatch.delenv("DEVICE")
    begun = []
    monkeypatch.setattr(early_start, "_begin", begun.append)
    early_start.load_libraries()
    assert begun == [early_start._load_libraries]


def test_torch_is_imported_after_its_libraries_and_triton():
    """Where Triton is missing, or names its cache in another way, it is left to its first use."""
    program = """
import sys
from pathlib import Path
from deepmd_muon.train import early_start
early_start._load_torch()
early_start._load_triton()
assert "torch" not in sys.modules
assert "libtorch_cpu" in Path("/proc/self/maps").read_text()
import torch
assert torch.ones(2).sum() == 2.0
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_a_driver_nothing_is_loaded(monkeypatch):
    def missing(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(early_start.ctypes, "CDLL", missing)
    monkeypatch.setattr(early_start, "_load_torch", pytest.fail)
    monkeypatch.setattr(early_start, "_begin", pytest.fail)
    early_start._load_libraries()
