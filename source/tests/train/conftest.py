import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from compared import assert_same
from small_models import section_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch, as_alone):
    """Run in an empty folder, on the CPU with one thread."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _search_for_faults_where_it_is_tested(request):
    if request.path.name not in ("test_systems.py", "test_many_systems.py"):
        request.getfixturevalue("no_search_for_faults")


NETS = {"neuron": [4, 8], "axis_neuron": 3, "seed": 1}
DESCRIPTOR = {"type": "se_e2_a", "rcut": 4.5, "rcut_smth": 2.0, **NETS}
VALIDATION_DATA = {"systems": [str(EXAMPLE / "valid")]}


@pytest.fixture
def small_input():
    """A function that gives a small copper input with some sections changed."""

    def make(**changes):
        content = {
            "model": {
                "type_map": ["Cu"],
                "data_stat_nbatch": 1,
                "descriptor": {**DESCRIPTOR, "sel": "auto"},
                "fitting_net": {"neuron": [6, 6], "seed": 2},
            },
            "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
            "loss": {"type": "ener", "start_pref_v": 0.1, "limit_pref_v": 1.0},
            "optimizer": {"type": "HybridMuon"},
            "training": {
                "training_data": {"systems": [str(EXAMPLE / "train")], "batch_size": 2},
                "validation_data": {**VALIDATION_DATA, "batch_size": 2, "numb_btch": 1},
                "numb_steps": 10,
                "seed": 3,
                "disp_freq": 2,
                "save_freq": 5,
            },
        }
        for key, value in changes.items():
            content[key] = {**content.get(key, {}), **value}
        return content

    return make


@pytest.fixture
def train():
    """A function that writes an input and trains; returns the exit status."""
    from deepmd_muon.argcheck import load
    from deepmd_muon.train import run

    def start(content, log_level="WARNING", **options):
        Path("input.json").write_text(json.dumps(content))
        return run(load("input.json"), log_level=log_level, **options)

    return start


@pytest.fixture
def model():
    """A small model of copper."""
    from deepmd_muon.model import build_model

    descriptor = {
        "type": "se_e2_a",
        "sel": [20],
        "rcut": 3.5,
        "neuron": [4, 8],
        "axis_neuron": 2,
        "seed": 1,
    }
    return build_model(section_of(descriptor, {"neuron": [6, 6], "seed": 1}, ["Cu"]))


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


@pytest.fixture
def check_restart(train, load):
    """A function that trains, goes on from the checkpoint of a step, and compares both ends and curves to the bit."""

    def check(content, step, **options):
        assert train(content, **options) == 0
        whole, curve = load(), Path("lcurve.out").read_text()
        again = {**content, "training": {**content["training"], "save_ckpt": "again"}}
        assert train(again, restart=f"model.ckpt-{step}.pt", **options) == 0
        parted = load("again.pt")
        assert_same(whole, parted)
        assert whole["deepmd_muon"]["training_data"] == parted["deepmd_muon"]["training_data"]
        assert Path("lcurve.out").read_text() == curve
        return whole, parted

    return check


@pytest.fixture
def spoil_batches(monkeypatch):
    """A function that makes energies infinite from the loader's batch `first` on; returns the batches."""
    from deepmd_muon.data import DataLoader

    def start(first):
        batches, original = [], DataLoader.next

        def next_batch(self):
            batches.append(original(self))
            if len(batches) >= first:
                batches[-1].frames.energy[:] = np.inf  # NaN would be a missing label
            return batches[-1]

        monkeypatch.setattr(DataLoader, "next", next_batch)
        return batches

    return start


@pytest.fixture
def on_device(monkeypatch):
    """A function after which runs take their steps as on a GPU, from resident or streamed data."""
    from deepmd_muon.train import trainer
    from deepmd_muon.train.step.guard import DeviceGuard, on_nonfinite
    from deepmd_muon.train.step.step import TrainingStep
    from deepmd_muon.train.step.stepper import DeviceStepper, compiles_steps

    cpu = torch.device("cpu")

    def switch(*, streamed=False):
        def build(strategy, loss, optimizer, ema, training, scalars, model=None, device_parts=None):
            guard = device_parts.guard = device_parts.guard or DeviceGuard(
                on_nonfinite(optimizer), optimizer, cpu
            )
            options = {
                "max_norm": training.gradient_max_norm,
                "adam_max_norm": training.adam_gradient_max_norm,
                "compiles": compiles_steps(model or strategy.model, training, None),
            }
            step = TrainingStep(strategy, loss, optimizer, guard, ema=ema, model=model, **options)
            return DeviceStepper(
                step,
                scalars,
                cpu,
                capture=False,
                keep_metrics=training.disp_avg,
                device_parts=device_parts,
            )

        monkeypatch.setattr(trainer, "build_stepper", build)
        if streamed:
            monkeypatch.setattr(
                "deepmd_muon.train.step.stepper.why_not_on_device", lambda *args: "a test wants it"
            )

    return switch


@pytest.fixture
def two_branches(small_input):
    """A function that gives an input with branches on one descriptor, some keys of training changed."""

    def make(descriptor=None, *, level="", net=None, **training):
        content = small_input()
        loss, model = content.pop("loss"), content["model"]
        shared = {"types": ["Cu"], "all": dict(descriptor or {**model["descriptor"], "sel": [44]})}
        nets = [{**model["fitting_net"], "seed": seed} for seed in (2, 3)]
        if net is not None:
            shared["net"], nets = {**nets[0], **net}, ["net", "net"]
        content["model"] = {
            "data_stat_nbatch": 2,
            "shared_dict": shared,
            "model_dict": {
                "hot": {"type_map": "types", "descriptor": "all", "fitting_net": nets[0]},
                "cold": {"type_map": "types", "descriptor": f"all{level}", "fitting_net": nets[1]},
            },
        }
        content["loss_dict"] = {
            "hot": loss,
            "cold": {**loss, "start_pref_e": 1.0, "limit_pref_e": 1.0},
        }
        kept = {key: x for key, x in content["training"].items() if not key.endswith("_data")}
        hot, cold = (str(EXAMPLE / "train" / name) for name in ("fcc32", "triclinic8"))
        valid = {"systems": [str(EXAMPLE / "valid" / "fcc32")], "batch_size": 2}
        data = {
            "hot": {"training_data": {"systems": hot, "batch_size": 2}, "validation_data": valid},
            "cold": {"training_data": {"systems": cold, "batch_size": 1}},
        }
        content["training"] = {
            **kept,
            "data_dict": data,
            "model_prob": {"hot": 2, "cold": 1},
            **training,
        }
        return content

    return make
