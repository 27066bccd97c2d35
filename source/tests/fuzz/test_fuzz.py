"""Every mutant of an input, a system or a checkpoint is read right or refused in words: no traceback, no long work.

`pytest -m slow source/tests/fuzz` tries thousands; the seeds are fixed, so that a find can be repeated.
"""

from __future__ import annotations

import json
import random
import resource
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from mutants import array_mutant, bytes_mutant, tree_mutant
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from deepmd_muon.argcheck import InputError, load, normalize
from deepmd_muon.data import DataError, build_neighbors, open_systems
from deepmd_muon.infer import Predictor
from deepmd_muon.model import build_model
from deepmd_muon.model.checkpoint_directory import take_apart
from deepmd_muon.model.checkpoint_file import read_checkpoint
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.model.errors import CheckpointFileError

INPUT = {
    "model": {
        "type_map": ["A", "B"],
        "descriptor": {"type": "se_e2_a", "sel": [6, 6], "rcut": 3.0, "rcut_smth": 1.0, "neuron": [4, 8], "seed": 1},
        "fitting_net": {"neuron": [6, 6], "seed": 1},
    },
    "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
    "loss": {"type": "ener", "start_pref_e": 0.1},
    "optimizer": {"type": "HybridMuon", "lr_adjust": 0.0},
    "training": {
        "training_data": {"systems": ["a"], "batch_size": "auto:32"},
        "validation_data": {"systems": ["b"], "numb_btch": 3},
        "numb_steps": 10,
    },
}
# A mutant may take this long [s of CPU time] and this much memory above the start [KiB].
MOST_TIME, MOST_MEMORY = 5.0, 1 << 20
AMOUNTS = [pytest.param(60, id="60"), pytest.param(2000, id="2000", marks=pytest.mark.slow)]


def survive(attempt, refusals):
    """Call `attempt`; return its result, or None when it refused in one of the ways that have words."""
    begin, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        return attempt()
    except refusals:
        return None
    finally:
        assert time.process_time() - begin < MOST_TIME
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MOST_MEMORY


@pytest.mark.parametrize("amount", AMOUNTS)
def test_inputs(tmp_path, amount):
    draw = random.Random(1)
    text = json.dumps(INPUT).encode()
    path = tmp_path / "input.json"
    for number in range(amount):
        if number % 2:
            path.write_bytes(bytes_mutant(text, draw))
        else:
            path.write_text(json.dumps(tree_mutant(INPUT, draw)))
        found = survive(lambda: load(path), InputError)
        assert found is None or normalize(found.normalized).settings == found.settings


@pytest.mark.parametrize("amount", AMOUNTS)
def test_systems(tmp_path, amount):
    draw, random_numbers = random.Random(2), np.random.default_rng(2)
    part = tmp_path / "sys/set.000"
    part.mkdir(parents=True)
    (tmp_path / "sys/type.raw").write_text("0 1 0 1")
    (tmp_path / "sys/type_map.raw").write_text("A B")
    for name, width in (("coord", 12), ("box", 9), ("energy", 1), ("force", 12)):
        values = (
            random_numbers.uniform(0.5, 5.0, (3, width)) if name != "box" else np.tile(np.eye(3).ravel() * 6, (3, 1))
        )
        np.save(part / f"{name}.npy", values)
    files = [path for path in sorted((tmp_path / "sys").rglob("*")) if path.is_file()]

    def read():
        (system,) = open_systems(str(tmp_path / "sys"), ["A", "B"])
        frames = system.frames(range(system.nframes))
        for k in range(frames.nframes):
            build_neighbors(frames.coord[k], frames.box[k], frames.atype[k], 3.0, (8, 8), True)
        return frames

    for number in range(amount):
        file = draw.choice(files)
        original = file.read_bytes()
        if number % 2 and file.suffix == ".npy":
            np.save(file, array_mutant(np.load(file), draw))
        else:
            file.write_bytes(bytes_mutant(original, draw))
        found = survive(read, (DataError, OSError))
        if found is not None:
            assert all(np.isfinite(x).all() for x in (found.coord, found.box))
        file.write_bytes(original)


@pytest.fixture(scope="module")
def checkpoint():
    section = normalize(INPUT).normalized["model"]
    model = build_model(section)
    return {"model": to_deepmd_kit(model, section, {"lr": 1e-3, "step": 4}), "deepmd_muon": {"version": 1, "step": 5}}


def evaluate(path):
    """Return an energy and forces that the model of a checkpoint predicts."""
    coord = np.arange(12.0).reshape(1, 4, 3) % 5.0
    prediction = Predictor(str(path), device="cpu").predict(coord, np.eye(3)[None] * 6.0, [0, 1, 0, 1])
    return np.append(prediction.force, prediction.energy)


def same_bytes(path, files, expected, amount, draw):
    """A changed checkpoint is refused, or holds what it held."""
    survived = 0
    for _ in range(amount):
        file = draw.choice(files)
        original = file.read_bytes()
        file.write_bytes(bytes_mutant(original, draw))
        found = survive(lambda: read_checkpoint(path), CheckpointFileError)
        if found is not None:
            survived += 1
            assert all(torch.equal(found["model"][k], v) for k, v in expected.items() if isinstance(v, torch.Tensor))
        file.write_bytes(original)
    assert survived < amount


@pytest.mark.parametrize("amount", AMOUNTS)
def test_bytes_of_checkpoints(tmp_path, checkpoint, amount):
    torch.save(checkpoint, tmp_path / "a.pt")
    same_bytes(tmp_path / "a.pt", [tmp_path / "a.pt"], checkpoint["model"], amount, random.Random(3))


@pytest.mark.parametrize("amount", AMOUNTS)
def test_bytes_of_directories(tmp_path, checkpoint, amount):
    path = tmp_path / "a.dcp"
    path.mkdir()
    parts, tensors = take_apart(checkpoint)
    torch.save(parts, path / "content.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(tensors, storage_writer=FileSystemWriter(path), no_dist=True)
    same_bytes(path, sorted(path.iterdir()), checkpoint["model"], amount, random.Random(4))


@pytest.fixture
def _little_memory():
    """A mutant that asks for too much gets an error, not the memory of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (MOST_MEMORY << 10), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("amount", AMOUNTS)
def test_structure_of_checkpoints(tmp_path, checkpoint, amount):
    draw, path = random.Random(5), tmp_path / "a.pt"
    for _ in range(amount):
        torch.save(tree_mutant(checkpoint, draw), path)
        survive(lambda: evaluate(path), refusals())


def refusals():
    """Return the classes of this package's errors for checkpoints."""
    from deepmd_muon.infer.errors import CheckpointError, PredictionInputError
    from deepmd_muon.model.errors import ModelError

    return (CheckpointError, PredictionInputError, ModelError, OSError)


def test_the_generators_repeat_themselves(checkpoint):
    for mutant, value in ((bytes_mutant, b"abc" * 100), (tree_mutant, INPUT)):
        assert mutant(value, random.Random(7)) == mutant(value, random.Random(7)) != value
