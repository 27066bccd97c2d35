"""Further doors of the fuzz tool: files of data that libraries read, reports, statistics, optimizer states."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import ClassVar
from unittest import mock

import h5py
import numpy as np
import torch
from doors import CheckpointStructure, Door, Restart, write_system
from mutants import bytes_mutant, tree_mutant

from deepmd_muon.cli.attributes import ATTRIBUTES, log_attributes
from deepmd_muon.cli.show import _checkpoint_routing
from deepmd_muon.data import StatFile, open_systems
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.writing import write_hdf5
from deepmd_muon.infer import Predictor
from deepmd_muon.show.learning_curve import read_learning_curve
from deepmd_muon.show.plan import plan_page
from deepmd_muon.show.weights import weights_page
from deepmd_muon.train.report.json_lines import JsonLinesFile
from deepmd_muon.train.report.lcurve import LearningCurveFile
from deepmd_muon.train.validation.validation_file import ValidationFile


class ExtendedXYZ(Door):
    """Extended XYZ with changed bytes, or with a word of it in place of another."""

    name = "s.xyz"
    _WORDS = (
        "forces:R:99999999",
        "pos:S:3",
        "species:I:1",
        "Properties=",
        "=",
        "\n\n",
        "é",
        "{",
        "[[1,2],[3]]",
        "inf",
    )
    _HEAD = 'Lattice="6 0 0 0 6 0 0 0 6" Properties=species:S:1:pos:R:3:forces:R:3 energy=-1.5 pbc="T T T"'

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        row = "O {} 0.5 {} 0.1 0.0 -0.1"
        frame = ["2", self._HEAD, row.format(1.0, 2.0), row.format(3.0, 4.5).replace("O", "H")]
        self._original = "\n".join([*frame * 3, ""])

    def change(self, draw: random.Random) -> None:
        path = self.folder / self.name
        if draw.random() < 0.5:
            path.write_bytes(bytes_mutant(self._original.encode(), draw))
            return
        words = self._original.replace("\n", " \n ").split(" ")
        words[draw.randrange(len(words))] = draw.choice(
            (*words, "nan", "1e400", "-1", "999999999", "x:R:3", "\x00", '"', *self._WORDS)
        )
        path.write_text(" ".join(words).replace(" \n ", "\n"))

    def enter(self) -> None:
        for system in open_systems(str(self.folder / self.name)):
            frames = system.frames(range(system.nframes))
            assert np.isfinite(frames.coord).all()
            suspicions([system])


class CompressedXYZ(ExtendedXYZ):
    """The same in a gzip file, whose own bytes change, too."""

    name = "s.xyz.gz"

    def change(self, draw: random.Random) -> None:
        super().change(draw)
        content = gzip.compress((self.folder / self.name).read_bytes())
        (self.folder / self.name).write_bytes(
            bytes_mutant(content, draw) if draw.random() < 0.5 else content
        )


class HDF5Bytes(Door):
    """A changed byte of an HDF5 file that `dp convert-data` wrote is refused or changes nothing."""

    name = "s.hdf5"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_system(folder / "sys")
        write_hdf5(open_systems(str(folder / "sys"), ["A", "B"]), folder / self.name)
        self._original, self._expected = (folder / self.name).read_bytes(), self._frames()

    def _frames(self) -> list[np.ndarray]:
        (system,) = open_systems(str(self.folder / self.name), ["A", "B"])
        frames = system.frames(range(system.nframes))
        return [frames.coord, frames.box, frames.energy, frames.force, frames.atype]

    def change(self, draw: random.Random) -> None:
        (self.folder / self.name).write_bytes(bytes_mutant(self._original, draw))

    def enter(self) -> None:
        for found, expected in zip(self._frames(), self._expected, strict=True):
            np.testing.assert_array_equal(found, expected)


class Statistics(Door):
    """A damaged `stat_file` is refused, or has no entry, or the one that was written; the next entry can be kept."""

    name = "stat.hdf5"
    _KEY: ClassVar = {"rcut": 6.0}
    _ARRAYS: ClassVar = {
        "mean": np.arange(8.0).reshape(2, 4),
        "stddev": np.ones((2, 4)),
        "energy_bias": np.ones(2),
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for number in range(3):
            StatFile(folder / self.name).save(
                self._KEY if number == 1 else {"rcut": number}, self._ARRAYS
            )
        self._original = (folder / self.name).read_bytes()

    def change(self, draw: random.Random) -> None:
        path = self.folder / self.name
        path.write_bytes(self._original)
        if draw.random() < 0.6:
            path.write_bytes(bytes_mutant(self._original, draw))
            return
        with h5py.File(path, "r+") as file:
            names: list[str] = []
            file.visit(names.append)
            name = draw.choice(names)
            del file[name]
            if draw.random() < 0.7:
                links = (h5py.SoftLink("/nowhere"), h5py.SoftLink(f"/{name}"))
                file[name] = draw.choice(
                    (*links, "x", h5py.Empty("f8"), np.arange(3), np.array(b"x"))
                )

    def enter(self) -> None:
        store = StatFile(self.folder / self.name)
        found = store.load(self._KEY)
        assert found is None or all(
            np.array_equal(found[name], array) for name, array in self._ARRAYS.items()
        )
        store.save(self._KEY, self._ARRAYS)
        assert store.load(self._KEY).keys() == self._ARRAYS.keys()


class Reports(Door):
    """Damaged rows of reports are left out at a restart, and all others up to its step stay; pictures name them."""

    name = "log."

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._originals: dict[Path, bytes] = {}
        for report in self._reports(0):
            for step in range(100, 1000, 100):
                self._row(report, step)
            report.close()
        for path in sorted(folder.iterdir()):
            self._originals[path] = path.read_bytes()

    def _reports(self, start: int) -> list:
        curve = LearningCurveFile(self.folder / "log.out", 100, start_step=start)
        lines = JsonLinesFile(self.folder / "log.jsonl", 100, start_step=start)
        return [curve, lines, ValidationFile(self.folder / "log.val", "e:mae", start_step=start)]

    def _row(self, report: object, step: int) -> None:
        errors = {"rmse_e": 1.0 / step, "rmse_f": 2.0 / step}
        if isinstance(report, ValidationFile):
            report.row(
                step,
                {f"{x}:{y}": 1.0 / step for x in "efs" for y in ("mae", "rmse")},
                f"saved {step}",
            )
        else:
            report.step(step, 1e-3, errors, errors)

    def change(self, draw: random.Random) -> None:
        for path, content in self._originals.items():
            path.write_bytes(content)
        self._path = draw.choice(list(self._originals))
        self._path.write_bytes(bytes_mutant(self._originals[self._path], draw))

    def enter(self) -> None:
        before = self._path.read_bytes().split(b"\n")[:-1]
        whole = set(self._originals[self._path].split(b"\n"))
        reports = self._reports(500)
        for report in reports:
            self._row(report, 600)
            report.close()
        after = self._path.read_bytes().split(b"\n")
        rows = [line for line in before if line in whole and line[:1] not in (b"#", b"")]
        steps = [
            int(line.split()[0] if line[:1] == b" " else line.split(b'"step": ')[1].split(b",")[0])
            for line in rows
        ]
        assert all(line in after for line, step in zip(rows, steps, strict=True) if step <= 500)
        for path in ("log.out", "log.jsonl"):
            read_learning_curve(self.folder / path)


class Average(CheckpointStructure):
    """A checkpoint whose averages are strange, missing or misplaced, as `dp freeze --ema` reads it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        weights = dict(Predictor(self._written(), device="cpu").model.named_parameters())
        self._content["ema"] = {
            "decay": 0.9,
            "model": {name: x.detach() for name, x in weights.items()},
        }

    def _written(self) -> Path:
        torch.save(self._content, self.folder / self.name)
        return self.folder / self.name

    def change(self, draw: random.Random) -> None:
        ema = tree_mutant({"ema": self._content["ema"]}, draw)
        torch.save({**self._content, **ema}, self.folder / self.name)

    def enter(self) -> None:
        coord = np.arange(12.0).reshape(1, 4, 3) % 5.0
        found = Predictor(self.folder / self.name, device="cpu", ema=True).predict(
            coord, None, [0, 1, 0, 1]
        )
        assert np.isfinite(found.force).all()


class Shown(Restart):
    """A damaged checkpoint of a run, with the optimizer's state, as `dp show` looks at it."""

    def change(self, draw: random.Random) -> None:
        tree = dict(self._content)
        part = draw.choice(("optimizer", "optimizer", "model", "deepmd_muon"))
        torch.save(tree | tree_mutant({part: tree[part]}, draw), self.folder / self.name)

    def enter(self) -> None:
        path, errors = self.folder / self.name, []
        shown = (
            lambda: _checkpoint_routing(path),
            lambda: weights_page(path, self.folder / "weights.png"),
            lambda: plan_page(path, 2, None, None),
            lambda: log_attributes(str(path), ATTRIBUTES[1:-1]),
        )
        for show in shown:
            try:
                with mock.patch(
                    "deepmd_muon.show.spectra.plot_spectra"
                ):  # pictures take most of the time
                    show()
            except Exception as error:  # noqa: PERF203 (one error must not hide those of the other topics)
                if not type(error).__module__.startswith("deepmd_muon"):
                    raise
                errors.append(error)
        if errors:
            raise errors[0]
