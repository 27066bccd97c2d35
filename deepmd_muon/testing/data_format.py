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

    # ----- tests ---------------------------------------------------------------------------------

    def test_a_system_is_read_back(self) -> None:
        """Periodic with a virial, and a molecule without."""
        for box in (True, False):
            expected = self.system(["O", "H", "H"], 5, 1, box=box, virial=box)
            with self.written(expected) as path:
                (actual,) = open_systems(str(path))
                self.assert_equal(actual, expected)

    def test_several_systems_are_read_back(self) -> None:
        """Systems of other compositions and numbers of atoms, in one path."""
        systems = [
            self.system(["O", "H", "H"], 4, 1, box=True, virial=True),
            self.system(["C", "O"], 3, 2, box=True, virial=True),
        ]
        with self.written(*systems) as path:
            by_natoms = {system.natoms: system for system in open_systems(str(path))}
            assert sorted(by_natoms) == [2, 3]
            for expected in systems:
                self.assert_equal(by_natoms[expected.natoms], expected)

    def test_frames_in_any_order(self) -> None:
        """One frame, several, and the same twice."""
        expected = self.system(["O", "H", "H"], 6, 3, box=True, virial=True)
        with self.written(expected) as path:
            (actual,) = open_systems(str(path))
            for rows in ([4], [5, 0, 3], [2, 2, 1]):
                self._compare(actual.frames(np.array(rows)), expected.frames(np.array(rows)))

    def test_types_follow_the_type_map(self) -> None:
        """The numbers of types are those of the type map that a model asks for."""
        system = self.system(["O", "H", "H"], 2, 4, box=True, virial=False)
        with self.written(system) as path:
            (actual,) = open_systems(str(path), type_map=["H", "C", "O"])
            assert actual.frames(np.array([0])).atype.tolist() == [[2, 0, 0]]
            self._assert_refused(lambda: open_systems(str(path), type_map=["H", "C"]))

    def test_a_pickled_system_reads_the_same(self) -> None:
        """Processes that find neighbours get pickled systems."""
        expected = self.system(["O", "H", "H"], 4, 5, box=True, virial=True)
        with self.written(expected) as path:
            (actual,) = open_systems(str(path))
            self.assert_equal(pickle.loads(pickle.dumps(actual)), expected)

    def test_damage_is_an_error(self) -> None:
        """A file that ends too early, or has gone, is a DataError and never other numbers."""
        system = self.system(["O", "H", "H"], 40, 6, box=True, virial=True)

        def read_all() -> None:
            for opened in open_systems(str(path)):
                opened.frames(np.arange(opened.nframes))

        with self.written(system) as path:
            self.damage(path)
            self._assert_refused(read_all)
        self._assert_refused(read_all, SystemNotFoundError)

    # ----- what the tests share ------------------------------------------------------------------

    @staticmethod
    def system(
        elements: Sequence[str], nframes: int, seed: int, *, box: bool, virial: bool
    ) -> System:
        """Return a system of random frames with energies and forces."""
        random = np.random.default_rng(seed)
        natoms = len(elements)
        arrays = {
            "coord": random.uniform(0, 9, (nframes, 3 * natoms)),
            "energy": random.normal(-50.0, 1.0, (nframes, 1)),
            "force": random.normal(size=(nframes, 3 * natoms)),
        }
        if box:
            cells = 9 * np.eye(3) + random.uniform(0, 0.5, (nframes, 3, 3))
            arrays["box"] = cells.reshape(nframes, 9)
        if virial:
            square = random.normal(size=(nframes, 3, 3))
            arrays["virial"] = (square + square.swapaxes(1, 2)).reshape(nframes, 9)
        return System(MemoryStore(f"system {seed}", elements, [arrays], pbc=box))

    @contextmanager
    def written(self, *systems: System) -> Iterator[Path]:
        """Write systems into an empty folder."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"data{self.ending}"
            self.write(systems, path)
            yield path

    def assert_equal(self, actual: System, expected: System) -> None:
        """Compare all frames of two systems; types are compared by their elements."""
        assert actual.nframes == expected.nframes
        assert actual.natoms == expected.natoms
        assert actual.pbc == expected.pbc
        actual_frames = actual.frames(np.arange(actual.nframes))
        expected_frames = expected.frames(np.arange(expected.nframes))
        assert _elements(actual, actual_frames) == _elements(expected, expected_frames)
        self._compare(actual_frames, expected_frames)

    def _compare(self, actual: Frames, expected: Frames) -> None:
        """Compare all quantities of frames."""
        for name in QUANTITIES:
            actual_array = getattr(actual, name)
            expected_array = getattr(expected, name)
            assert (actual_array is None) == (expected_array is None), name
            if expected_array is not None:
                largest = float(np.abs(expected_array).max())
                np.testing.assert_allclose(
                    actual_array,
                    expected_array,
                    rtol=0,
                    atol=self.tolerance * largest,
                    err_msg=name,
                )

    @staticmethod
    def _assert_refused(read: Callable[[], object], kind: type[DataError] = DataError) -> None:
        # Not `pytest.raises`: users of the package need not have pytest.
        message = None
        try:
            read()
        except kind as error:
            message = str(error)
        assert message is not None, f"no {kind.__name__} was raised"
        assert message, "the error has no text"


def _elements(system: System, frames: Frames) -> list[list[str]]:
    assert system.type_map is not None
    return [[system.type_map[kind] for kind in row] for row in frames.atype]
