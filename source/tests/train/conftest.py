import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Run in an empty folder, on the CPU with one thread: sums then have one order, and equality can be exact."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logger = logging.getLogger("deepmd_muon")  # a run sets its level and handlers
    level, handlers = logger.level, list(logger.handlers)
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def small_input():
    """A function that gives a small copper input with some sections changed."""

    def make(**changes):
        content = {
            "model": {
                "type_map": ["Cu"],
                "data_stat_nbatch": 1,
                "descriptor": {
                    "type": "se_e2_a",
                    "sel": "auto",
                    "rcut": 4.5,
                    "rcut_smth": 2.0,
                    "neuron": [4, 8],
                    "axis_neuron": 3,
                    "seed": 1,
                },
                "fitting_net": {"neuron": [6, 6], "seed": 2},
            },
            "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
            "loss": {"type": "ener", "start_pref_v": 0.1, "limit_pref_v": 1.0},
            "optimizer": {"type": "HybridMuon"},
            "training": {
                "training_data": {"systems": [str(EXAMPLE / "train")], "batch_size": 2},
                "validation_data": {"systems": [str(EXAMPLE / "valid")], "batch_size": 2, "numb_btch": 1},
                "numb_steps": 10,
                "seed": 3,
                "disp_freq": 2,
                "save_freq": 5,
            },
        }
        for key, value in changes.items():
            content[key] = {**content[key], **value}
        return content

    return make


@pytest.fixture
def train():
    """A function that writes an input and trains; returns the exit status."""
    from deepmd_muon.train import run

    def start(content, **options):
        Path("input.json").write_text(json.dumps(content))
        return run("input.json", **{"log_level": "WARNING", **options})

    return start


@pytest.fixture(scope="session")
def _finished_run(tmp_path_factory):
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def finished(small_input, train, _finished_run):
    """Fill the folder with all files of a run of the unchanged small input, which is trained once."""
    if any(_finished_run.iterdir()):
        shutil.copytree(_finished_run, Path(), symlinks=True, dirs_exist_ok=True)
    else:
        assert train(small_input()) == 0
        shutil.copytree(Path(), _finished_run, symlinks=True, dirs_exist_ok=True)


@pytest.fixture
def load():
    """A function that reads a checkpoint."""

    def read(path="model.ckpt.pt"):
        return torch.load(path, weights_only=True)

    return read
