"""`dp explore` on copper with EMT: whole rounds, interruptions, failures of those who label."""

import json
import shutil

import numpy as np
import pytest
import torch
from ase.calculators.emt import EMT
from ase.io import read, write

from deepmd_muon.explore.candidates import Candidate, choose
from deepmd_muon.explore.settings import ExploreSettings, SelectionSettings


def rounds(folder, number):
    return json.loads((folder / "explore" / f"round_{number}" / "round.json").read_text())


def test_two_rounds_train_on_labelled_structures_of_their_own_dynamics(copper, explore, capsys):
    assert explore(training={"start": "restart", "steps": 30}, labels={"largest_force": 1e3}) == 0
    table = (copper / "explore" / "rounds.txt").read_text().splitlines()
    assert [line.split()[0] for line in table] == ["round", "0", "1", "2"]
    shown = capsys.readouterr()
    assert table[-1] in shown.out
    assert "Batch" not in shown.err  # the logs of trainings are in their folders
    log = (copper / "explore" / "round_2" / "model_0" / "train.log").read_text()
    assert "Batch     100: trn" in log
    known = min(
        atoms.get_all_distances(mic=True)[np.triu_indices(len(atoms), 1)].min()
        for atoms in _data(copper)
    )
    for number in (1, 2):
        done = rounds(copper, number)
        assert done["labels"] == {"labelled": done["draw"]["chosen"], "failed": 0}
        chosen = read(copper / "explore" / f"round_{number}" / "candidates.xyz", ":")
        labelled = read(copper / "explore" / f"round_{number}" / "labelled.xyz", ":")
        assert len(chosen) == len(labelled) == done["draw"]["chosen"]
        for bare, atoms in zip(chosen, labelled, strict=True):
            np.testing.assert_allclose(bare.positions, atoms.positions)
            assert bare.info["reason"] == atoms.info["reason"]
            expected = atoms.copy()
            expected.calc = EMT()
            np.testing.assert_allclose(atoms.get_forces(), expected.get_forces(), atol=1e-6)
            if atoms.pbc.all():
                np.testing.assert_allclose(atoms.get_stress(), expected.get_stress(), atol=1e-6)
        assert done["training"]["error_after"] < done["training"]["error_before"]
    # The dynamics leave the data, and the selection takes what is closest.
    assert (
        min(a.get_all_distances(mic=True)[np.triu_indices(len(a), 1)].min() for a in labelled)
        < known
    )
    model = copper / "explore" / "round_2" / "model_0"
    content = json.loads((model / "input.json").read_text())
    systems = content["training"]["training_data"]["systems"]
    assert systems == [str(copper / "data" / "train")] + [
        str(copper / "explore" / f"round_{number}" / "labelled.xyz") for number in (1, 2)
    ]
    assert content["training"]["training_data"]["auto_prob"].startswith("prob_sys_size;0:3:0.7;3:")
    # Steps of the rounds before are kept: 40, then 30 in each round; the count in the file begins at 0.
    assert (
        torch.load(model / "model.ckpt.pt", weights_only=True)["model"]["_extra_state"][
            "train_infos"
        ]["step"]
        == 99
    )


def test_dynamics_that_stay_in_the_data_say_so(copper, explore, capsys):
    cold = {"temperatures": [1.0], "time": 0.004, "strains": [0.0]}
    assert explore(rounds=1, dynamics=cold, check={"enough": "holds"}) == 1
    said = capsys.readouterr().out
    assert "nothing to label" in said
    assert "no structure left the data" in said
    assert "raise rounds" not in said
    assert not (copper / "explore" / "round_1" / "labels").exists()


def _data(folder):
    from deepmd_muon.data import open_systems
    from deepmd_muon.data.writing import write_extxyz

    if not (folder / "data.xyz").exists():
        write_extxyz(open_systems(str(folder / "data" / "train"), ["Cu"]), folder / "data.xyz")
    return read(folder / "data.xyz", ":")


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("labels", marks=pytest.mark.slow),
        "training",
        pytest.param("check", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_was_killed_goes_on(copper, explore, monkeypatch, stage):
    from deepmd_muon.explore import labelling, loop, training

    class Killed(BaseException):
        pass

    calls = []

    def kill(*_, **__):
        raise Killed

    def write_two(images, path):
        if len(calls) == 2:
            raise Killed
        calls.append(path.name)
        return original(images, path)

    with monkeypatch.context() as patch:
        if stage == "labels":
            original = labelling.write_images
            patch.setattr(labelling, "write_images", write_two)
        elif stage == "training":
            # After the first checkpoint of the round's training.
            from deepmd_muon.train.checkpoint.saving import Checkpoints

            save = Checkpoints.save

            def save_one(self, *words, **keys):
                save(self, *words, **keys)
                raise Killed

            patch.setattr(Checkpoints, "save", save_one)
        else:
            checked = loop.check_models
            patch.setattr(
                loop,
                "check_models",
                lambda *words: kill() if calls else calls.append(1) or checked(*words),
            )
        with pytest.raises(Killed):
            explore(rounds=1)
    before = {path: path.stat().st_mtime_ns for path in (copper / "explore").rglob("*.xyz")}
    weights = [path.name for path in (copper / "explore").rglob("model.ckpt-*.pt")]
    ways = []
    run = training.run
    monkeypatch.setattr(training, "run", lambda given, **way: ways.append(way) or run(given, **way))
    assert explore(rounds=1) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert set(rounds(copper, 1)) == {"draw", "labels", "training", "check"}
    if stage == "labels":
        assert len(before) == 3  # candidates and two labels
    if stage == "training":
        assert weights == ["model.ckpt-20.pt"]
    wanted = {"labels": ["finetune"], "training": ["restart"], "check": []}[stage]
    starts = {"finetune", "restart"}
    assert [name for way in ways for name in way if name in starts] == wanted


def test_structures_wait_for_labels_of_another_program(copper, explore, capsys, caplog):
    assert explore(labels=None, rounds=1) == 3
    place = copper / "explore" / "round_1"
    assert str(place / "labelled.xyz") in capsys.readouterr().out
    assert explore(labels=None, rounds=1) == 3
    images = read(place / "candidates.xyz", ":")
    write(place / "labelled.xyz", images)
    assert explore(labels=None, rounds=1) == 2
    assert "no frame with labels" in capsys.readouterr().err
    for atoms in images:
        atoms.calc = EMT()
        atoms.get_forces()
    images[1].calc = None
    lost = max(images, key=len)[:-1]
    lost.calc = EMT()
    lost.get_forces()
    write(
        place / "labelled.xyz", [*images[1:], lost]
    )  # one is missing, one has no label, one has lost an atom
    assert explore(labels=None, rounds=1) == 0
    assert rounds(copper, 1)["labels"] == {"labelled": len(images) - 1, "failed": 1}
    assert f"frames of {len(lost)} atoms" in caplog.text


def test_labels_that_were_made_outlive_a_labeller_that_fails(copper, explore, capsys):
    settings = {"rounds": 1, "selection": {"frames": 8, "per_copy": 1}}
    faulty = {"calculator": "labellers:Faulty", "workers": 1, "most_failed": 0.1}
    assert explore(labels=None, **settings) == 3
    sizes = [len(atoms) for atoms in read(copper / "explore" / "round_1" / "candidates.xyz", ":")]
    assert len(set(sizes)) > 1
    for way, word in (("raises", "converge"), ("crashes", "crashed"), ("spoils", "not finite")):
        shutil.rmtree(copper / "explore" / "round_1" / "labels", ignore_errors=True)
        size = max(set(sizes), key=sizes.count)
        assert explore(labels={**faulty, "arguments": {way: size}}, **settings) == 2
        message = capsys.readouterr().err
        assert f"failed for {sizes.count(size)} of {len(sizes)}" in message
        assert word in message
        kept = sorted(
            path.name for path in (copper / "explore" / "round_1" / "labels").glob("*.xyz")
        )
        assert kept == [f"{k:04d}.xyz" for k in range(len(sizes)) if sizes[k] != size]
    # Labels of other arguments are not mixed in without a word.
    raising = {**faulty, "workers": 2, "arguments": {"raises": size}, "most_failed": 0.9}
    assert explore(labels=raising, **settings) == 2
    assert "labels/arguments/spoils" in capsys.readouterr().err
    (copper / "explore" / "round_1" / "made_from.json").unlink()
    # With some failures allowed the others are trained on, and the failures are listed.
    assert explore(labels=raising, **settings) == 0
    done = rounds(copper, 1)["labels"]
    assert done == {"labelled": len(sizes) - sizes.count(size), "failed": sizes.count(size)}
    failed = (copper / "explore" / "round_1" / "failed.txt").read_text().splitlines()
    assert [line[:4] for line in failed] == [
        f"{k:04d}" for k in range(len(sizes)) if sizes[k] == size
    ]
    assert all("did not converge" in line for line in failed)


@pytest.mark.slow
def test_several_models_choose_by_deviation_and_are_all_trained(copper, explore, trained):
    content = json.loads((copper / "input.json").read_text())
    content["model"]["fitting_net"]["seed"] = 5
    content["training"]["save_ckpt"] = "other"
    (copper / "other.json").write_text(json.dumps(content))
    from deepmd_muon.cli.main import main

    assert main(["--pt", "train", "other.json", "-o", "out2.json"]) == 0
    changes = {
        "models": ["model.ckpt.pt", "other.pt"],
        "rounds": 1,
        "selection": {"frames": 4, "deviation_low": 1e-4, "deviation_high": 1e3},
        "training": {"steps": 5, "share": None},
    }
    assert explore(**changes) == 0
    images = read(copper / "explore" / "round_1" / "candidates.xyz", ":")
    assert all(atoms.info["deviation"] > 1e-4 for atoms in images)
    for member in (0, 1):
        assert (copper / "explore" / "round_1" / f"model_{member}" / "model.ckpt-5.pt").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"labels": {"calculator": "no_such_package.ase:X"}},
            ("labels/calculator", "no_such_package"),
        ),
        ({"labels": {"calculator": "ase.calculators.emt:XYZ"}}, ("labels/calculator", "XYZ")),
        ({"labels": {"calculator": "ase.calculators.emt"}}, ("labels/calculator", "module:Class")),
        ({"rounds": 0}, ("rounds",)),
        ({"dynamics": {"temperatures": [-5.0]}}, ("dynamics/temperatures",)),
        ({"selection": {"deviation_low": 3.0}}, ("deviation_high",)),
        ({"models": "nothing.pt"}, ("nothing.pt",)),
        ({"input": "nothing.json"}, ("nothing.json",)),
        ({"model": "model.ckpt.pt"}, ("model", "models")),
    ],
)
def test_mistakes_are_named_before_any_work(copper, explore, capsys, changes, words):
    assert explore(**changes) == 2
    message = capsys.readouterr().err
    assert message.startswith("dp explore: ")
    for word in words:
        assert word in message
    assert not list((copper / "explore").rglob("candidates.xyz"))


def test_asks_for_temperatures_where_the_data_look_very_hot(copper, explore, capsys, monkeypatch):
    monkeypatch.setattr("deepmd_muon.stability.check.estimate_temperature", lambda *_: 5542.0)
    assert explore(dynamics={"temperatures": []}) == 2
    assert "dynamics/temperatures" in capsys.readouterr().err
    assert explore(check={"temperature": None}) == 2
    assert "check/temperature" in capsys.readouterr().err


def test_an_input_that_rounds_cannot_use_is_refused(copper, explore, capsys):
    content = json.loads((copper / "input.json").read_text())
    content["training"]["training_data"]["batch_size"] = [1, 2, 3]
    (copper / "input.json").write_text(json.dumps(content))
    assert explore() == 2
    assert "batch_size" in capsys.readouterr().err


def test_data_with_an_element_that_the_model_lacks_are_refused(copper, explore, capsys):
    for name in (copper / "data" / "train").glob("*/type_map.raw"):
        name.write_text("Ag\n")
    content = json.loads((copper / "input.json").read_text())
    del content["model"]["type_map"]
    (copper / "input.json").write_text(json.dumps(content))
    assert explore() == 2
    assert "Ag" in capsys.readouterr().err


def test_one_command_at_a_time(copper, explore, capsys):
    from deepmd_muon.explore.rounds import held

    with held(copper / "explore"):
        assert explore() == 2
    assert "another dp explore" in capsys.readouterr().err


def candidate(copy, *vector):
    return Candidate(
        None, copy, 0.0, 300.0, None, 0.0, 0.9, None, "", np.array(vector, dtype=float)
    )


def test_the_farthest_are_chosen_first_and_few_of_each_trajectory():
    known = np.array([[0.0, 0.0]])
    line = [
        candidate(0, 1, 0),
        candidate(0, 9, 0),
        candidate(0, 8.9, 0),
        candidate(1, 0, 5),
        candidate(1, 0, 0),
    ]
    chosen = choose(line, known, SelectionSettings(frames=3))
    assert [c.fingerprint.tolist() for c in chosen] == [[9, 0], [0, 5], [1, 0]]
    chosen = choose(line, known, SelectionSettings(frames=5, per_copy=1))
    assert [c.fingerprint.tolist() for c in chosen] == [[9, 0], [0, 5]]
    assert choose([], known, SelectionSettings()) == []


def test_fingerprints_weigh_distances_that_no_frame_has(copper):
    from deepmd_muon.data import open_systems
    from deepmd_muon.data.neighbors.lists import Pairs
    from deepmd_muon.explore.fingerprints import Fingerprints
    from deepmd_muon.stability.coverage import coverage_of, pairs_of

    systems = open_systems(str(copper / "data" / "train"), ["Cu"])
    prints = Fingerprints(coverage_of(systems, ["Cu"], 4.0), systems)
    frame = systems[0].frames([0])
    pairs = pairs_of(frame, 0, 4.0)
    start = prints.of(pairs)
    np.testing.assert_allclose(
        start, min(prints.known, key=lambda row: np.linalg.norm(row - start))
    )

    def moved(k, distance):
        changed = pairs.distance.copy()
        same = (pairs.i == pairs.i[k]) & (pairs.j == pairs.j[k]) | (pairs.i == pairs.j[k]) & (
            pairs.j == pairs.i[k]
        )
        same &= np.isclose(pairs.distance, pairs.distance[k])
        changed[same] = distance
        values = {name: getattr(pairs, name) for name in pairs.__dataclass_fields__}
        return np.linalg.norm(prints.of(Pairs(**{**values, "distance": changed})) - start)

    k = int(pairs.distance.argmin())
    assert moved(k, 1.5) > 1.5 * moved(k, 2.6) > 0.0


def test_elements_that_the_data_hold_apart_may_meet():
    """Oxygen and hydrogen in systems of their own: a structure with both is new, and not too close at 1.2 Å."""
    from deepmd_muon.data import MemoryStore, System
    from deepmd_muon.stability.coverage import coverage_of, pairs_of

    def pair(first, second, distance):
        coord = np.array([[0.0, 0.0, 0.0, distance, 0.0, 0.0]])
        return System(
            MemoryStore("pair", [first, second], [{"coord": coord}], pbc=False), ["O", "H"]
        )

    coverage = coverage_of([pair("O", "O", 1.2), pair("H", "H", 0.74)], ["O", "H"], 4.0)
    least = SelectionSettings().closest
    for distance, kept in ((1.2, True), (0.5, False)):
        closest, new = coverage.compare(pairs_of(pair("O", "H", distance).frames([0]), 0, 4.0))
        assert new is not None
        assert (closest >= least) == kept


def test_the_reference_page_is_that_of_the_settings():
    from pathlib import Path

    from deepmd_muon.argcheck.document import reference_of

    page = Path(__file__).parents[3] / "doc" / "explore-reference.md"
    assert page.read_text() == reference_of(ExploreSettings, "Input of dp explore")


def test_the_example_is_accepted_and_is_that_of_the_tutorial():
    from pathlib import Path

    from deepmd_muon.explore.loop import load_settings
    from deepmd_muon.explore.training import BaseInput

    top = Path(__file__).parents[3]
    place = top / "examples" / "water_explore"
    settings = load_settings(place / "explore.json")
    own, new = BaseInput(place / settings.input).systems((), ("O", "H"))
    assert (len(own), new) == (3, [])
    page = (top / "doc" / "tutorials" / "stable-water.md").read_text()
    shown = json.loads(page.split("```json\n")[1].split("```")[0])
    assert shown == {
        key: value
        for key, value in json.loads((place / "explore.json").read_text()).items()
        if key[0] != "_"
    }
