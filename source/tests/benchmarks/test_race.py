"""The race of optimizers: runs that share a process, pieces that resume and merge, and a potential behind its data."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import contest
import numpy as np
import optimizers
import pytest
import race
import torch
from contestants import ADAM_RATE, CONTESTANTS, untouched
from results import Key, pool, read
from sets import FIXED, MODELS, SETS, input_of

from deepmd_muon.argcheck import normalize

CPU = torch.device("cpu")
WATER = Path(__file__).resolve().parents[3] / "examples" / "water_xtb" / "data"


@pytest.fixture
def sets(tmp_path):
    """A folder with a small set `water`: three training frames, two of test, one out of distribution."""
    for part, source, frames in (
        ("train", "train/300K", 3),
        ("test", "valid/300K", 2),
        ("out", "valid/420K", 1),
    ):
        numbers = tmp_path / "sets" / "water" / part / Path(source).name / "set.000"
        numbers.mkdir(parents=True)
        for name in ("type.raw", "type_map.raw"):
            (numbers.parent / name).write_bytes((WATER / source / name).read_bytes())
        for path in (WATER / source / "set.000").glob("*.npy"):
            np.save(numbers / path.name, np.load(path)[:frames])
    return tmp_path / "sets"


def run_race(sets, results, *more, contestants=("adam", "hybrid_muon"), steps=3):
    given = [
        "--data",
        sets,
        "--sets",
        "water",
        "--models",
        "tiny",
        "--results",
        results,
        "--steps",
        steps,
    ]
    race.race(race.arguments([*map(str, given), "--contestants", *contestants, *map(str, more)]))
    return read(results.parent.glob("*.jsonl"))


def arena_of(sets, steps=8, model="tiny", device=CPU):
    return contest.Arena("water", model, 1, steps, sets / "water", device)


def train(keys, arena, until=float("inf"), keep=None):
    return race.train(keys, lambda key: arena, until, keep)


def test_a_race_gives_every_run_once_and_resumes(sets, tmp_path, monkeypatch):
    monkeypatch.setitem(
        CONTESTANTS, "adam", contest.dataclasses.replace(CONTESTANTS["adam"], grid=(1e-3, 1e-2))
    )
    monkeypatch.setitem(
        CONTESTANTS,
        "hybrid_muon",
        contest.dataclasses.replace(CONTESTANTS["hybrid_muon"], grid=(8.64e-3,)),
    )
    first, second = tmp_path / "results" / "first.jsonl", tmp_path / "results" / "second.jsonl"
    results, _ = run_race(sets, first, contestants=["adam"])
    assert {key.rate for key in results} == {1e-3, 1e-2}
    whole = first.read_text()
    first.write_text(whole + whole[:50])  # a kill cut a line short
    results, _ = run_race(sets, second)
    assert len(second.read_text().splitlines()) == 1
    assert {(key.contestant, key.rate) for key in results} == {
        ("adam", 1e-3),
        ("adam", 1e-2),
        ("hybrid_muon", 8.64e-3),
    }
    for result in results.values():
        assert not result.failed
        assert [step for step, _, _ in result.curve] == [1, 2, 3]
        assert result.curve[-1][1] == pytest.approx(result.test["300K"]["force"])
        assert (set(result.out), set(result.train)) == ({"420K"}, {"300K"})
        assert result.out["420K"]["energy"] > 0
        assert result.train["300K"]["force"] not in (0, result.test["300K"]["force"])


@pytest.mark.slow
def test_runs_of_a_wave_are_those_of_runs_alone(sets):
    arena = arena_of(sets)
    keys = [Key("water", "tiny", "adam", rate, 1, 4) for rate in (1e-3, 1e-2)]
    together = {result.key: result for result in train(keys, arena)}
    for key in keys:
        (alone,) = train([key], arena)
        assert together[key].curve == alone.curve


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_trains(sets, name):
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    if name == "schedule_free":
        pytest.importorskip("schedulefree")
    contestant = CONTESTANTS[name]
    assert len(contestant.grid) == 5
    key, arena = Key("water", "tiny", name, contestant.grid[2], 1, 6), arena_of(sets)
    first = pool(contest.Run(key, arena).errors("test"))
    (result,) = train([key], arena)
    assert not result.failed
    assert result.curve[-1][1] < first["force"]


@pytest.mark.parametrize("steps", [3000, 30000])
def test_untouched_is_what_an_input_without_settings_gets(steps):
    content = input_of("water", "tiny", [Path("system")], seed=3, steps=steps)
    given = normalize(
        {**content, "optimizer": {"type": "HybridMuon"}, "learning_rate": {"start_lr": ADAM_RATE}}
    )
    optimizer, (name, rate) = given.settings.optimizer, untouched(steps)
    contestant = CONTESTANTS[name]
    assert optimizer.lr_adjust_coeff * ADAM_RATE == pytest.approx(rate)
    assert optimizer.adam_lr_ratio * ADAM_RATE == pytest.approx(contestant.start_lr(rate))
    assert contestant.section(rate)["lr_adjust_coeff"] * contestant.start_lr(rate) == pytest.approx(
        rate
    )


@pytest.mark.parametrize("model", [name for name in MODELS if name != "tiny"])
@pytest.mark.parametrize("name", SETS)
def test_every_input_is_accepted(name, model):
    given = normalize(
        {
            **input_of(name, model, [Path("system")], seed=3, steps=10),
            "learning_rate": {**contest.DECAY, "start_lr": 1e-3},
        }
    ).settings
    assert given.model.type_map == SETS[name].type_map
    assert given.model.descriptor.needs_counts == (model not in FIXED)
    assert (given.loss.start_pref_v > 0) == SETS[name].cell


@pytest.mark.slow
def test_parameters_without_gradient_stay():
    """Muon moves a matrix without a gradient as far as one that has a gradient."""
    random = torch.Generator().manual_seed(0)
    moved = {}
    for kept in (False, True):
        present, absent = (
            torch.nn.Parameter(torch.randn(4, 4, generator=random)) for _ in range(2)
        )
        optimizer = torch.optim.Muon([present, absent], lr=1e-2)
        if kept:
            optimizers.keep_absent(optimizer)
        for step in range(2):
            before = [p.detach().clone() for p in (present, absent)]
            present.grad, absent.grad = torch.ones(4, 4), torch.ones(4, 4) * (step == 0)
            optimizer.step()
        moved[kept] = [
            float((p - old).norm()) for p, old in zip((present, absent), before, strict=True)
        ]
    assert moved[False][1] > 0.5 * moved[False][0]
    assert moved[True][1] == 0
    assert moved[True][0] > 0


@pytest.mark.parametrize("name", ["torch_muon", "soap"])
def test_replayed_steps_are_the_steps_of_the_optimizer(name):
    """The graph holds a step at one rate; here it is called instead of replayed, at rates that decay."""
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    make = {"torch_muon": lambda model: optimizers.torch_muon(model, 3.0), "soap": optimizers.soap}[
        name
    ]
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    models = [
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = ([part for part, _ in make(model)] for model in models)
    for part in (*ours, *theirs):
        for group in part.param_groups:
            group["correct_bias"] = False  # it has not settled after four steps
    for part in ours:
        part._settled, part._wanted = 4, True
        part._record = lambda part=part: record_by_hand(part)
    for step in range(30):
        x = torch.randn(16, 6, generator=random)
        for model, parts in zip(models, (ours, theirs), strict=True):
            model.zero_grad()
            model(x).square().mean().backward()
            for part in parts:
                for group in part.param_groups:
                    group["lr"] = 1e-2 * 0.9**step
                part.step()
    assert all(part._graph is not None for part in ours)
    # SOAP multiplies decay and update; torch's Muon iterates in bfloat16, which turns last bits into 2⁻⁸ of an update.
    bound = 1e-3 if name == "soap" else 1e-4
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=0, atol=bound * float(expected.detach().abs().max())
        )


def record_by_hand(part):
    """Give a `Replayed` what calls its step as a graph would replay it: at the recorded rate, counting nothing."""
    recorded = [dict(group) for group in part.param_groups]
    part._recorded_lr = [group["lr"] for group in recorded]

    def replay():
        present = [dict(group) for group in part.param_groups]
        for group, then in zip(part.param_groups, recorded, strict=True):
            group.update({name: then[name] for name in ("lr", "step") if name in then})
        part.scaled_step()
        for group, now in zip(part.param_groups, present, strict=True):
            group.update({name: now[name] for name in ("lr", "step") if name in now})

    part._graph = SimpleNamespace(replay=replay)


@pytest.mark.gpu
def test_overlapping_runs_have_the_gradients_of_a_run_alone(sets):
    """Graphs that replay at the same time must share no memory; Adam's moments at a tiny rate are sums of gradients."""
    arena = arena_of(sets, 64, "se_e2_a", torch.device("cuda"))
    key = Key("water", "se_e2_a", "adam", 1e-9, 1, 64)

    def moments(count):
        runs = [contest.Run(key, arena) for _ in range(count)]
        optimizers = [run._stepper._captured._step.optimizer for run in runs]
        for _ in range(64):
            for run in runs:
                run.advance()
        torch.cuda.synchronize()
        assert all(run._stepper._captured._graphs for run in runs)
        return [
            [state["exp_avg"] for state in optimizer.state.values()] for optimizer in optimizers
        ]

    (expected,) = moments(1)
    for found in moments(8):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch_muon", "soap"])
def test_replayed_steps_on_a_gpu(sets, name):
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    key = Key("water", "se_e2_a", name, CONTESTANTS[name].grid[1], 1, 240)
    arena = arena_of(sets, 240, "se_e2_a", torch.device("cuda"))
    errors = []
    for replayed in (True, False):
        run = contest.Run(key, arena)
        for part, _ in run._foreign._parts:
            part._wanted = replayed
        for _ in range(240):
            run.advance()
        run.measure()
        assert all((part._graph is not None) == replayed for part, _ in run._foreign._parts)
        errors.append(run.curve[-1][1])
    assert errors[0] == pytest.approx(errors[1], rel=0.2)


def test_stillinger_weber_is_that_of_silicon():
    pytest.importorskip("ase")
    from make_silicon import crystal
    from stillinger_weber import EPSILON, StillingerWeber

    ideal = crystal()
    ideal.calc = StillingerWeber()
    assert ideal.get_potential_energy() / len(ideal) == pytest.approx(
        -2 * EPSILON, rel=1e-6
    )  # published: −4.3366 eV


@pytest.mark.parametrize(
    ("cation", "constant", "energy"), [("Na", 5.64, -8.15), ("K", 6.29, -7.41)]
)
def test_the_potential_of_salts_is_that_of_the_chlorides(cation, constant, energy, monkeypatch):
    pytest.importorskip("ase")
    import tosi_fumi
    from make_salt import salt

    monkeypatch.setattr(tosi_fumi, "CUT", 11.0)

    def of_pair(length):  # energy of two ions [eV], of 512
        atoms = salt({cation: 32}, np.random.default_rng(1), length).repeat(2)
        atoms.calc = tosi_fumi.TosiFumi()
        return atoms.get_potential_energy() / 256

    # Measured: lattice constants [Å], and lattice energies of 786 and 715 kJ/mol.
    lengths = np.linspace(0.98, 1.02, 9)
    energies = [of_pair(length) for length in lengths]
    assert lengths[np.argmin(energies)] == pytest.approx(1.0, abs=0.011)
    assert min(energies) == pytest.approx(energy, rel=0.015)
    charges = tosi_fumi.TABLES * torch.tensor([1.0, 0, 1, 0, 0], dtype=torch.float64)[:, None, None]
    monkeypatch.setattr(tosi_fumi, "TABLES", charges)
    assert of_pair(1.0) == pytest.approx(
        -1.747565 * 14.39964 / (constant / 2), rel=1e-3
    )  # Madelung


def silicon():
    from make_silicon import crystal
    from stillinger_weber import StillingerWeber

    return crystal(vacancy=True), StillingerWeber


def salt():
    from make_salt import salt
    from tosi_fumi import TosiFumi

    return salt({"Na": 16, "K": 16}, np.random.default_rng(1), 1.1), TosiFumi


def alloy():
    from make_alloys import LennardJones, alloy

    return alloy({"Cu": 11, "Ag": 11, "Au": 10}, np.random.default_rng(1)), LennardJones


@pytest.mark.parametrize("structure", [silicon, salt, alloy])
def test_forces_and_stress_are_slopes_of_the_energy(structure):
    pytest.importorskip("ase")
    atoms, potential = structure()
    atoms.rattle(0.1, seed=1)
    atoms.calc = potential()
    forces = atoms.get_forces()
    np.testing.assert_allclose(forces.sum(0), 0, atol=1e-10)

    def energy(shift=0.0, strain=0.0):
        changed = atoms.copy()
        changed.positions[5, 1] += shift
        changed.set_cell(atoms.cell * (1 + strain), scale_atoms=True)
        changed.calc = potential()
        return changed.get_potential_energy()

    slope = (energy(shift=1e-4) - energy(shift=-1e-4)) / 2e-4
    assert forces[5, 1] == pytest.approx(-slope, abs=1e-5)
    if "stress" in potential.implemented_properties:
        slope = (energy(strain=1e-5) - energy(strain=-1e-5)) / 2e-5
        assert atoms.get_stress()[:3].sum() * atoms.get_volume() == pytest.approx(slope, abs=1e-4)


def test_the_salts_have_all_parts_and_cells_beyond_the_cut_off():
    pytest.importorskip("ase")
    import make_salt
    from tosi_fumi import CUT

    plans = make_salt.plans()
    frames = {
        part: sum(plan.frames for plan in plans if plan.part == part)
        for part in ("train", "test", "out")
    }
    assert frames == {"train": 288, "test": 72, "out": 156}
    assert len({(plan.part, plan.name) for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.atoms.cell.lengths().min() > 2 * CUT
        assert (plan.atoms.symbols == "Cl").sum() == 32
        # Rock salt: the six nearest of every ion are of the other sign.
        distances = plan.atoms.get_all_distances(mic=True)
        nearest = np.argsort(distances, axis=1)[:, 1:7]
        chloride = plan.atoms.symbols == "Cl"
        assert (chloride[nearest] != chloride[:, None]).all()


@pytest.mark.slow
def test_kept_weights_are_read_by_the_calculator(sets, tmp_path):
    ase_calculator = pytest.importorskip("deepmd_muon.infer.ase_calculator")
    from sampling import read_system

    key = Key("water", "tiny", "adam", 1e-3, 1, 2)
    (result,) = train([key], arena_of(sets, steps=2), keep=tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    calculator = ase_calculator.DeepPotCalculator(path)
    errors = []
    for number, frame in enumerate(read_system(sets / "water" / "test" / "300K")):
        frame.calc = calculator
        labels = np.load(sets / "water" / "test" / "300K" / "set.000" / "force.npy")[
            number
        ].reshape(-1, 3)
        errors.append(((frame.get_forces() - labels) ** 2).mean())
    assert np.sqrt(np.mean(errors)) == pytest.approx(result.test["300K"]["force"], rel=1e-5)


@pytest.mark.slow
def test_the_water_set_is_that_of_its_checksums(tmp_path):
    pytest.importorskip("ase")
    script = Path(race.__file__).with_name("make_water.py")
    command = [sys.executable, str(script), "--example-only", "--out", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "water: 35 files as published, 0 differ, 14 missing, 0 others" in done.stdout
    import sampling

    (tmp_path / "water" / "train" / "300K" / "set.000" / "energy.npy").write_bytes(b"")
    (tmp_path / "water" / "more").touch()
    found = sampling.write_checksums(tmp_path / "water")
    assert found == "water: 34 files as published, 1 differ, 14 missing, 1 others"
