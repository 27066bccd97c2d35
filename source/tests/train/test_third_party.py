"""A descriptor and a loss of another package: settings, training, checkpoint, prediction, by public ways in."""

import dataclasses
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from deepmd_muon import plugins
from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.argcheck.document import reference
from deepmd_muon.argcheck.json_schema import json_schema
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.infer import Predictor
from deepmd_muon.loss import LossSettings, Term, register_loss
from deepmd_muon.loss.registry import LOSSES
from deepmd_muon.model import Described, DescriptorSettings, NeighborRequest, register_descriptor
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.optim import Buildable, InvalidSettingError, register_optimizer
from deepmd_muon.optim.other_configs import OPTIMIZERS
from deepmd_muon.setting import setting


@dataclasses.dataclass(frozen=True)
class CoordinationSettings(DescriptorSettings):
    """Smooth number of neighbours within several radii."""

    type: ClassVar[str] = "coordination"

    rcut: float = setting(5.0, above=0.0, doc="Cut-off radius [Å].")
    powers: tuple[int, ...] = setting((2, 3, 4), minimum=2, doc="Exponents of 1 − r/rcut.")

    def neighbors(self):
        return NeighborRequest(self.rcut, (80,), by_type=False)


class Coordination(torch.nn.Module):
    def __init__(self, settings, type_map, seed=None):
        super().__init__()
        self.rcut, self.dim_out = settings.rcut, len(settings.powers)
        self.register_buffer("powers", torch.tensor(settings.powers, dtype=torch.float64))
        self.mix = torch.nn.Parameter(torch.eye(self.dim_out, dtype=torch.float64))

    def forward(self, structures, edges, *, force=True):
        r = torch.where(structures.neighbor >= 0, edges.norm(dim=-1), self.rcut)
        x = (1.0 - r / self.rcut).clamp(min=0.0)
        described = (x.unsqueeze(-1) ** self.powers).sum(1) @ self.mix

        def pullback(adjoint):
            powers = self.powers * x.unsqueeze(-1) ** (self.powers - 1)
            slope = (adjoint @ self.mix.T).unsqueeze(1) * powers
            return (-slope.sum(-1) / (self.rcut * r)).unsqueeze(-1) * edges

        return Described(described, pullback if force else None)


@dataclasses.dataclass(frozen=True)
class LogCoshSettings(LossSettings):
    """Forces alone, by the logarithm of the hyperbolic cosine."""

    type: ClassVar[str] = "log_cosh"

    scale: float = setting(0.1, above=0.0, doc="Error at which the loss turns linear [eV/Å].")

    def obstacle_to(self, quantity):
        return None if quantity == "force" else f"the loss log_cosh does not compare {quantity}"


class LogCosh:
    terms = (Term("mae_f", frozenset({"force"}), "loss/type"),)
    needs_force, needs_virial = True, False

    def __init__(self, settings, type_map):
        self.scale = settings.scale
        self.types = range(len(type_map))

    def __call__(self, prediction, label, lr_fraction, atoms):
        error = prediction["force"] - label["force"]
        assert atoms.atype.shape == error.shape[:2]
        assert set(atoms.atype.unique().tolist()) <= set(self.types)
        loss = torch.log(torch.cosh(error / self.scale)).mean()
        return loss, {"mae_f": error.abs().mean().detach(), "rmse": loss.detach().sqrt()}


@dataclasses.dataclass(frozen=True)
class SignSettings(Buildable):
    """Steps by the sign of the momentum."""

    decay: float = setting(
        0.9, minimum=0.0, below=1.0, doc="Decay of the momentum, β of the average."
    )

    def build(self, model, lr=None, replicas=None):
        return SignedMomentum(model.named_parameters(), {"lr": lr or 1e-3, "decay": self.decay})


class SignedMomentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["decay"])
                    p.sub_(momentum.sign(), alpha=group["lr"])


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_descriptor("coordination", settings=CoordinationSettings, module=Coordination)
    register_loss("log_cosh", settings=LogCoshSettings, module=LogCosh)
    register_optimizer("SignedMomentum", SignSettings)
    yield
    # Other tests of this process look at the package as it comes.
    del OPTIMIZERS["SignedMomentum"]
    del DESCRIPTORS._parts["coordination"]
    del LOSSES._parts["log_cosh"]


# Of each part: a section with two mistakes, their paths, and a sentence of the reference.
MISTAKES = {
    "descriptor": (
        {"type": "coordination", "powers": [1, 2], "rcutt": 3},
        {"model/descriptor/powers/0", "model/descriptor/rcutt"},
        "Exponents of 1 − r/rcut.",
    ),
    "optimizer": (
        {"type": "SignedMomentum", "decay": 1.0, "dekay": 1},
        {"optimizer/decay", "optimizer/dekay"},
        "Decay of the momentum, β of the average.",
    ),
    "loss": (
        {"type": "log_cosh", "scale": 0, "scael": 1},
        {"loss/scale", "loss/scael"},
        "Error at which the loss turns linear [eV/Å].",
    ),
}


@pytest.mark.parametrize("part", MISTAKES)
def test_settings_are_checked_and_documented_like_the_others(small_input, part):
    section, paths, sentence = MISTAKES[part]
    content = small_input()
    place = content["model"] if part == "descriptor" else content
    place[part] = section
    with pytest.raises(InputError) as caught:
        normalize(content)
    assert {problem.path for problem in caught.value.problems} == paths
    assert sentence in reference()
    assert section["type"] in json.dumps(json_schema())


def test_it_trains_restarts_and_predicts(small_input, check_restart):
    content = small_input()
    content["model"]["descriptor"] = {"type": "coordination"}
    whole, _ = check_restart(content, 5, skip_neighbor_stat=True)
    moved = whole["model"]["model.Default.atomic_model.descriptor.mix"] - torch.eye(
        3, dtype=torch.float64
    )
    assert moved.abs().max() > 1e-3
    predictor = Predictor("model.ckpt.pt")
    coord = np.array([[0.0, 0, 0], [2.5, 0, 0], [0, 2.5, 0]])
    moved = coord.copy()
    moved[1, 0] += 1e-5
    found = [predictor.predict(c, None, np.zeros(3, dtype=int)) for c in (coord, moved)]
    slope = (found[1].energy - found[0].energy).item() / 1e-5
    assert found[0].force[0, 1, 0] == pytest.approx(-slope, rel=1e-3)


def test_a_loss_trains_validates_and_restarts(small_input, check_restart):
    content = small_input(
        validating={"full_validation": True, "validation_freq": 5, "validation_metric": "F:MAE"}
    )
    content["loss"] = {"type": "log_cosh", "scale": 0.2}
    check_restart(content, 5)
    header = Path("lcurve.out").read_text().splitlines()[0].split()
    assert header[2:] == ["mae_f_val", "mae_f_trn", "rmse_val", "rmse_trn", "lr"]
    assert np.isfinite(np.loadtxt("lcurve.out")).all()
    assert json.loads(Path("out.json").read_text())["loss"] == {"type": "log_cosh", "scale": 0.2}


def test_an_optimizer_trains_and_restarts(small_input, train, check_restart):
    content = small_input()
    content["optimizer"] = {"type": "SignedMomentum", "decay": 0.8}
    whole, _ = check_restart(content, 5)
    written = json.loads(Path("out.json").read_text())
    assert written["optimizer"] == {"type": "SignedMomentum", "decay": 0.8}
    assert {key for state in whole["optimizer"]["state"].values() for key in state} == {"momentum"}
    content["optimizer"] = {"type": "Adam"}
    assert train(content) == 0
    content["optimizer"] = {"type": "SignedMomentum"}
    with pytest.raises(
        CheckpointError, match="is not that of SignedMomentum: its groups lack decay"
    ):
        train(content, restart="model.ckpt-5.pt")


@pytest.mark.parametrize(("name", "settings"), [("Adam", SignSettings), ("mine", SignedMomentum)])
def test_a_name_that_is_taken_and_no_settings_are_refused(name, settings):
    with pytest.raises(InvalidSettingError, match="register_optimizer"):
        register_optimizer(name, settings)


def test_a_metric_that_the_loss_does_not_compare_is_named(small_input):
    content = small_input(validating={"full_validation": True, "validation_metric": "E:MAE"})
    content["loss"] = {"type": "log_cosh"}
    with pytest.raises(InputError, match="does not compare energy"):
        normalize(content)


def test_installed_extensions_are_imported(monkeypatch):
    loaded = []
    monkeypatch.setattr(
        plugins,
        "entry_points",
        lambda group: [EntryPoint("mine", "json:loads", group), EntryPoint("x", "nowhere", group)],
    )
    monkeypatch.setattr(
        EntryPoint, "load", lambda self: loaded.append(self.name) or __import__(self.module)
    )
    with pytest.raises(plugins.PluginError, match=r"extension 'x' \(nowhere\) cannot be loaded"):
        plugins.load_plugins()
    assert loaded == ["mine", "x"]
