"""Pauses of the garbage collector."""

import gc
import sys

import pytest

from deepmd_muon.collector import importing_torch


def test_nothing_is_collected_while_torch_is_imported(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with importing_torch():
        assert not gc.isenabled()
    assert frozen == [False]
    assert gc.isenabled()


def test_a_failed_import_leaves_the_collector_on(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ImportError), importing_torch():
        raise ImportError("no torch")
    assert gc.isenabled()


def test_a_process_that_has_torch_keeps_its_collector(monkeypatch):
    monkeypatch.setattr(gc, "freeze", pytest.fail)
    monkeypatch.setitem(sys.modules, "torch", sys)
    with importing_torch():
        assert gc.isenabled()
