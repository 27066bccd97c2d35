"""Doors of commands that draw structures: the input and the files of `dp explore`, `--replay`, `dp check --json`."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
import yaml
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from doors import INPUT, Door, small_checkpoint, write_system
from mutants import array_mutant, bytes_mutant, tree_mutant

from deepmd_muon.argcheck import load
from deepmd_muon.data import open_systems
from deepmd_muon.explore import labelling, loop
from deepmd_muon.explore.calculator import make_calculator
from deepmd_muon.explore.labelling import calculator_of, label_all, read_xyz
from deepmd_muon.explore.loop import load_settings
from deepmd_muon.explore.records import RoundRecord
from deepmd_muon.explore.rounds import Round, table_of
from deepmd_muon.explore.settings import ExploreError, LabelSettings
from deepmd_muon.infer import Predictor
from deepmd_muon.replay.prepare import PSEUDO, prepare
from deepmd_muon.stability.check import CheckSettings, check_models
from deepmd_muon.stability.report import text_of, values_of


class ExploreInput(Door):
    """An input of `dp explore`, and the calculator that it names: nothing but a calculator is called."""

    name = "explore."
    _CONTENT: ClassVar = {
        "input": "input.json",
        "models": ["a.pt", "b.pt"],
        "rounds": 3,
        "dynamics": {"temperatures": [300, 600.0], "strains": [0.0], "time": 0.5, "seed": 1},
        "selection": {"frames": 4, "deviation_low": 0.1, "deviation_high": 2.0},
        "labels": {"calculator": "ase.calculators.emt:EMT", "arguments": {"asap_cutoff": True}},
        "training": {"start": "finetune", "steps": 10, "share": 0.3},
        "check": {"temperature": 300, "enough": "doubtful"},
    }
    _HOSTILE: ClassVar = (
        {"calculator": "subprocess:Popen", "arguments": {"args": ["touch", "called"]}},
        {"calculator": "subprocess:check_call", "arguments": {"args": "touch called", "shell": 1}},
        {"calculator": "os:mkdir", "arguments": {"path": "called"}},
        {"calculator": "builtins:open", "arguments": {"file": "called", "mode": "w"}},
        {"calculator": "pathlib:Path", "arguments": {}},
        {"calculator": "numpy:save", "arguments": {"file": "called", "arr": 1}},
        {"calculator": "ase.db:connect", "arguments": {"name": "called.db"}},
        {"calculator": "ase.calculators.calculator:Calculator", "arguments": {"atoms": 3}},
        {"calculator": "ase.calculators.calculator:all_changes", "arguments": {}},
    )

    def change(self, draw: random.Random) -> None:
        for path in self.folder.glob("explore.*"):
            path.unlink()
        self._path = self.folder / f"explore.{draw.choice(('json', 'json', 'yaml'))}"
        write_tree = json.dumps if self._path.suffix == ".json" else yaml.safe_dump
        if draw.random() < 0.3:
            self._path.write_bytes(bytes_mutant(write_tree(self._CONTENT).encode(), draw))
            return
        tree = {**self._CONTENT}
        if draw.random() < 0.3:
            tree["labels"] = draw.choice(self._HOSTILE)
        self._path.write_text(write_tree(tree_mutant(tree, draw)))

    def enter(self) -> None:
        settings = load_settings(self._path)
        if settings.labels is None:
            return
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            made = make_calculator(calculator_of(settings.labels))
            assert callable(made.calculate)
        except ExploreError as error:  # it names the setting, and the command the file
            setting = "labels/" in str(error)
            raise ExploreError(f"{self._path if setting else '?'}: {error}") from error
        finally:
            os.chdir(before)
            assert [path.name for path in self.folder.iterdir()] == [self._path.name]


class Rounds(Door):
    """Files of a round of `dp explore` that is finished, as the next command reads them."""

    name = "round_1"
    _RECORD: ClassVar = {
        "draw": {"copies": 8, "blow_ups": 1, "followed": 0.5, "candidates": 20, "chosen": 2},
        "labels": {"labelled": 2, "failed": 0},
        "training": {"error_before": 0.5, "error_after": 0.25},
        "check": {"verdict": "doubtful", "summary": "scans doubtful"},
    }
    _ORIGINS: ClassVar = {
        stage: {"model 0": "sha256:0123456789abcdef", "dynamics/seed": 1, "dynamics/time": [0.5]}
        for stage in _RECORD
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._round = Round(folder / self.name, 1)
        self._round.labels.mkdir(parents=True)
        images = []
        for k in range(2):
            atoms = Atoms("CuAg", [(1, 1, 1), (3, 3, 3.5 + k)], cell=[6, 6, 6], pbc=True)
            atoms.info["reason"] = "Cu-Ag at 2.1 Å"
            images.append(atoms)
        write(self._round.candidates, images, format="extxyz")
        for k, atoms in enumerate(images):
            atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=np.zeros((2, 3)))
            write(self._round.labels / f"{k:04d}.xyz", atoms, format="extxyz")
        write(self._round.labelled, images, format="extxyz")
        self._round.record.write_text(json.dumps(self._RECORD))
        self._round.origins.write_text(json.dumps(self._ORIGINS))
        self._originals = {
            path: path.read_bytes() for path in self._round.folder.rglob("*") if path.is_file()
        }

    def change(self, draw: random.Random) -> None:
        shutil.rmtree(self._round.folder)
        self._round.labels.mkdir(parents=True)
        for path, content in self._originals.items():
            path.write_bytes(content)
        path = draw.choice(sorted(self._originals))
        kind = draw.random()
        if kind < 0.1:
            path.unlink()
            draw.choice((os.mkfifo, os.mkdir, lambda place: os.symlink(place, place)))(path)
        elif path.suffix == ".json" and kind < 0.7:
            tree = self._RECORD if path == self._round.record else self._ORIGINS
            path.write_text(json.dumps(tree_mutant(tree, draw)))
        elif path.suffix == ".xyz" and kind < 0.3:
            count = draw.choice(("99999999999", "+9999999999", "0\n\n9999999999", "-1", "1_0_0"))
            path.write_bytes(count.encode() + self._originals[path][1:])
        else:
            path.write_bytes(bytes_mutant(self._originals[path], draw))

    def enter(self) -> None:
        here = self._round
        done = here.done()
        assert len(table_of([RoundRecord(), done])) == 3
        for stage, origin in self._ORIGINS.items():
            here.begin(stage, origin)
        images = read_xyz(here.candidates)
        settings = LabelSettings(calculator="ase.calculators.emt:EMT", most_failed=1.0)
        # Labels that are missing would be computed in other processes.
        with mock.patch.object(labelling, "answers_of", lambda jobs, **_: ((k, "-") for k in jobs)):
            found = label_all(images, settings, here.labels)
        assert sorted([*found.done, *found.failed, *found.too_large]) == list(range(len(images)))
        if done.draw is not None:
            assert loop._count_labels(here).labelled


class Replay(Door):
    """Fine-tuning with replay: a damaged input or checkpoint is refused, or structures are drawn and can be read."""

    name = ""  # of the input, the checkpoint or the data
    _SECTION: ClassVar = {
        "proportion": 0.4,
        "share_fitting_net": True,
        "frames": 10,
        "temperatures": [5.0, 10.0],
        "steps": 4,
        "strain": 0.01,
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_system(folder / "sys")
        (folder / "sys" / "type_map.raw").write_text("Cu Ag")
        training = {"training_data": {"systems": ["sys"]}, "numb_steps": 10, "seed": 1}
        model = {**INPUT["model"], "type_map": ["Cu", "Ag"]}
        self._input = {**INPUT, "model": model, "training": training, "replay": self._SECTION}
        self._checkpoint = small_checkpoint(("Cu", "Ag"))

    def change(self, draw: random.Random) -> None:
        for path in self.folder.glob("*.hdf5"):
            path.unlink()
        content, checkpoint = self._input, self._checkpoint
        kind = draw.random()
        if kind < 0.5:
            content = {**content, "replay": tree_mutant({"replay": self._SECTION}, draw)}
            content["replay"] = content["replay"].get("replay")
        elif kind < 0.75:
            content = tree_mutant(content, draw)
        else:
            checkpoint = tree_mutant(checkpoint, draw)
        (self.folder / "input.json").write_text(json.dumps(content))
        torch.save(checkpoint, self.folder / "a.pt")

    def enter(self) -> None:
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            prepared = prepare(load("input.json"), "a.pt", None, [PSEUDO])
            prepared.make_data()
            for path in sorted(Path().glob("*.hdf5")):
                for system in open_systems(str(path)):
                    frames = system.frames(range(system.nframes))
                    assert np.isfinite(frames.coord).all()
        finally:
            os.chdir(before)


class CheckJson(Door):
    """A report of `dp check --json` on strange data or a strange model is JSON without NaN, and has the words, too."""

    name = ""  # the command names what it was given

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_system(folder / "sys")
        (folder / "sys" / "type_map.raw").write_text("Cu Ag")
        self._set = folder / "sys" / "set.000"
        self._originals = {path: np.load(path) for path in sorted(self._set.glob("*.npy"))}
        self._content = small_checkpoint(("Cu", "Ag"))

    def change(self, draw: random.Random) -> None:
        for path, array in self._originals.items():
            np.save(path, array)
        content = self._content
        if draw.random() < 0.6:
            path = draw.choice(list(self._originals))
            factor = draw.choice((0.0, 1e-3, 0.3, 3.0, 5.0))
            array = self._originals[path]
            np.save(path, array * factor if draw.random() < 0.6 else array_mutant(array, draw))
        else:
            weights = dict(content["model"])
            name = draw.choice([k for k, v in weights.items() if isinstance(v, torch.Tensor)])
            factor = draw.choice((0.0, -1.0, 1e3, 1e30, float("inf"), float("nan")))
            weights[name] = weights[name] * factor
            content = {**content, "model": weights}
        torch.save(content, self.folder / "a.pt")

    def enter(self) -> None:
        predictor = Predictor(str(self.folder / "a.pt"), device="cpu")
        systems = open_systems(str(self.folder / "sys"), predictor.type_map)
        settings = CheckSettings(temperature=300.0, time=0.01, copies=2, probes=1)
        report = check_models(["a.pt"], [predictor], systems, settings)
        text = json.dumps(values_of(report), allow_nan=False)
        assert json.loads(text)["models"]
        assert len(list(text_of(report))) > 5
