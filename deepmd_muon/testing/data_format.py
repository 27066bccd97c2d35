"""Conformance tests of a data format: what was written is read back, and damage is an error."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np

from deepmd_muon.data import (
    DataError,
    Frames,
    MemoryStore,
    System,
    SystemNotFoundError,
    open_systems,
)

QUANTITIES = ("coord", "box", "energy", "force", "virial")


class DataFormatChecks:
    """Tests that every data format has to pass; pytest collects them from a derived class.

    Attributes
    ----------
    ending
        Of a file or folder of the format, with its dot; "" for a folder without one.
    tolerance
        Largest relative error of a number that was written and read; 0 for a binary format.
    """

    ending: ClassVar[str] = ""
    tolerance: ClassVar[float] = 0.0

    def write(self, systems: Sequence[System], path: Path) -> None:
        """Write systems to a new path; the derived class implements it."""
        raise NotImplementedError(f"{type(self).__name__} needs a method write(systems, path)")

    def damage(self, path: Path) -> None:
        """Cut the largest file at two thirds of its length."""
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        largest = max(files, key=lambda file: file.stat().st_size)
        content = largest.read_bytes()
        largest.write_bytes(content[: 2 * len(content) // 3])

    @staticmethod
    def system(
        elements: Sequence[str], nframes: int, seed: int, *, box: bool, virial: bool
    ) -> System:
        """Return a system of random frames with energies and forces."""
        random, natoms = np.random.default_rng(seed), len(elements)
        arrays = {
            "coord": random.uniform(0, 9, (nframes, 3 * natoms)),
            "energy": random.normal(-50.0, 1.0, (nframes, 1)),
            "force": random.normal(size=(nframes, 3 * natoms)),
        }
        if box:
            arrays["box"] = (9 * np.eye(3) + random.uniform(0, 0.5, (nframes, 3, 3))).reshape(
                nframes, 9
            )
        if virial:
            symmetric = random.normal(size=(nframes, 3, 3))
            arrays["virial"] = (symmetric + symmetric.swapaxes(1, 2)).reshape(nframes, 9)
        return System(MemoryStore(f"system {seed}", elements, [arrays], pbc=box))

    @contextmanager
    def written(self, *systems: System) -> Iterator[Path]:
        """Write systems into an empty folder."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"data{self.ending}"
            self.write(systems, path)
            yield path

    def assert_equal(self, found: System, wanted: System) -> None:
        """Compare all frames of two systems; types are compared by their elements."""
        assert (found.nframes, found.natoms, found.pbc) == (
            wanted.nframes,
            wanted.natoms,
            wanted.pbc,
        )
        one, other = (system.frames(np.arange(system.nframes)) for system in (found, wanted))
        assert self._elements(found, one) == self._elements(wanted, other)
        for name in QUANTITIES:
            self._compare(name, getattr(one, name), getattr(other, name))

    @staticmethod
    def _elements(system: System, frames: Frames) -> list[list[str]]:
        assert system.type_map is not None
        return [[system.type_map[kind] for kind in row] for row in frames.atype]

    def _compare(self, name: str, found: np.ndarray | None, wanted: np.ndarray | None) -> None:
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            largest = float(np.abs(wanted).max())
            np.testing.assert_allclose(
                found, wanted, rtol=0, atol=self.tolerance * largest, err_msg=name
            )

    def test_a_system_is_read_back(self) -> None:
        """Periodic with a virial, and a molecule without."""
        for box in (True, False):
            wanted = self.system(["O", "H", "H"], 5, 1, box=box, virial=box)
            with self.written(wanted) as path:
                (found,) = open_systems(str(path))
                self.assert_equal(found, wanted)

    def test_several_systems_are_read_back(self) -> None:
        """Systems of other compositions and numbers of atoms, in one path."""
        systems = [
            self.system(["O", "H", "H"], 4, 1, box=True, virial=True),
            self.system(["C", "O"], 3, 2, box=True, virial=True),
        ]
        with self.written(*systems) as path:
            found = {system.natoms: system for system in open_systems(str(path))}
            assert sorted(found) == [2, 3]
            for wanted in systems:
                self.assert_equal(found[wanted.natoms], wanted)

    def test_frames_in_any_order(self) -> None:
        """One frame, several, and the same twice."""
        wanted = self.system(["O", "H", "H"], 6, 3, box=True, virial=True)
        with self.written(wanted) as path:
            (found,) = open_systems(str(path))
            for rows in ([4], [5, 0, 3], [2, 2, 1]):
                one, other = found.frames(np.array(rows)), wanted.frames(np.array(rows))
                for name in QUANTITIES:
                    self._compare(name, getattr(one, name), getattr(other, name))

    def test_types_follow_the_type_map(self) -> None:
        """The numbers of types are those of the type map that a model asks for."""
        wanted = self.system(["O", "H", "H"], 2, 4, box=True, virial=False)
        with self.written(wanted) as path:
            (found,) = open_systems(str(path), type_map=["H", "C", "O"])
            assert found.frames(np.array([0])).atype.tolist() == [[2, 0, 0]]
            self._refuses(lambda: open_systems(str(path), type_map=["H", "C"]))

    def test_a_pickled_system_reads_the_same(self) -> None:
        """Processes that find neighbours get pickled systems."""
        wanted = self.system(["O", "H", "H"], 4, 5, box=True, virial=True)
        with self.written(wanted) as path:
            (found,) = open_systems(str(path))
            self.assert_equal(pickle.loads(pickle.dumps(found)), wanted)

    def test_damage_is_an_error(self) -> None:
        """A file that ends too early, or has gone, is a DataError and never other numbers."""
        wanted = self.system(["O", "H", "H"], 40, 6, box=True, virial=True)
        with self.written(wanted) as path:
            self.damage(path)
            self._refuses(lambda: [s.frames(np.arange(s.nframes)) for s in open_systems(str(path))])
        self._refuses(lambda: open_systems(str(path)), SystemNotFoundError)

    @staticmethod
    def _refuses(read: Callable[[], object], kind: type[DataError] = DataError) -> None:
        message = None
        try:
            read()
        except kind as error:
            message = str(error)
        assert message is not None, f"no {kind.__name__} was raised"
        assert message, "the error has no text"
