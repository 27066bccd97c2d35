"""Early start of a run on a GPU."""

import gc
import sys
import threading

import pytest

from deepmd_muon.train.process import warm_up


@pytest.mark.parametrize(("name", "value"), [("DEVICE", "cpu"), ("WORLD_SIZE", "2"), ("SLURM_PROCID", "0")])
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
