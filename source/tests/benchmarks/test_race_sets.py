"""Larger sets of the race: more trajectories of the same conditions, and water that a potential draws."""

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ase")
import make_alloys
import make_molecules
import make_silicon
import make_water_large as large
import race
import sampling
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.singlepoint import SinglePointCalculator
from make_data import FlexibleSPC, lattice_of_molecules
from results import read
from sets import SETS

SMALL = Path(__file__).resolve().parents[3] / "examples" / "water_xtb" / "data"

pytestmark = pytest.mark.slow  # of scripts, not of the package


@pytest.mark.parametrize("module", [make_alloys, make_molecules, make_silicon])
def test_a_large_set_begins_with_the_small_one(module):
    small, more = module.plans(), module.plans(module.LARGER)
    for ours, theirs in zip(more, small, strict=False):
        np.testing.assert_array_equal(ours.atoms.positions, theirs.atoms.positions)
        assert (ours.part, ours.name, ours.frames) == (theirs.part, theirs.name, theirs.frames)
    assert {plan.part for plan in more[len(small) :]} == {"train"}
    frames = [
        {
            name: sum(plan.frames for plan in plans if f"{plan.part}/{plan.name}" == name)
            for name in names
        }
        for plans in (small, more)
        for names in [{f"{plan.part}/{plan.name}" for plan in small}]
    ]
    for name, count in frames[0].items():
        assert frames[1][name] == count * (module.LARGER if name.startswith("train/") else 1)


def test_contacts_are_distances_between_molecules():
    # Two molecules on either side of a face of the cell; lengths in Å.
    molecule = np.array([[0.0, 0.0, 0.0], [0.9, 0.0, 0.0], [0.0, 1.0, 0.0]])
    positions = np.concatenate([molecule + np.array(x) for x in ([9.8, 5, 5], [2.8, 5, 5])])
    assert large.contacts(positions, 10.0) == pytest.approx(
        {("O", "O"): 3.0, ("O", "H"): 2.1, ("H", "H"): np.hypot(2.1, 1.0)}
    )
    np.testing.assert_allclose(large.bond_lengths(positions), [[0.9, 1.0]] * 2)
    assert large.is_water(positions, 10.0)
    for moved in ([-0.95, 0, 0], [0.0, 0, 9.3]):  # O…H 1.15, and next to each other
        near = positions + np.repeat([[0, 0, 0], moved], 3, axis=0)
        assert large.is_water(near, 10.0) == (moved[2] != 0)
    assert not large.is_water(positions * [1, 1.5, 1], 15.0)


class Attraction(Calculator):
    """Flexible SPC with a constant force that draws the hydrogens of the first two molecules together."""

    implemented_properties = ["energy", "forces"]  # noqa: RUF012, as ASE declares it

    def __init__(self, force):
        super().__init__()
        self.force, self.liquid = force, FlexibleSPC(24)

    def calculate(self, atoms=None, properties=("energy",), system_changes=tuple(all_changes)):
        super().calculate(atoms, properties, system_changes)
        self.liquid.calculate(self.atoms)
        self.results = {name: np.copy(value) for name, value in self.liquid.results.items()}
        vector = self.atoms.get_distance(1, 4, mic=True, vector=True)
        pull = self.force * vector / np.linalg.norm(vector)
        self.results["forces"][1] += pull
        self.results["forces"][4] -= pull


def starts():
    return [lattice_of_molecules(8, np.random.default_rng(seed)) for seed in range(3)]


def test_a_walk_ends_where_it_leaves_water():
    begin, frames = starts(), 12
    length = begin[0].cell[0, 0]
    assert all(large.is_water(atoms.positions, length) for atoms in begin)
    walker = large.Walker(300.0, 1, begin)
    for force, leaves in ((0.0, False), (4.0, True)):
        found, ended = walker.draw(Attraction(force), frames)
        assert (ended > 0) == leaves
        assert len(found) == frames
        assert all(large.is_water(positions, length) for positions in found)
        assert len({positions.round(6).tobytes() for positions in found}) == frames
        np.testing.assert_allclose([x.mean(axis=0) for x in found], length / 2)
        again, _ = walker.draw(Attraction(force), frames)
        np.testing.assert_array_equal(again, found)
    with pytest.raises(RuntimeError, match="train the potential longer"):
        walker.draw(Attraction(2e3), frames)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A small set, and a work folder in which each temperature has a walker with six frames, labelled by halves."""
    monkeypatch.setattr(large, "FRAMES", 6)
    monkeypatch.setattr(large, "BLOCK", 3)
    monkeypatch.setattr(sampling, "CHECKSUMS", tmp_path / "checksums")
    small, work = tmp_path / "water", tmp_path / "water_large_work"
    for part, source in (
        ("train", "valid/300K"),
        ("train", "valid/350K"),
        ("test", "valid/300K"),
        ("out", "valid/420K"),
    ):
        shutil.copytree(SMALL / source, small / part / Path(source).name)
    for temperature in large.TEMPERATURES:
        coord = np.load(SMALL / "train" / f"{temperature:g}K" / "set.000" / "coord.npy")[
            :6
        ].reshape(6, 96, 3)
        box = np.load(SMALL / "train" / f"{temperature:g}K" / "set.000" / "box.npy")[0]
        large.save(work / "drawn" / f"{temperature:g}K_00.npz", coord=coord, length=box[0], ended=0)
    return small, work, tmp_path / "water_large"


def spc_labels(atoms, *_):
    """Return a frame with labels of flexible SPC and no stress."""
    frame = atoms.copy()
    calculator = FlexibleSPC(len(atoms))
    calculator.calculate(frame)
    frame.calc = SinglePointCalculator(frame, stress=np.zeros(6), **calculator.results)
    return frame


def test_the_large_water_set_is_the_small_one_and_what_was_labelled(folders, monkeypatch, capsys):
    small, work, out = folders
    monkeypatch.setattr(large, "labelled", spc_labels)
    blocks = large.block_files(work)
    assert [path.name for path in blocks] == [
        f"{t}K_00_{first:02d}.npz" for first in (0, 3) for t in (300, 350)
    ]
    for number, (path, source) in enumerate(blocks.items()):
        late = number == 3
        assert (
            "is left" in large.label_block(path, *source, until=0.0 if late else float("inf"))
        ) == late
        assert path.exists() != late
    before = next(iter(blocks)).stat().st_mtime_ns
    assert "exists" in large.label_block(
        next(iter(blocks)), *blocks[next(iter(blocks))], until=float("inf")
    )
    assert next(iter(blocks)).stat().st_mtime_ns == before
    large.write(work, small, out)
    assert "O–H 0.9" in capsys.readouterr().out
    for temperature, frames in ((300, 6), (350, 3)):
        numbers = out / "train" / f"drawn_{temperature}K" / "set.000"
        source = SMALL / "train" / f"{temperature}K" / "set.000"
        for name in ("coord", "box"):
            np.testing.assert_allclose(
                np.load(numbers / f"{name}.npy"), np.load(source / f"{name}.npy")[:frames]
            )
        (expected,) = large.frames_of(work / "drawn" / f"{temperature}K_00.npz", slice(1, 2))
        expected.calc = FlexibleSPC(96)
        np.testing.assert_allclose(
            np.load(numbers / "force.npy")[1], expected.get_forces().ravel(), atol=1e-5
        )
    for path in small.rglob("*.npy"):
        assert path.read_bytes() == (out / path.relative_to(small)).read_bytes()
    given = [
        "--data",
        out.parent,
        "--sets",
        "water_large",
        "--models",
        "tiny",
        "--steps",
        2,
        "--contestants",
        "adam=0.001",
    ]
    race.race(race.arguments([*map(str, given), "--results", str(out.parent / "a.jsonl")]))
    ((key, result),) = read([out.parent / "a.jsonl"])[0].items()
    assert key.set == "water_large"
    assert set(result.test) == {"300K"}
    assert set(result.out) == {"420K"}


def test_the_potential_that_draws_is_a_run_of_the_race(folders, monkeypatch):
    small, work, _ = folders
    monkeypatch.setattr(large, "POTENTIAL", ("water", "tiny", "hybrid_muon", 0.00864, 2, 2))
    large.train_potential(small, work / "potential.pt")
    (walker, *_) = large.walkers(small)
    monkeypatch.setattr(large, "FRAMES", 1)
    (work / "drawn" / "300K_00.npz").unlink()
    for expected in ("1 frames", "exists"):
        assert expected in large.draw_one(walker, work / "potential.pt", work)
    assert np.load(work / "drawn" / "300K_00.npz")["coord"].shape == (1, 96, 3)


def test_labels_are_those_of_the_example(folders):
    pytest.importorskip("tblite")
    _, work, _ = folders
    path, (drawn, _) = next(iter(large.block_files(work).items()))
    large.label_block(path, drawn, slice(2, 3), until=float("inf"))
    found = np.load(path)
    for name, tolerance in (("energy", 1e-6), ("force", 1e-4), ("virial", 1e-4)):
        expected = np.load(SMALL / "train" / "300K" / "set.000" / f"{name}.npy")[2]
        np.testing.assert_allclose(found[name][0].ravel(), expected.ravel(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in SETS if name.endswith("_large")])
def test_published_larger_sets_test_on_the_frames_of_the_small_ones(name):
    large_files, small_files = (
        set((sampling.CHECKSUMS / f"{which}.sha256").read_text().splitlines())
        for which in (name, name[: -len("_large")])
    )
    for part in ("test", "out"):
        expected = {line for line in small_files if f"  {part}/" in line}
        assert len(expected) >= 14
        assert {line for line in large_files if f"  {part}/" in line} == expected
