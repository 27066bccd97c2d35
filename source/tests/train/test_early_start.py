"""Early start of a run on a GPU."""

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
