"""Hundreds of systems: within the limit on open files, and without a log of as many lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from forked import run_script
from write_systems import make_arrays, write_hdf5, write_npy

from deepmd_muon.data import open_systems
from deepmd_muon.data.writing import write_lmdb

TYPES = [0, 1, 0, 1]
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from deepmd_muon.cli.main import main
sys.exit(main(["train", "input.json"]))
"""


def systems(kind, count):
    """Write systems of two frames of four atoms, each in files of its own."""
    for number in range(count):
        arrays = [make_arrays(2, 4, seed=number)]
        if kind == "npy":
            write_npy(Path(f"data/{number}"), TYPES, arrays)
        elif kind == "hdf5":
            Path("data").mkdir(exist_ok=True)
            write_hdf5(Path(f"data/{number}.hdf5"), "", TYPES, arrays)
        else:
            write_lmdb(
                open_systems(write_npy(Path(f"folders/{number}"), TYPES, arrays)),
                Path(f"data/{number}.lmdb"),
            )
    return ["data"] if kind == "npy" else ["data/*"]


def input_of(small_input, places, **training):
    data = {"systems": places, "batch_size": 1}
    content = small_input(model={"type_map": ["A", "B"]})
    content["model"]["descriptor"]["sel"] = [40, 40]
    content["training"] = {
        **content["training"],
        "training_data": data,
        "validation_data": data,
        **training,
    }
    Path("input.json").write_text(json.dumps(content))
    return content


@pytest.mark.parametrize(
    ("kind", "count", "limit"),
    [
        pytest.param("npy", 400, 1024, marks=pytest.mark.slow),
        ("npy", 70, 64),
        ("hdf5", 70, 64),
        ("lmdb", 70, 64),
    ],
)
def test_training_stays_within_the_limit_on_open_files(tmp_path, small_input, kind, count, limit):
    if kind == "lmdb":
        pytest.importorskip("lmdb")
        pytest.importorskip("msgpack")
    input_of(small_input, systems(kind, count), numb_steps=2, disp_freq=1)
    Path("limited.py").write_text(LIMITED)
    done = run_script("limited.py", limit, folder=tmp_path, DEVICE="cpu", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(np.loadtxt("lcurve.out")) == 2


def test_the_log_names_few_of_many_systems(small_input, train, caplog):
    content = input_of(small_input, systems("npy", 30), numb_steps=1)
    with caplog.at_level(logging.DEBUG, "deepmd_muon"):
        assert train(content, log_level="DEBUG") == 0
    lines = [record for record in caplog.records if "training data: " in record.getMessage()]
    debug = [record.getMessage() for record in lines if record.levelno == logging.DEBUG]
    assert [sum(f"data/{number}'" in line for line in debug) for number in range(30)] == [1] * 30
    (summary,) = [record.getMessage() for record in lines if record.levelno == logging.INFO]
    for fact in ("30 systems", "60 frames of 4 atoms", "30 periodic", "energy, force"):
        assert fact in summary


def test_the_log_names_few_of_many_doubtful_systems(small_input, train, caplog):
    places = systems("npy", 30)
    for path in Path("data").glob("*/set.000/force.npy"):
        np.save(path, 1e5 * np.load(path))
    with caplog.at_level(logging.DEBUG, "deepmd_muon"):
        assert train(input_of(small_input, places, numb_steps=1), log_level="DEBUG") == 0
    doubts = [record for record in caplog.records if record.getMessage().startswith("data: ")]
    named = [record.levelno for record in doubts if "more suspicions" not in record.getMessage()]
    assert named.count(logging.WARNING) == 20
    (rest,) = [record.getMessage() for record in doubts if "more suspicions" in record.getMessage()]
    assert f"data: {named.count(logging.DEBUG)} more suspicions" in rest
