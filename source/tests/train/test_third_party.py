"""A descriptor of another package: settings, training, checkpoint, prediction, through the public extension points."""

import dataclasses
from importlib.metadata import EntryPoint
from typing import ClassVar

import numpy as np
import pytest
import torch

from deepmd_muon import plugins
from deepmd_muon.argcheck import InputError, Section, normalize, register_model_settings
from deepmd_muon.argcheck.document import reference
from deepmd_muon.infer import Predictor
from deepmd_muon.model import Described, register_descriptor
from deepmd_muon.setting import setting


@dataclasses.dataclass(frozen=True)
class CoordinationSettings(Section):
    """Smooth number of neighbours within several radii."""

    type: ClassVar[str] = "coordination"

    rcut: float = setting(5.0, above=0.0, doc="Cut-off radius [Å].")
    powers: tuple[int, ...] = setting((2, 3, 4), minimum=2, doc="Exponents of 1 − r/rcut.")


class Coordination(torch.nn.Module):
    by_type = False

    def __init__(self, section, type_map, seed=None):
        super().__init__()
        self.rcut, self.sel = section["rcut"], (80,)
        self.register_buffer("powers", torch.tensor(section["powers"], dtype=torch.float64))
        self.mix = torch.nn.Parameter(torch.eye(len(section["powers"]), dtype=torch.float64))
        self.dim_out = len(section["powers"])

    def forward(self, structures, edges, *, force=True):
        r = torch.where(structures.neighbor >= 0, edges.norm(dim=-1), self.rcut)
        x = (1.0 - r / self.rcut).clamp(min=0.0)
        described = (x.unsqueeze(-1) ** self.powers).sum(1) @ self.mix

        def pullback(adjoint):
            slope = (adjoint @ self.mix.T).unsqueeze(1) * self.powers * x.unsqueeze(-1) ** (self.powers - 1)
            return (-slope.sum(-1) / (self.rcut * r)).unsqueeze(-1) * edges

        return Described(described, pullback if force else None)


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_descriptor("coordination")(Coordination)
    register_model_settings("descriptor", "coordination", CoordinationSettings)
    yield
    # Other tests of this process look at the package as it comes.
    from deepmd_muon.argcheck.model import DESCRIPTORS
    from deepmd_muon.argcheck.schema import keys_of

    del DESCRIPTORS["coordination"]
    keys_of.cache_clear()


def test_its_settings_are_checked_and_documented(small_input):
    content = small_input()
    content["model"]["descriptor"] = {"type": "coordination", "powers": [1, 2], "rcutt": 3}
    with pytest.raises(InputError) as caught:
        normalize(content)
    assert {problem.path for problem in caught.value.problems} == {
        "model/descriptor/powers/0",
        "model/descriptor/rcutt",
    }
    assert "Exponents of 1 − r/rcut." in reference("text")
    with pytest.raises(ValueError, match="'se_e2_a' is taken by SeE2ASettings"):
        register_model_settings("descriptor", "se_e2_a", CoordinationSettings)


def test_it_trains_restarts_and_predicts(small_input, train, load):
    content = small_input()
    content["model"]["descriptor"] = {"type": "coordination"}
    assert train(content, skip_neighbor_stat=True) == 0
    whole = load("model.ckpt-10.pt")
    assert train(content, skip_neighbor_stat=True, restart="model.ckpt-5.pt") == 0
    again = load("model.ckpt-10.pt")
    name = "model.Default.atomic_model.descriptor.mix"
    assert torch.equal(whole["model"][name], again["model"][name])
    assert not torch.equal(whole["model"][name], torch.eye(3, dtype=torch.float64))
    predictor = Predictor("model.ckpt.pt")
    coord = np.array([[0.0, 0, 0], [2.5, 0, 0], [0, 2.5, 0]])
    moved = coord.copy()
    moved[1, 0] += 1e-5
    found = [predictor.predict(c, None, np.zeros(3, dtype=int)) for c in (coord, moved)]
    slope = (found[1].energy - found[0].energy).item() / 1e-5
    assert found[0].force[0, 1, 0] == pytest.approx(-slope, rel=1e-3)


def test_installed_extensions_are_imported(monkeypatch):
    loaded = []
    monkeypatch.setattr(
        plugins,
        "entry_points",
        lambda group: [EntryPoint("mine", "json:loads", group), EntryPoint("x", "nowhere", group)],
    )
    monkeypatch.setattr(EntryPoint, "load", lambda self: loaded.append(self.name) or __import__(self.module))
    with pytest.raises(plugins.PluginError, match=r"extension 'x' \(nowhere\) cannot be loaded"):
        plugins.load_plugins()
    assert loaded == ["mine", "x"]
