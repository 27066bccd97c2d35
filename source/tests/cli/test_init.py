"""`dp init`: an input and a split for data of any kind, which `dp --pt train` runs unchanged."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import run_dp

from deepmd_muon.argcheck import load
from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.data.checks.overlap import shared_frames
from deepmd_muon.data.isolated_atoms import isolated_energies
from deepmd_muon.data.sampling.splitting import split

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("DP_BACKEND", raising=False)
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)


def frame(random, elements, names=("energy", "forces"), cell=True):
    """Return a frame of extended XYZ: atoms on a line, random labels."""
    lattice = 'Lattice="9 0 0 0 9 0 0 0 9" ' if cell else ""
    vectors = random.normal(size=(len(elements), 6)) * 0.05
    rows = [
        f"{element} " + " ".join(f"{x:.8f}" for x in (row[0] + 1.4 * k, *row[1:]))
        for k, (element, row) in enumerate(zip(elements, vectors, strict=True))
    ]
    columns = f"species:S:1:pos:R:3:{names[1]}:R:3"
    head = f"{lattice}Properties={columns} {names[0]}={random.normal():.6f}"
    return "\n".join([str(len(elements)), head, *rows, ""])


def write_xyz(path, contents, names=("energy", "forces"), seed=0):
    """Write frames of several compositions: a dict of element lists and their numbers of frames."""
    random = np.random.default_rng(seed)
    frames = [
        frame(random, atoms.split(), names)
        for atoms, count in contents.items()
        for _ in range(count)
    ]
    Path(path).write_text("".join(frames))
    return path


def train_three_steps(capsys):
    assert main(["--pt", "train", "input.json"]) == 0
    log = capsys.readouterr().err
    assert "validation frames looked at" not in log
    assert Path("model.ckpt-3.pt").is_file()
    return log


def of_composition(systems):
    """Frames of each composition."""
    counts = {}
    for system in systems:
        types = system.types(np.array([0]))[0]
        name = "".join(sorted(system.type_map[t] for t in types))
        counts[name] = counts.get(name, 0) + system.nframes
    return counts


def test_extended_xyz_with_mixed_compositions(capsys):
    pytest.importorskip("ase")
    contents = {"H H O": 40, "C H H H": 12, "N N": 3, "O": 1}
    write_xyz("all.xyz", contents, ("REF_energy", "REF_forces"))
    assert main(["init", "all.xyz", "--steps", "3"]) == 0
    printed = capsys.readouterr().out
    given = load("input.json").settings
    assert given.model.type_map == ("H", "C", "N", "O")
    assert given.model.descriptor.needs_counts
    loss = given.loss
    assert (loss.start_pref_e, loss.start_pref_f, loss.start_pref_v) == (0.02, 1000, 0)
    content = json.loads(Path("input.json").read_text())
    assert content["optimizer"] == {"type": "HybridMuon"}
    assert "virial" in content["loss"]["_comment"]
    assert "nearly copies" in content["training"]["validation_data"]["_comment"]
    train = open_systems(given.training.training_data.systems)
    valid = open_systems(given.training.validation_data.systems)
    # The last tenth of what has ten frames or more; the rest and lone atoms stay whole.
    assert of_composition(train) == {"HHO": 36, "CHHH": 11, "NN": 3, "O": 1}
    assert of_composition(valid) == {"HHO": 4, "CHHH": 1}
    assert shared_frames(train, valid) == (0, 5)
    water, before, after = (
        next(system for system in part if system.nframes > 3 and system.natoms == 3)
        for part in (open_systems("all.xyz"), train, valid)
    )
    original = water.frames([35, 36])
    np.testing.assert_array_equal(before.frames([35]).coord[0], original.coord[0])
    np.testing.assert_array_equal(after.frames([0]).coord[0], original.coord[1])
    np.testing.assert_array_equal(after.frames([0]).force[0], original.force[1])
    for words in ("H C N O", "se_e2_a", "4 types", "written to split/valid", "C1H3"):
        assert words in printed.replace("H3C1", "C1H3")
    train_three_steps(capsys)


def test_npy_systems_are_named_not_copied(capsys):
    for number in range(6):
        shutil.copytree(EXAMPLE / "train" / "fcc32", f"runs/{number}")
        for file in Path(f"runs/{number}").glob("set.*/coord.npy"):
            coord = np.load(file)
            np.save(file, coord + np.random.default_rng(number).normal(scale=0.1, size=coord.shape))
    assert main(["init", "runs", "--steps", "3", "--rcut", "4"]) == 0
    content = json.loads(Path("input.json").read_text())["training"]
    assert content["validation_data"]["systems"] == ["runs/3"]
    assert content["training_data"]["systems"] == [f"runs/{k}" for k in (0, 1, 2, 4, 5)]
    assert not Path("split").exists()
    assert "1 whole system," in capsys.readouterr().out
    train_three_steps(capsys)


def test_models_of_an_ensemble_differ_in_their_seeds(capsys, monkeypatch):
    shutil.copytree(EXAMPLE / "train", "data")
    words = "init data/fcc32 data/cluster13 --steps 3 --rcut 4 -o runs/input.json"
    assert run_dp(f"{words} --models 3") == 0
    printed = capsys.readouterr().out
    first, *others = (
        json.loads(Path("runs", folder, "input.json").read_text())
        for folder in (".", "model-2", "model-3")
    )
    for seed, given in enumerate((first, *others), 1):
        model, training = given["model"], given["training"]
        parts = (model["descriptor"], model["fitting_net"], training)
        assert [part["seed"] for part in parts] == [seed] * 3
    for given, folder in zip(others, ("model-2", "model-3"), strict=True):
        assert f"(cd runs/{folder} && dp --pt train input.json)" in printed
        for kind in ("training_data", "validation_data"):
            own, of_first = given["training"][kind]["systems"], first["training"][kind]["systems"]
            there = [Path("runs", folder, system).resolve() for system in own]
            assert there == [Path(system).resolve() for system in of_first]
            given["training"][kind] = first["training"][kind]
        model, training = given["model"], given["training"]
        for section in (model["descriptor"], model["fitting_net"], training):
            section["seed"] = 1
        assert given == first
    with monkeypatch.context() as there:
        there.chdir("runs/model-3")
        train_three_steps(capsys)
    shutil.rmtree("runs/model-2")
    Path("runs/input.json").unlink()
    assert run_dp(f"{words} --models 3 --split-folder other") == 2
    assert "runs/model-3/input.json exists" in capsys.readouterr().err
    assert run_dp(f"{words} --models 0") == 2
    assert "--models" in capsys.readouterr().err


def test_absolute_paths_stay_in_inputs_of_other_models():
    assert run_dp(f"init {EXAMPLE}/train --valid-data {EXAMPLE}/valid --models 2") == 0
    training = json.loads(Path("model-2/input.json").read_text())["training"]
    assert training["training_data"]["systems"] == [str(EXAMPLE / "train")]
    assert training["validation_data"]["systems"] == [str(EXAMPLE / "valid")]
    assert training["validation_data"]["numb_btch"] == "sample"
    assert training["disp_freq"] == 100


def test_many_elements_take_dpa1(capsys):
    pytest.importorskip("ase")
    write_xyz("all.xyz", {"H C N O F": 20})
    assert main(["init", "all.xyz", "--steps", "3", "--rcut", "4"]) == 0
    content = json.loads(Path("input.json").read_text())
    assert content["model"]["descriptor"]["type"] == "dpa1"
    train_three_steps(capsys)


@pytest.mark.parametrize(
    ("elements", "kind", "sel"),
    [("H C N O F S Cl", "se_e2_a", "auto"), ("H C N O F S Cl P", "dpa1", 120)],
)
def test_molecules_take_se_e2_a_up_to_seven_elements(elements, kind, sel):
    pytest.importorskip("ase")
    random = np.random.default_rng(0)
    frames = [frame(random, elements.split(), cell=False) for _ in range(20)]
    Path("all.xyz").write_text("".join(frames))
    assert run_dp("init all.xyz --steps 3") == 0
    descriptor = json.loads(Path("input.json").read_text())["model"]["descriptor"]
    assert descriptor["type"] == kind
    assert descriptor["sel"] == sel


def test_given_validation_data_and_names_stay_as_they_are(capsys):
    pytest.importorskip("ase")
    write_xyz("train.xyz", {"H H O": 12}, ("pbe_energy", "pbe_forces"))
    write_xyz("valid.xyz", {"H H O": 3}, ("pbe_energy", "pbe_forces"), seed=1)
    keys = "--energy-key pbe_energy --force-key pbe_forces"
    words = f"init train.xyz --valid-data valid.xyz {keys} -t O H --steps 3 -o in/input.json"
    assert run_dp(words) == 0
    training = json.loads(Path("in/input.json").read_text())["training"]
    expected = {"energy": "pbe_energy", "force": "pbe_forces"}
    for kind in ("training_data", "validation_data"):
        assert training[kind]["label_keys"] == expected
    assert load("in/input.json").settings.model.type_map == ("O", "H")
    assert not Path("split").exists()
    shutil.copy("in/input.json", "input.json")
    train_three_steps(capsys)


def test_what_cannot_be_trained_on_is_said(capsys, caplog):
    pytest.importorskip("ase")
    write_xyz("few.xyz", {"H H": 2, "H H O": 2})
    bare = Path("bare/set.000")
    bare.mkdir(parents=True)
    np.save(bare / "coord.npy", np.zeros((1, 3)))
    for name, text in (("type.raw", "0"), ("type_map.raw", "He"), ("nopbc", "")):
        Path("bare", name).write_text(text)
    assert main(["init", "bare"]) == 2
    assert "energies" in capsys.readouterr().err
    assert main(["init", "few.xyz", "bare"]) == 0
    printed = capsys.readouterr().out
    assert "bare: no energies" in printed
    assert "--valid-data" in printed
    content = json.loads(Path("input.json").read_text())
    assert "validation_data" not in content["training"]
    assert content["model"]["type_map"] == ["H", "O"]
    before = Path("input.json").read_text()
    assert main(["init", "few.xyz"]) == 2
    assert "-o" in capsys.readouterr().err
    assert Path("input.json").read_text() == before
    assert main(["init", "few.xyz", "-o", "new.json", "--valid-share", "1.5"]) == 2
    assert main(["init", "few.xyz", "-o", "new.json", "--rcut", "0.3"]) == 2
    assert main(["init", "nothing.xyz", "-o", "new.json"]) == 2
    assert not Path("new.json").exists()


def test_wrong_units_are_named(capsys):
    pytest.importorskip("ase")
    write_xyz("all.xyz", {"H H O": 12})
    text = Path("all.xyz").read_text().replace("1.4", "0.1").replace("2.8", "0.2")
    Path("all.xyz").write_text(text)
    assert main(["init", "all.xyz"]) == 0
    assert "nm? multiply" in capsys.readouterr().out


def test_a_split_keeps_elements_and_lone_atoms_in_training():
    pytest.importorskip("ase")
    logging.getLogger("deepmd_muon").setLevel(logging.WARNING)
    contents = {"H H": 1, "H O": 1, "C O": 1, "C H": 1, "C H H": 1, "H": 1, "O": 1}
    write_xyz("one.xyz", contents)
    for _ in range(2):  # whatever their order
        shares = split(open_systems("one.xyz", ["H", "C", "O"]), 0.6)
        held_out = [share for share in shares if share.validation]
        assert held_out
        assert all(share.whole for share in shares)
        assert all(share.system.natoms > 1 for share in held_out)
        kept = [share.system.types(np.array([0]))[0] for share in shares if share.training]
        assert set(np.concatenate(kept).tolist()) == {0, 1, 2}
        contents = dict(reversed(contents.items()))
        write_xyz("one.xyz", contents)


@pytest.mark.parametrize("word", ["config_type", "charge"])
def test_the_last_frames_of_each_kind_are_held_out(word):
    """A file often holds one trajectory after another: of a molecule, then of its cation."""
    pytest.importorskip("ase")
    values = [0] * 30 + [1] * 20 + [2] * 3
    random = np.random.default_rng(0)
    frames = [
        frame(random, ["H", "O"], cell=False).replace("energy=", f"{word}={value} energy=")
        for value in values
    ]
    Path("all.xyz").write_text("".join(frames))
    options = "--frame-parameters charge" if word == "charge" else ""
    assert run_dp(f"init all.xyz --steps 3 {options}") == 0
    (whole,) = open_systems("all.xyz")
    expected = {"train": [*range(27), *range(30, 48), 50, 51, 52], "valid": [27, 28, 29, 48, 49]}
    for part, numbers in expected.items():
        systems = open_systems(f"split/{part}")
        energies = [system.frames(np.arange(system.nframes)).energy for system in systems]
        np.testing.assert_array_equal(np.concatenate(energies), whole.frames(numbers).energy)


def test_a_part_of_a_system_is_its_frames():
    (system,) = open_systems(str(EXAMPLE / "valid" / "fcc32"))
    part = system.part(3, 7).part(1, 3)
    whole = system.frames([4, 5])
    found = part.frames([0, 1])
    for name in ("coord", "box", "energy", "force", "virial"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
    np.testing.assert_array_equal(part.structures([1]).coord, system.structures([5]).coord)
    assert part.with_types(["H", "Cu"]).frames([0]).energy == system.frames([4]).energy
    for wrong in ((2, 2), (-1, 2), (0, system.nframes + 1)):
        with pytest.raises(IndexError):
            system.part(*wrong)


@pytest.mark.parametrize("split_off", [True, False])
def test_of_two_commands_at_once_one_writes_and_the_other_leaves_nothing(
    capsys, monkeypatch, split_off
):
    from deepmd_muon.cli import proposal

    shutil.copytree(EXAMPLE, "data")
    words = "init data/train" if split_off else "init data/train --valid-data data/valid"
    propose = proposal.propose

    def propose_late(*arguments):
        made = propose(*arguments)
        Path("input.json").write_text("theirs")
        return made

    monkeypatch.setattr(proposal, "propose", propose_late)
    assert run_dp(words) == 1
    assert "input.json: File exists" in capsys.readouterr().err
    assert Path("input.json").read_text() == "theirs"
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["data", "input.json"]


@pytest.mark.parametrize(
    ("words", "cell", "steps", "on_adamw"),
    [
        ("", True, 15000, True),
        ("", False, 10000, False),
        ("--steps 15000", False, 15000, False),
        ("--steps 14999", True, 14999, False),
        ("--descriptor dpa1", True, 10000, False),
        ("--steps 15000 --descriptor dpa1", True, 15000, False),
    ],
)
def test_long_runs_of_structures_with_cells_have_the_first_layer_on_adamw(
    words, cell, steps, on_adamw
):
    pytest.importorskip("ase")
    random = np.random.default_rng(0)
    Path("all.xyz").write_text("".join(frame(random, ["H", "O"], cell=cell) for _ in range(12)))
    assert run_dp(f"init all.xyz {words}") == 0
    content = json.loads(Path("input.json").read_text())
    assert content["training"]["numb_steps"] == steps
    section = content["optimizer"]
    assert section.pop("_comment", "").endswith("(doc/stability.md)") == on_adamw
    assert section.pop("adamw_patterns", []) == ["*fitting_net*layers.0.matrix"] * on_adamw
    assert section == {"type": "HybridMuon"} | ({"adam_lr_ratio": 1.0} if on_adamw else {})
    ratio = 1.0 if on_adamw else float(f"{30000 / steps:.3g}")
    assert load("input.json").settings.optimizer.adam_lr_ratio == ratio


def test_isolated_atoms_are_told_and_small_systems_share_batches(capsys):
    """MACE's sets hold each element's free atom, in a large cell or in none."""
    from ase import Atoms
    from ase.build import molecule
    from ase.io import write

    frames = []
    for atoms in [molecule(name) for name in ("H2O", "CH4") for _ in range(3)]:
        atoms.info["REF_energy"] = -1.0
        atoms.arrays["REF_forces"] = np.zeros((len(atoms), 3))
        frames.append(atoms)
    for element, energy in {"H": -13.6, "C": -1029.4, "O": -2041.8}.items():
        cell = {"cell": [30, 30, 30], "pbc": True} if element == "C" else {}
        atoms = Atoms(element, info={"REF_energy": energy, "config_type": "IsolatedAtom"}, **cell)
        atoms.arrays["REF_forces"] = np.zeros((1, 3))
        frames.append(atoms)
    write("all.xyz", frames, format="extxyz")
    assert main(["init", "all.xyz", "--steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert "H -13.6 eV, C -1029.4 eV, O -2041.8 eV" in printed
    training = json.loads(Path("input.json").read_text())["training"]
    assert training["training_data"]["batch_size"] == "mix:32"
    assert run_dp("init all.xyz --descriptor dpa1 -o dpa1.json --split-folder other") == 0
    assert json.loads(Path("dpa1.json").read_text())["model"]["descriptor"]["sel"] == 120
    assert isolated_energies(open_systems("all.xyz"), rcut=31.0) == {"H": [-13.6], "O": [-2041.8]}
    train_three_steps(capsys)


def test_auto_says_that_unfilled_batches_take_a_share(capsys):
    contents = {"H H O": 20, "C": 1, "O": 1, "H": 1}
    write_xyz("all.xyz", contents)
    assert main(["init", "all.xyz", "--steps", "3", "--valid-data", "all.xyz"]) == 0
    capsys.readouterr()
    training = json.loads(Path("input.json").read_text())["training"]
    assert training["training_data"]["batch_size"] == "auto"
    assert main(["--pt", "train", "input.json"]) == 0
    log = capsys.readouterr().err
    # 20 frames of water are 2 batches of 11 or fewer; each atom is one.
    assert "60 % of the batches are theirs, with 4.8 % of the atoms" in log


def test_charges_in_headers_that_nothing_reads_are_named(capsys):
    pytest.importorskip("ase")
    random = np.random.default_rng(3)
    frames = [
        frame(random, ["H", "H", "O"]).replace("energy=", f"{words} time={number} energy=")
        for number, words in enumerate(["charge=0 spin=1", "charge=-1 spin=2", "spin=1"] * 4)
    ]
    Path("all.xyz").write_text("".join(frames))
    assert main(["init", "all.xyz", "--steps", "3"]) == 0
    charge, spin = (
        line for line in capsys.readouterr().out.splitlines() if "headers of frames" in line
    )
    assert "charge (" in charge
    counts = charge.split("(")[1].split(")")[0].split(", ")
    assert {"0 in 4 frames", "-1 in 4 frames", "none in 4 frames"} <= set(counts)
    assert "--frame-parameters charge" in charge
    assert "spin (1 in 8 frames, 2 in 4 frames)" in spin
