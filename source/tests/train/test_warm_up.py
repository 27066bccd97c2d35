"""Early start of a run."""

import gc
import subprocess
import sys
import threading

import pytest

from deepmd_muon.train.process import warm_up

LOAD = """
import sys, threading
from deepmd_muon.train.process.warm_up import load_libraries

def loaded():
    return "libtorch_cpu" in open("/proc/self/maps").read()

assert not loaded()
load_libraries()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
assert loaded() and "torch" not in sys.modules
import torch
assert torch.ones(3).sum() == 3 and torch.equal(torch.eye(2) @ torch.eye(2), torch.eye(2))
"""


def test_the_library_is_loaded_before_torch_is_imported():
    subprocess.run([sys.executable, "-c", LOAD], check=True, timeout=300)


def test_a_process_that_has_torch_loads_nothing(monkeypatch):
    monkeypatch.setattr(threading, "Thread", pytest.fail)
    assert "torch" in sys.modules or pytest.importorskip("torch")
    warm_up.load_libraries()


@pytest.mark.parametrize("origin", [None, "/nowhere/torch/__init__.py"])
def test_a_library_that_is_not_found_is_no_error(monkeypatch, origin):
    found = (
        None if origin is None else warm_up.importlib.util.spec_from_file_location("torch", origin)
    )
    monkeypatch.setattr(warm_up.importlib.util, "find_spec", lambda name: found)
    warm_up._load_libraries()


@pytest.mark.parametrize(
    ("name", "value"), [("DEVICE", "cpu"), ("WORLD_SIZE", "2"), ("SLURM_PROCID", "0")]
)
def test_no_device_is_opened_that_the_run_may_not_use(monkeypatch, name, value):
    monkeypatch.setattr(threading, "Thread", pytest.fail)
    monkeypatch.setenv(name, value)
    warm_up.open_device()


def test_the_device_is_opened_meanwhile(monkeypatch):
    begun = threading.Event()
    monkeypatch.setattr(warm_up, "_retain_context", begun.set)
    for name in ("DEVICE", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    warm_up.open_device()
    assert begun.wait(60)


def test_a_missing_driver_is_no_error(monkeypatch):
    def missing(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(warm_up.ctypes, "CDLL", missing)
    warm_up._retain_context()


def test_nothing_is_searched_while_torch_is_imported(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.delitem(sys.modules, "torch")
    with warm_up.garbage_collection_paused():
        assert not gc.isenabled()
    assert frozen == [False]
    assert gc.isenabled()


def test_a_failed_import_leaves_the_collector_on(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError), warm_up.garbage_collection_paused():
        raise ImportError("no torch")
    assert gc.isenabled()


def test_a_process_that_has_torch_keeps_its_collector(monkeypatch):
    monkeypatch.setattr(gc, "freeze", pytest.fail)
    assert "torch" in sys.modules or pytest.importorskip("torch")
    with warm_up.garbage_collection_paused():
        assert gc.isenabled()


def test_triton_names_its_cache_once():
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    warm_up._name_cache()
    assert cache.triton_key.cache_info().currsize == 1
