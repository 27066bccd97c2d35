"""What the fuzz tool enters: a file or folder that a user gives, how it is changed, and how it is read."""

from __future__ import annotations

import json
import logging
import os
import random
from abc import ABC, abstractmethod
from pathlib import Path

import h5py
import numpy as np
import torch
import yaml
from mutants import array_mutant, bytes_mutant, tree_mutant

from deepmd_muon.argcheck import load, normalize
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.data import NeighborCache, open_systems
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import Predictor
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.train import run

INPUT = {
    "model": {
        "type_map": ["A", "B"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [6, 6],
            "rcut": 3.0,
            "rcut_smth": 1.0,
            "neuron": [4, 8],
            "seed": 1,
        },
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


class Door(ABC):
    """Something a user gives, in a new folder.

    Attributes
    ----------
    name
        What an error must name.
    """

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def change(self, draw: random.Random) -> None:
        """Write a mutant of the original."""

    @abstractmethod
    def enter(self) -> None:
        """Read the mutant, and see that what comes out is right."""


class Input(Door):
    """An input file, JSON or YAML."""

    name = "input."

    def change(self, draw: random.Random) -> None:
        for path in self.folder.glob("input.*"):
            path.unlink()
        self._path = self.folder / f"input.{draw.choice(('json', 'json', 'yaml'))}"
        write = json.dumps if self._path.suffix == ".json" else yaml.safe_dump
        if draw.random() < 0.5:
            self._path.write_bytes(bytes_mutant(write(INPUT).encode(), draw))
        else:
            self._path.write_text(write(tree_mutant(INPUT, draw)))

    def enter(self) -> None:
        found = load(self._path)
        assert normalize(found.normalized).settings == found.settings


def write_arrays(write) -> None:
    """Call a function with the name and the values of every array of a system."""
    draw = np.random.default_rng(2)
    for name, width in (("coord", 12), ("energy", 1), ("force", 12)):
        write(f"{name}.npy", draw.uniform(0.5, 5.0, (3, width)))
    write("box.npy", np.tile(np.eye(3).ravel() * 6, (3, 1)))


def write_system(folder: Path) -> None:
    """Write three frames of four atoms."""
    part = folder / "set.000"
    part.mkdir(parents=True)
    (folder / "type.raw").write_text("0 1 0 1")
    (folder / "type_map.raw").write_text("A B")
    write_arrays(lambda name, values: np.save(part / name, values))


class System(Door):
    """A system of npy files."""

    name = "sys"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_system(folder / "sys")
        self._originals = {
            path: path.read_bytes()
            for path in sorted((folder / "sys").rglob("*"))
            if path.is_file()
        }

    def change(self, draw: random.Random) -> None:
        for path, content in self._originals.items():
            path.write_bytes(content)
        path = draw.choice(list(self._originals))
        if path.suffix == ".npy" and draw.random() < 0.5:
            np.save(path, array_mutant(np.load(path), draw))
        else:
            path.write_bytes(bytes_mutant(self._originals[path], draw))

    def enter(self) -> None:
        (system,) = open_systems(str(self.folder / self.name), ["A", "B"])
        suspicions([system])
        frames = system.frames(range(system.nframes))
        assert all(
            np.isfinite(values).all() for values in (frames.coord, frames.box, frames.energy)
        )
        cache = NeighborCache(3.0, (8, 8), by_type=True, ntypes=2)
        for k in range(frames.nframes):
            cache.frame(system, k, frames, k)


class HDF5System(System):
    """A system as datasets of another shape, dtype or kind in an HDF5 file."""

    name = "s.hdf5"

    def __init__(self, folder: Path) -> None:
        Door.__init__(self, folder)
        self._arrays: dict[str, object] = {
            "type.raw": np.array([0, 1, 0, 1]),
            "type_map.raw": np.array([b"A", b"B"]),
        }
        write_arrays(lambda name, values: self._arrays.update({f"set.000/{name}": values}))

    def change(self, draw: random.Random) -> None:
        mutated = draw.choice(list(self._arrays))
        (self.folder / self.name).unlink(missing_ok=True)
        with h5py.File(self.folder / self.name, "w") as file:
            for name, values in self._arrays.items():
                if name != mutated:
                    file[name] = values
            self._put(file, mutated, draw)

    def _put(self, file: h5py.File, name: str, draw: random.Random) -> None:
        """Store a mutant under a name, or something that is no array."""
        values = np.asarray(self._arrays[name])
        kind = draw.randrange(8)
        if kind == 0:
            file[name] = h5py.SoftLink(
                draw.choice(("/nowhere", f"/{name}", "/type.raw", "/set.000"))
            )
        elif kind == 1:
            file[name] = draw.choice(
                (h5py.Empty("f8"), h5py.ExternalLink("none.hdf5", "/x"), "text", b"\xff\xfe")
            )
        elif kind == 2:
            file.create_group(name)
        elif kind == 3:
            file.create_dataset(
                name, values.shape, dtype=draw.choice((h5py.ref_dtype, h5py.string_dtype()))
            )
        elif values.dtype.kind == "S":
            file[name] = draw.choice(
                (values[:1], values[::-1], values[None], np.array([b"A", b"A"]), np.arange(3))
            )
        else:
            mutant = array_mutant(values, draw)
            file[name] = (
                mutant.astype("S12") if mutant.dtype.kind == "U" else _without_dates(mutant)
            )


def _without_dates(array: np.ndarray) -> np.ndarray:
    return array.view("i8") if array.dtype.kind == "M" else array  # HDF5 has none


def small_checkpoint(type_map: tuple[str, str] = ("A", "B")) -> dict:
    """Return a model under deepmd-kit's names with our own key."""
    section = normalize(INPUT).normalized["model"] | {"type_map": list(type_map)}
    content = to_deepmd_kit(build_model(section), {"lr": 1e-3, "step": 4})
    return {"model": content, "deepmd_muon": {"version": 1, "step": 5}}


class CheckpointBytes(Door):
    """A checkpoint file whose bytes have changed is refused or holds what it held."""

    name = "a.pt"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._expected = small_checkpoint()
        self._write()
        self._originals = {path: path.read_bytes() for path in self._files()}

    def _write(self) -> None:
        torch.save(self._expected, self.folder / self.name)

    def _files(self) -> list[Path]:
        return [self.folder / self.name]

    def change(self, draw: random.Random) -> None:
        for path, content in self._originals.items():
            path.write_bytes(content)
        path = draw.choice(list(self._originals))
        path.write_bytes(bytes_mutant(self._originals[path], draw))

    def enter(self) -> None:
        found = read_checkpoint(self.folder / self.name)
        expected = self._expected["model"]
        assert found["model"].keys() == expected.keys()
        assert found["deepmd_muon"] == self._expected["deepmd_muon"]
        for key, value in expected.items():
            assert (
                torch.equal(found["model"][key], value) if isinstance(value, torch.Tensor) else True
            ), key


class CheckpointStructure(Door):
    """A checkpoint with valid checksums whose values are strange, missing or misplaced, as a model to predict with."""

    name = "a.pt"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._content = small_checkpoint()

    def change(self, draw: random.Random) -> None:
        torch.save(tree_mutant(self._content, draw), self.folder / self.name)

    def enter(self) -> None:
        coord = np.arange(12.0).reshape(1, 4, 3) % 5.0
        predictor = Predictor(str(self.folder / self.name), device="cpu")
        predictor.predict(coord, np.eye(3)[None] * 6.0, [0, 1, 0, 1])


class Restart(Door):
    """A whole checkpoint of a run, optimizer and data order included, as what `--restart` goes on from."""

    name = "mutant.pt"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_system(folder / "sys")
        training = {
            "training_data": {"systems": ["sys"], "batch_size": 1},
            "seed": 1,
            "enable_ema": True,
        }
        training |= {"numb_steps": 2, "save_freq": 2, "disp_freq": 2, "disp_training": False}
        (folder / "input.json").write_text(json.dumps({**INPUT, "training": training}))
        self._run()
        self._content = torch.load(folder / "model.ckpt.pt", weights_only=True)

    def _run(self, **options) -> None:
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            assert (
                run(
                    load("input.json"),
                    log_level=logging.CRITICAL,
                    skip_neighbor_stat=True,
                    **options,
                )
                == 0
            )
        finally:
            os.chdir(before)

    def change(self, draw: random.Random) -> None:
        torch.save(tree_mutant(self._content, draw), self.folder / self.name)

    def enter(self) -> None:
        self._run(restart=self.name)


class FrozenBytes(Door):
    """A frozen file whose bytes have changed is refused or computes what it did."""

    name = "model.pth"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        freeze(build_model(normalize(INPUT).normalized["model"]), folder / self.name)
        self._original = (folder / self.name).read_bytes()
        self._expected = self._forces()

    def _forces(self) -> np.ndarray:
        coord = np.arange(12.0).reshape(4, 3) ** 1.1 % 2.5
        return (
            Predictor(self.folder / self.name, device="cpu")
            .predict(coord, None, np.array([0, 1, 0, 1]))
            .force
        )

    def change(self, draw: random.Random) -> None:
        (self.folder / self.name).write_bytes(bytes_mutant(self._original, draw))

    def enter(self) -> None:
        np.testing.assert_array_equal(self._forces(), self._expected)
