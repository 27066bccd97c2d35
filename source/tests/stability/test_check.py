"""`dp check` on pair potentials that are frozen by hand: one that holds, one with a hole, one that collapses."""

import json
import shutil

import numpy as np
import pytest
import torch
from write_systems import write_npy

from deepmd_muon.argcheck import normalize
from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import build_model
from deepmd_muon.stability.coverage import StabilityError, coverage_of
from deepmd_muon.stability.curves import Verdict, features_of
from deepmd_muon.stability.frame_parameters import at_frame_parameters


class Pairwise(torch.nn.Module):
    """Lennard-Jones argon with a Gaussian well at some distance, and a softer core if asked for."""

    def __init__(self, well: float, at: float, soft: float, scale: float):
        super().__init__()
        self.well, self.at, self.soft, self.scale = well, at, soft, scale

    @torch.jit.export
    def get_rcut(self) -> float:
        return 6.0

    @torch.jit.export
    def get_type_map(self) -> list[str]:
        return ["Ar"]

    @torch.jit.export
    def forward_lower(
        self, coord: torch.Tensor, atype: torch.Tensor, nlist: torch.Tensor, mapping: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        own = nlist.shape[1]
        x, table = coord[0], nlist[0]
        there = table >= 0
        vector = x[table.clamp(min=0)] - x[:own, None]
        r = torch.where(there, vector.square().sum(-1), torch.ones_like(vector[..., 0])).sqrt()
        inside = there & (r < 6.0)
        cut = (1.0 - (r / 6.0).square()).clamp(min=0.0)
        s = 3.4 / (r.pow(6) + self.soft).pow(1.0 / 6.0)
        base = 0.04 * (s.pow(12) - s.pow(6))
        d_base = 0.04 * (12.0 * s.pow(12) - 6.0 * s.pow(6)) * (-r.pow(5) / (r.pow(6) + self.soft))
        gauss = -self.well * torch.exp(-((r - self.at) / 0.2).square())
        d_gauss = gauss * (-2.0 * (r - self.at) / 0.04)
        u = (base + gauss) * cut.pow(2) * self.scale
        d = (
            (d_base + d_gauss) * cut.pow(2) - (base + gauss) * 2.0 * cut * 2.0 * r / 36.0
        ) * self.scale
        zero = torch.zeros_like(u)
        energy = 0.5 * torch.where(inside, u, zero)
        pull = 0.5 * torch.where(inside, d / r, zero)[..., None] * vector
        force = torch.zeros_like(x)
        force[:own] += pull.sum(1)
        force = force.index_add(0, table.clamp(min=0).reshape(-1), -pull.reshape(-1, 3))
        atom = energy.sum(1)
        return {
            "energy": atom.sum().reshape(1, 1),
            "atom_energy": atom[None, :, None],
            "extended_force": force[None],
            "virial": torch.zeros(1, 9, dtype=x.dtype),
        }


POTENTIALS = {
    "holds": (0.0, 2.0, 0.0, 1.0),
    "hole": (10.0, 1.9, 4000.0, 1.0),
    "collapses": (3.0, 3.2, 0.0, 1.0),
    "nan": (0.0, 2.0, 0.0, float("nan")),
}
FAST = [
    "--time",
    "0.2",
    "--time-step",
    "4",
    "--copies",
    "3",
    "--probes",
    "2",
    "--temperature",
    "80",
]


@pytest.fixture(scope="module")
def argon(tmp_path_factory):
    """Data: 27 atoms near the sites of a cubic lattice; and the potentials."""
    folder = tmp_path_factory.mktemp("argon")
    random = np.random.default_rng(5)
    sites = np.stack(np.meshgrid(*[np.arange(3) * 3.9] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    coord = sites + random.normal(scale=0.2, size=(12, 27, 3))
    arrays = {"coord": coord.reshape(12, -1), "box": np.tile(11.7 * np.eye(3).reshape(-1), (12, 1))}
    write_npy(folder / "data", [0] * 27, [arrays], ["Ar"])
    for name, values in POTENTIALS.items():
        torch.jit.script(Pairwise(*values)).save(str(folder / f"{name}.pth"))
    return folder


def check(argon, tmp_path, names, *words):
    models = [str(argon / f"{name}.pth") for name in names]
    file = tmp_path / "check.json"
    status = main(["check", *models, "-s", str(argon / "data"), *FAST, "--json", str(file), *words])
    return status, json.loads(file.read_text()) if file.exists() else {}


def verdicts(model):
    return {item["name"]: item["verdict"] for item in model["items"]}


def test_a_sound_potential_holds(argon, tmp_path, capsys):
    status, found = check(argon, tmp_path, ["holds"], "--strict", "-o", str(tmp_path / "check.png"))
    assert status == 0
    (model,) = found["models"]
    assert verdicts(model) == dict.fromkeys(
        ("coverage", "angles", "scans", "dimers", "dynamics"), "holds"
    )
    assert model["dynamics"]["followed"] == pytest.approx(0.6)
    assert abs(model["dynamics"]["drift"]) < 1e-3
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")
    assert "HOLDS" in capsys.readouterr().out


def test_a_hole_is_listed_with_place_and_depth(argon, tmp_path, capsys):
    status, found = check(argon, tmp_path, ["hole"])
    assert status == 1
    (model,) = found["models"]
    assert verdicts(model)["scans"] == "fails"
    # Alone, a dimer says less.
    assert verdicts(model)["dimers"] == "doubtful"
    holes = [f for scan in model["scans"] for f in scan["features"] if f["kind"] == "hole"]
    assert holes
    for hole in holes:
        assert hole["distance"] == pytest.approx(1.9, abs=0.3)
        assert hole["depth"] > 5.0
    assert "hole" in capsys.readouterr().out


def test_a_blow_up_has_time_and_atom(argon, tmp_path):
    status, found = check(argon, tmp_path, ["collapses"])
    assert status == 1
    (model,) = found["models"]
    assert verdicts(model)["dynamics"] == "fails"
    blow_ups = model["dynamics"]["blow_ups"]
    assert {event["copy"] for event in blow_ups} == {0, 1, 2}
    assert all(0.0 < event["time"] <= 0.2 and event["element"] == "Ar" for event in blow_ups)


def test_models_that_differ_off_the_data_do_not_agree(argon, tmp_path):
    status, found = check(argon, tmp_path, ["holds", "hole"])
    assert status == 1
    assert [model["verdict"] for model in found["models"]] == ["holds", "fails"]
    assert verdicts(found["models"][0])["agreement"] == "holds"


def test_molecules_move_as_a_whole_and_atoms_within_them_alone(tmp_path):
    from deepmd_muon.data import Frames
    from deepmd_muon.stability.scans import scan_in_place

    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = np.concatenate([molecule, molecule + np.array([0.0, 0.0, 2.9])])
    water = write_npy(
        tmp_path / "w", [0, 1, 1] * 2, [{"coord": coord.reshape(1, -1)}], "OH", nopbc=True
    )
    systems = open_systems(water, ["O", "H"])
    coverage = coverage_of(systems, ["O", "H"], 4.0)
    moved = []

    class Still:
        def evaluate(self, frames: Frames):
            moved.append((np.abs(frames.coord[-1] - frames.coord[0]).max(axis=1) > 0).sum())
            zero = np.zeros(frames.nframes)
            return type("Found", (), {"energy": zero, "force": np.zeros_like(frames.coord)})()

    curves = scan_in_place(Still(), coverage, systems, 0.03, probes=1, seed=0)
    kinds = {(coverage.name(curve.pair), curve.kind) for curve in curves}
    between, within = "between molecules", "within a molecule"
    assert kinds == {
        ("O-O", between),
        ("O-H", between),
        ("H-H", between),
        ("O-H", within),
        ("H-H", within),
    }
    assert {count for count, curve in zip(moved, curves, strict=True) if curve.kind == between} == {
        3
    }
    assert {count for count, curve in zip(moved, curves, strict=True) if curve.kind == within} == {
        1
    }
    inwards = [curve for curve in curves if curve.distance[-1] < curve.distance[0]]
    assert len(inwards) == 5
    assert all(0.5 <= curve.distance[-1] < 0.55 for curve in inwards)


def test_spoiled_weights_are_an_error(argon, tmp_path, capsys):
    assert check(argon, tmp_path, ["nan"]) == (2, {})
    assert "not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: (d / "type_map.raw").write_text("Xe\n"), "Xe"),
        (lambda d: np.save(d / "set.000" / "coord.npy", np.full((12, 81), np.nan)), "finite"),
        (lambda d: np.save(d / "set.000" / "coord.npy", np.zeros((12, 81))), "same place"),
        (
            lambda d: [
                np.save(d / "set.000" / f"{n}.npy", np.zeros((0, k)))
                for n, k in (("coord", 81), ("box", 9))
            ],
            "",
        ),
    ],
)
def test_data_that_cannot_be_checked_are_an_error(argon, tmp_path, capsys, change, word):
    shutil.copytree(argon / "data", tmp_path / "data")
    change(tmp_path / "data")
    assert main(["check", str(argon / "holds.pth"), "-s", str(tmp_path / "data"), *FAST]) == 2
    message = capsys.readouterr().err
    assert message.startswith("dp check: ")
    assert word in message


def test_numbers_that_make_no_sense_are_refused(argon, capsys):
    words = ["check", str(argon / "holds.pth"), "-s", str(argon / "data"), "--temperature", "-3"]
    assert main(words) == 2
    assert "--temperature" in capsys.readouterr().err


def test_coverage_knows_gaps(argon):
    coverage = coverage_of(open_systems(str(argon / "data"), ["Ar"]), ["Ar"], 6.0)
    assert coverage.pairs == [(0, 0)]
    assert 2.5 < coverage.shortest[0, 0] < 3.5
    types = np.zeros(3, dtype=int)
    distance = np.array([2.0, 3.9, 5.5])
    np.testing.assert_array_equal(coverage.outside(types, types, distance), [True, False, False])
    assert coverage.density[0] == pytest.approx(1.66054 * 27 * 39.948 / 11.7**3, rel=1e-3)


def test_forces_of_thermal_data_tell_their_temperature(argon):
    """kT is stiffness times mean square displacement in harmonic wells."""
    from deepmd_muon.dynamics.forces import Forces
    from deepmd_muon.dynamics.systems import BOLTZMANN
    from deepmd_muon.stability.trajectories import estimate_temperature

    systems = open_systems(str(argon / "data"), ["Ar"])
    coord = torch.tensor(systems[0].frames(range(12)).coord)
    sites = coord.mean(0)
    spread = float((coord - sites).square().mean())

    class Wells:
        predictor = type("Named", (), {"type_map": ("Ar",)})()
        device = torch.device("cpu")

        def reset(self):
            pass

        def __call__(self, coord, box, atype):
            return Forces(
                coord.new_zeros(len(coord)), -2.0 * (coord - sites), coord.new_zeros(len(coord), 9)
            )

    assert estimate_temperature(Wells(), systems) == pytest.approx(
        2.0 * spread / BOLTZMANN, rel=0.1
    )


def test_asks_for_a_temperature_where_the_data_look_very_hot(argon, tmp_path, capsys):
    """Forces of rattled frames look like thousands of kelvins; dynamics at 1.5 times that would prove nothing."""
    from deepmd_muon.dynamics.forces import ForceField
    from deepmd_muon.stability.trajectories import estimate_temperature

    predictor = Predictor(str(argon / "holds.pth"))
    shutil.copytree(argon / "data", tmp_path / "data")
    random = np.random.default_rng(1)
    force = random.normal(scale=0.02, size=(12, 27 * 3))
    for kelvin in (5000.0, 1000.0):
        np.save(tmp_path / "data" / "set.000" / "force.npy", force)
        systems = open_systems(str(tmp_path / "data"), ["Ar"])
        force *= np.sqrt(kelvin / estimate_temperature(ForceField(predictor), systems))
        np.save(tmp_path / "data" / "set.000" / "force.npy", force)
        words = [*FAST[: FAST.index("--temperature")], "--json", str(tmp_path / "check.json")]
        status = main(["check", str(argon / "holds.pth"), "-s", str(tmp_path / "data"), *words])
        said = capsys.readouterr().err
        assert (status == 2) == (kelvin > 2000), said
        assert ("--temperature" in said and "7500 K" in said) == (kelvin > 2000), said


def curve(energy, slope, outside_below, kt=0.03):
    distance = np.arange(3.0, 0.5, -0.02)
    return features_of(distance, energy(distance), slope(distance), distance < outside_below, kt)


def test_features_of_simple_curves():
    wall = (lambda d: 30.0 * np.exp(-3.0 * d), lambda d: -90.0 * np.exp(-3.0 * d))
    assert curve(*wall, 2.0) == []
    (flat,) = curve(lambda d: 0.0 * d, lambda d: 0.0 * d, 2.0)
    assert (flat.kind, flat.verdict) == ("no repulsion", Verdict.fails)
    step = (lambda d: wall[0](d) + 0.3 * (d < 2.5), wall[1])
    (kink,) = [f for f in curve(*step, 2.0) if f.kind == "kink"]
    assert kink.distance == pytest.approx(2.5, abs=0.03)
    assert kink.depth == pytest.approx(0.3, abs=0.02)
    (bad,) = curve(lambda d: np.where(d < 1.0, np.nan, 0.0), lambda d: 0.0 * d, 2.0)
    assert bad.kind == "not finite"


@pytest.mark.parametrize(
    ("height", "verdict"),
    [(0.2, Verdict.fails), (0.3, Verdict.doubtful), (0.7, Verdict.doubtful), (3.0, Verdict.holds)],
)
def test_a_hole_counts_by_the_barrier_before_it(height, verdict):
    def energy(d):
        return (
            height * np.exp(-(((d - 1.8) / 0.2) ** 2))
            - 6.0 * np.exp(-(((d - 1.0) / 0.2) ** 2))
            + 1e-3 * d**-10
        )

    def slope(d):
        return (energy(d + 1e-5) - energy(d - 1e-5)) / 2e-5

    (hole,) = curve(energy, slope, 2.0)
    assert (hole.kind, hole.verdict) == ("hole", verdict)
    assert hole.barrier == pytest.approx(height, abs=0.05)


def test_angles_of_water_and_how_far_others_lie_beyond(tmp_path):
    from deepmd_muon.data import Frames
    from deepmd_muon.stability.angles import angles_of
    from deepmd_muon.stability.coverage import pairs_of

    def bent(degrees):
        turn = np.radians(degrees)
        return np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [np.cos(turn), np.sin(turn), 0.0]])

    box = 5.0 * np.eye(3)
    coord = np.stack([bent(100.0), bent(110.0) + 4.5])  # across the border of the cell, too
    arrays = {"coord": coord.reshape(2, -1), "box": np.tile(box.reshape(-1), (2, 1))}
    systems = open_systems(write_npy(tmp_path / "w", [0, 1, 1], [arrays], "OH"), ["O", "H"])
    angles = angles_of(systems, coverage_of(systems, ["O", "H"], 3.0))
    assert {angles.name(triple) for triple in angles.triples} == {"H-O-H", "O-H-H"}
    assert angles.smallest[0, 1, 1] == pytest.approx(100.0)
    assert angles.largest[0, 1, 1] == pytest.approx(110.0)
    reached = angles.empty()
    assert angles.excess(reached) is None
    frame = Frames(atype=np.array([[0, 1, 1]]), coord=bent(85.0)[None], box=box[None])
    reached.add(frame, 0, pairs_of(frame, 0, 3.0))
    assert angles.excess(reached) == (pytest.approx(15.0), (0, 1, 1))


RUN = {
    "learning_rate": {"start_lr": 1e-3},
    "training": {"training_data": {"systems": ["data"]}, "numb_steps": 1},
}


@pytest.fixture
def charged(tmp_path):
    """Dimers with charges 0 (three frames) and 1 (two frames), and a model that reads them."""
    random = np.random.default_rng(8)
    coord = np.zeros((5, 2, 3))
    coord[:, 1, 0] = random.uniform(1.0, 1.3, 5)
    arrays = {"coord": coord.reshape(5, 6), "fparam": np.array([[0.0], [1], [0], [1], [0]])}
    write_npy(tmp_path / "data", [0, 1], [arrays], ["O", "H"], nopbc=True)
    content = {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [4, 4],
            "rcut": 4.0,
            "rcut_smth": 0.5,
            "neuron": [4, 8],
            "seed": 1,
        },
        "fitting_net": {"neuron": [8], "numb_fparam": 1, "seed": 1},
    }
    model = build_model(normalize({"model": content, **RUN}).settings.model)
    return Predictor(model, device="cpu"), open_systems(str(tmp_path / "data"))


@pytest.mark.parametrize(("values", "numbers"), [(None, [0, 2, 4]), ([1.0], [1, 3])])
def test_models_with_frame_parameters_are_checked_at_some(charged, values, numbers):
    predictor, (system,) = charged
    everything = system.frames(np.arange(5))
    types = everything.atype
    charge = 0.0 if values is None else values[0]
    expected = predictor.predict(everything.coord, None, types, np.full((5, 1), charge))
    (selected,) = at_frame_parameters(["model"], [predictor], [system], values)
    np.testing.assert_array_equal(
        selected.frames(np.arange(len(numbers))).coord, everything.coord[numbers]
    )
    found = predictor.predict(everything.coord, None, types)
    np.testing.assert_array_equal(found.energy, expected.energy)
    np.testing.assert_array_equal(found.force, expected.force)
    other = predictor.predict(everything.coord, None, types, np.full((5, 1), 1 - charge))
    assert abs(other.energy - found.energy).min() > 1e-6


def test_frame_parameters_that_no_frame_has_are_refused(charged):
    predictor, systems = charged
    with pytest.raises(StabilityError, match=r"2\.0.*no frame.*\(0\.0,\), \(1\.0,\)"):
        at_frame_parameters(["model"], [predictor], systems, [2.0])
