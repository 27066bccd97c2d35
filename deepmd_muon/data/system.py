"""Systems: frames of one set of atoms, read when they are asked for."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from deepmd_muon.data.errors import SystemFormatError, TypeMapError
from deepmd_muon.data.frames import (
    ATOM_PARAMETERS,
    FRAME_LABELS,
    LABELS,
    MAX_LENGTH,
    PARAMETERS,
    Frames,
    Parameters,
    charge_spin_problem,
    label_shape,
    longest_vector,
)
from deepmd_muon.data.stores.memory import CONFIG_TYPES, NO_CONFIG_TYPE, FrameOrigin
from deepmd_muon.data.stores.storage import Store

_PADDING = -1  # type of the atoms that fill up frames of a mixed-type system
_UNKNOWN = -2  # type of atoms of an element that the type map lacks
# Types of systems with more atoms are not remembered for others with the same words.
_MAX_ATOMS_REMEMBERED = 1000
_CHUNK_ATOMS = 1 << 18  # read at once to look at all forces

# The settings that hold the parameters of frames without a file.
_DEFAULTS = {
    "fparam": "fitting_net/default_fparam",
    "charge_spin": "descriptor/default_chg_spin",
}

# A file of one name in each set, None in sets without it.
_Files = Sequence[str | None]


class System:
    """Frames with the same number of atoms, in one or more ``set.*`` folders.

    Opening reads ``type.raw``, ``type_map.raw`` and the headers of all arrays; frames are read when
    asked for. Atoms keep the order of the files. Pickles carry no open file.

    Parameters
    ----------
    store : Store
        The storage of the arrays.
    type_map : sequence of str, optional
        Element names that types shall index; the system's own names are translated into it.

    Attributes
    ----------
    name : str
        Path of the system as it was found.
    type_map : tuple of str or None
        Element names of the types; None when neither the caller nor the system gives them.
    natoms, nframes : int
        Atoms of a frame (padding of mixed-type frames included) and frames of all sets.
    pbc : bool
        False when the flag file ``nopbc`` is there.
    mixed : bool
        True when each frame has its own types (``real_atom_types.npy``).
    labels : frozenset of str
        Labels that at least one set has; frames of the other sets hold NaN there.
    parameters : Parameters
        The frame and atomic parameters that frames carry; none unless asked for, see
        `with_parameters`.

    Raises
    ------
    SystemFormatError
        When a file is missing, truncated or of a wrong shape.
    TypeMapError
        When the system has atoms of an element that `type_map` lacks. Frames of a sampled store are
        checked when they are read.
    """

    def __init__(self, store: Store, type_map: Sequence[str] | None = None) -> None:
        self._store = store
        self.name: str = store.root
        files = store.names("")
        self.pbc = "nopbc" not in files
        types = self._read_types()
        self.natoms = len(types)

        self._sets = store.sets()
        if not self._sets:
            raise SystemFormatError(
                self.name, "set.*", "no set folder found; frames lie in set.000/coord.npy etc."
            )
        files_of_sets = [store.names(folder) for folder in self._sets]
        self.mixed = self._are_mixed(files_of_sets)

        self._names = tuple(store.words("type_map.raw")) if "type_map.raw" in files else None
        self._check_names()
        self.type_map = tuple(type_map) if type_map else self._names
        if self.mixed and self.type_map is None:
            raise TypeMapError(
                f"system {self.name}: a mixed-type system needs type_map.raw or a type map"
            )
        self._translation = self._translation_into(type_map) if type_map else None
        self._atype = None if self.mixed else self._translate(types, "type.raw")

        named_files = [_named_files(names) for names in files_of_sets]
        self._files: dict[str, _Files] = {
            name: [by_name[name] for by_name in named_files] for name in (*LABELS, *PARAMETERS)
        }
        self.labels = frozenset(label for label in LABELS if any(self._files[label]))
        self.parameters = Parameters()
        # Of files whose first axis does not count frames; filled when their shapes are checked.
        self._rows_per_frame: dict[str, int] = {}
        counts = [self._check_set(k, names) for k, names in enumerate(files_of_sets)]
        self.nframes = sum(counts)
        if self.nframes == 0:
            raise SystemFormatError(
                self.name, f"{self._sets[0]}/coord.npy", "the system has no frames"
            )
        self._counts = np.array(counts)  # (sets,) frames of each set
        self._ends = np.cumsum(counts)
        self._first_frame = 0  # among the frames of all sets, see `part`
        self._selected: np.ndarray | None = None  # their numbers in all sets, see `select`
        if self.mixed and self._lacks_elements and not store.sampled:
            self.types(np.arange(self.nframes))  # raises if an atom is of such an element

    def __repr__(self) -> str:
        labels = ", ".join(sorted(self.labels)) or "none"
        boundary = "periodic" if self.pbc else "no cell"
        return (
            f"System({self.name!r}: {self.nframes} frames of {self.natoms} atoms, {boundary}, "
            f"labels {labels})"
        )

    def __len__(self) -> int:
        return self.nframes

    # ----- views of the same frames --------------------------------------------------------------

    def with_types(self, type_map: Sequence[str]) -> System:
        """Return the same frames with types that index another type map."""
        system = System(self._store, type_map)
        system.parameters = self.parameters
        system._rows_per_frame = self._rows_per_frame
        system._first_frame = self._first_frame
        system._selected = self._selected
        system.nframes = self.nframes
        return system

    def with_parameters(self, parameters: Parameters) -> System:
        """Return the same system, whose frames carry frame and atomic parameters.

        Raises
        ------
        SystemFormatError
            When a set lacks a file that `parameters` needs, or one has another number of values.
        """
        for name, setting in _DEFAULTS.items():
            if width := getattr(parameters, name):
                has_default = parameters.default(name) is not None
                self._check_parameter(
                    name,
                    width=width,
                    optional=parameters.partial or has_default,
                    hint=f", and {setting} is not set",
                )
        for name in ATOM_PARAMETERS:
            if width := getattr(parameters, name):
                self._check_parameter(
                    name,
                    width=width * self.natoms,
                    optional=parameters.partial or parameters.default(name) is not None,
                )
        system = copy.copy(self)
        system.parameters = parameters
        return system

    def _check_parameter(self, name: str, width: int, *, optional: bool, hint: str = "") -> None:
        for folder, file, nframes in self._places_of(name):
            if file is not None:
                self._check_shape(f"{folder}/{file}", nframes, width)
            elif not optional:
                raise SystemFormatError(self.name, f"{folder}/{name}.npy", f"missing{hint}")

    def problem_with(self, parameters: Parameters) -> str | None:
        """Return what `with_parameters` would raise, as text; None if it would succeed."""
        try:
            self.with_parameters(parameters)
        except SystemFormatError as error:
            return str(error)
        return None

    def with_all_parameters(self) -> System:
        """Return the same system, whose frames carry all parameters that its files have.

        They are NaN in sets without.
        """
        widths = dict.fromkeys(PARAMETERS, 0)  # of a frame
        for name in PARAMETERS:
            for folder, file, nframes in self._places_of(name):
                if file is not None and widths[name] == 0 and nframes > 0:
                    widths[name] = math.prod(self._store.shape(f"{folder}/{file}")) // nframes
        return self.with_parameters(
            Parameters(
                fparam=widths["fparam"],
                aparam=widths["aparam"] // self.natoms,
                charge_spin=widths["charge_spin"],
                # A file of one number a frame is a frame parameter of this name.
                spin=3 if widths["spin"] == 3 * self.natoms else 0,
                partial=True,
            )
        )

    def part(self, first: int, end: int) -> System:
        """Return consecutive frames of the system as a system; `labels` are those of the whole."""
        if not 0 <= first < end <= self.nframes:
            raise IndexError(
                f"system {self.name} has frames 0 to {self.nframes - 1}, "
                f"asked for {first} to {end - 1}"
            )
        system = copy.copy(self)
        system._first_frame = self._first_frame + first
        system.nframes = end - first
        return system

    def select(self, numbers: np.ndarray) -> System:
        """Return some frames of the system as a system; `labels` are those of the whole."""
        system = copy.copy(self)
        system._selected = self._numbers_in_sets(numbers)
        system._first_frame = 0
        system.nframes = len(numbers)
        return system

    def largest_forces(self) -> np.ndarray:
        """Return the largest force on an atom of each frame (nframes,) [eV/Å]; 0 without forces."""
        largest = np.zeros(self.nframes)
        for numbers in self.chunks(_CHUNK_ATOMS):
            force = self.read_label("force", numbers)
            if force is not None:
                squares = np.nan_to_num(np.square(force).sum(axis=2))
                largest[numbers] = np.sqrt(squares.max(axis=1))
        return largest

    def longest_spin(self) -> float:
        """Return the length of the longest spin of an atom; 0 without spins."""
        longest = 0.0
        for numbers in self.chunks(_CHUNK_ATOMS):
            spins = self.read_parameter("spin", numbers)
            if spins is not None:
                longest = max(longest, longest_vector(spins))
        return longest

    @property
    def has_other_inputs(self) -> bool:
        """Whether a set has inputs besides the structure, on which labels may depend.

        These are frame and atomic parameters, asked for or not.
        """
        return any(any(self._files[name]) for name in PARAMETERS)

    @property
    def uniform_labels(self) -> bool:
        """Whether every frame is known to have the same labels."""
        return not self._store.sampled and all(
            None not in self._files[name] for name in self.labels
        )

    # ----- opening -------------------------------------------------------------------------------

    def _read_types(self) -> np.ndarray:
        words = tuple(self._store.words("type.raw"))
        is_small = len(words) <= _MAX_ATOMS_REMEMBERED
        parse = _parse_types if is_small else _parse_types.__wrapped__
        try:
            return parse(words)
        except ValueError as error:
            raise SystemFormatError(
                self.name, "type.raw", f"expected one integer per atom: {error}"
            ) from error

    def _are_mixed(self, files_of_sets: Sequence[frozenset[str]]) -> bool:
        """Return whether frames have their own types; all sets must agree."""
        flags = ["real_atom_types.npy" in names for names in files_of_sets]
        if any(flags) and not all(flags):
            folder = self._sets[flags.index(False)]
            raise SystemFormatError(
                self.name,
                f"{folder}/real_atom_types.npy",
                "missing, but other sets of this system have it",
            )
        return flags[0]

    def _check_names(self) -> None:
        names = self._names or ()
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise TypeMapError(
                f"system {self.name}: type_map.raw has {repeated} more than once: their types are "
                "mixed up"
            )

    def _translation_into(self, type_map: Sequence[str]) -> np.ndarray | None:
        """Return the index in `type_map` of each type of the files; None if these have no names."""
        if self._names is None:
            return None
        # Data sets often share one list of names: a system may name elements that no atom has.
        index = {element: k for k, element in enumerate(type_map)}
        indices = [index.get(element, _UNKNOWN) for element in self._names]
        return np.array([*indices, _PADDING], dtype=np.int32)  # index −1 is the last entry

    @property
    def _lacks_elements(self) -> bool:
        """Whether the type map lacks an element that type_map.raw names."""
        return self._translation is not None and _UNKNOWN in self._translation

    def _translate(self, types: np.ndarray, file: str) -> np.ndarray:
        """Translate types of a file; padding (−1) stays, and only mixed-type systems have it."""
        names = self._names if self._names is not None else self.type_map
        lowest = _PADDING if self.mixed else 0
        limit = len(names) if names is not None else np.iinfo(np.int32).max
        if types.size and (types.min() < lowest or types.max() >= limit):
            raise SystemFormatError(
                self.name,
                file,
                f"expected types from {lowest} to {limit - 1} (type map {names}), "
                f"found {types.min()} to {types.max()}",
            )
        if self._translation is None:
            return types
        translated: np.ndarray = self._translation[types]
        if self._lacks_elements:
            unknown = np.unique(types[translated == _UNKNOWN])
            if unknown.size:
                elements = [names[kind] for kind in unknown] if names else []
                raise TypeMapError(
                    f"system {self.name}: it has atoms of {elements}, which the type map "
                    f"{list(self.type_map or ())} lacks; add them to it (model.type_map of an "
                    "input, -t of neighbor-stat) or leave this system out"
                )
        return translated

    def _check_set(self, k: int, names: frozenset[str]) -> int:
        """Check the shapes of all arrays of set `k` and return its number of frames."""
        folder = self._sets[k]
        if "coord.npy" not in names:
            raise SystemFormatError(self.name, f"{folder}/coord.npy", "missing")
        if self.pbc and "box.npy" not in names:
            raise SystemFormatError(
                self.name,
                f"{folder}/box.npy",
                "missing; a system without periodic boundaries needs a file nopbc",
            )
        shape = self._store.shape(f"{folder}/coord.npy")
        if not shape:
            raise SystemFormatError(
                self.name, f"{folder}/coord.npy", "expected frames of positions, found one number"
            )
        nframes = 1 if len(shape) == 1 else shape[0]

        widths = {"coord.npy": 3 * self.natoms}  # values of a frame
        if self.pbc:
            widths["box.npy"] = 9
        if self.mixed:
            widths["real_atom_types.npy"] = self.natoms
        for label in LABELS:
            file = self._files[label][k]
            if file is not None:
                is_of_frame = label in FRAME_LABELS
                widths[file] = LABELS[label] if is_of_frame else LABELS[label] * self.natoms
        for file, width in widths.items():
            self._check_shape(f"{folder}/{file}", nframes, width)
        return nframes

    def _check_shape(self, path: str, nframes: int, width: int) -> None:
        shape = self._store.shape(path)
        rows = rows_per_frame(shape, nframes, width, self.natoms)
        if rows is None:
            raise SystemFormatError(
                self.name,
                path,
                f"expected shape ({nframes}, {width}) for {nframes} frames of {self.natoms} atoms, "
                f"found {shape}",
            )
        if rows != 1:
            self._rows_per_frame[path] = rows

    def _places_of(self, name: str) -> Iterator[tuple[str, str | None, int]]:
        """Yield each set's folder, its file of a label or parameter, and its number of frames."""
        yield from zip(self._sets, self._files[name], self._counts.tolist(), strict=True)

    # ----- reading -------------------------------------------------------------------------------

    def frames(self, indices: Sequence[int] | np.ndarray) -> Frames:
        """Read some frames, numbered over all sets, in the order asked for.

        Raises
        ------
        IndexError
            When a number is outside of the system.
        SystemFormatError
            When a value is not finite, or a type is out of range.
        """
        numbers = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        if numbers.size == 0 or numbers.min() < 0 or numbers.max() >= self.nframes:
            raise IndexError(
                f"system {self.name} has frames 0 to {self.nframes - 1}, "
                f"asked for {numbers.tolist()}"
            )
        arrays: dict[str, Any] = {
            label: self.read_label(label, numbers) for label in LABELS if label in self.labels
        }
        arrays |= self._structures(numbers)
        for name in PARAMETERS:
            arrays[name] = self.read_parameter(name, numbers)
        return Frames(**arrays)

    def chunks(self, max_atoms: int, numbers: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield the numbers of all frames, or of some, in their order, few enough to read at once.

        A chunk has at most so many atoms, but at least one frame.
        """
        if numbers is None:
            numbers = np.arange(self.nframes)
        step = max(1, max_atoms // self.natoms)
        for start in range(0, len(numbers), step):
            yield numbers[start : start + step]

    def origin(self, number: int) -> FrameOrigin:
        """Return the file of a frame, its number there and its kind; else name the system."""
        number = int(self._numbers_in_sets(np.array([number]))[0])
        origins: Sequence[FrameOrigin] = getattr(self._store, "origins", ())
        if origins:
            return origins[number]
        config_types = self._written_config_types
        return FrameOrigin(self.name, number, config_types[number] if config_types else "")

    @functools.cached_property
    def _written_config_types(self) -> list[str]:
        """The kinds of the frames of all sets, empty if no file holds them."""
        if CONFIG_TYPES not in self._store.names(""):
            return []
        words = self._store.words(CONFIG_TYPES)
        if len(words) != self._ends[-1]:
            raise SystemFormatError(
                self.name,
                CONFIG_TYPES,
                f"expected one word per frame, {self._ends[-1]}, found {len(words)}",
            )
        return ["" if word == NO_CONFIG_TYPE else unquote(word) for word in words]

    def config_types(self) -> set[str]:
        """Return the kinds of frames that the headers of its file name."""
        origins = getattr(self._store, "origins", ())
        return {origin.config_type for origin in origins if origin.config_type}

    def structures(self, indices: Sequence[int] | np.ndarray) -> Frames:
        """Read types, positions and cells of some frames, numbered as in `frames`, and no label."""
        return Frames(**self._structures(np.asarray(indices, dtype=np.int64)))

    def _structures(self, numbers: np.ndarray) -> dict[str, Any]:
        nframes = len(numbers)
        structures: dict[str, Any] = {
            "atype": self.types(numbers),
            "coord": self._read_from_all("coord.npy", numbers).reshape(nframes, self.natoms, 3),
        }
        if self.pbc:
            structures["box"] = self._read_from_all("box.npy", numbers).reshape(nframes, 3, 3)
        return structures

    def types(self, indices: np.ndarray) -> np.ndarray:
        """Types of the atoms of some frames, int32 (nframes, natoms); −1 is padding."""
        if self._atype is not None:
            return np.repeat(self._atype[None], len(indices), axis=0)
        file = "real_atom_types.npy"
        numbers = self._read_from_all(file, indices).reshape(len(indices), self.natoms)
        nframes = len(numbers)
        # Often all frames have the same types: then one frame is translated.
        all_equal = nframes > 1 and bool((numbers == numbers[0]).all())
        try:
            types = _as_types(numbers[:1] if all_equal else numbers)
        except ValueError as error:
            raise SystemFormatError(
                self.name, file, f"expected one integer per atom: {error}"
            ) from error
        empty = (types == _PADDING).all(axis=1)
        if empty.any():
            raise SystemFormatError(
                self.name,
                file,
                f"frame {indices[empty.argmax()]} has no atoms: all of its types are -1, "
                "which is padding",
            )
        types = self._translate(types, file)
        return np.repeat(types, nframes, axis=0) if all_equal else types

    def read_label(self, label: str, indices: np.ndarray) -> np.ndarray | None:
        """Read one label of some frames as `Frames` has it; None if their sets lack it."""
        values = self._read(self._files[label], indices)
        if values is None:
            return None
        return values.reshape(label_shape(label, len(indices), self.natoms))

    def read_parameter(self, name: str, indices: np.ndarray) -> np.ndarray | None:
        """Read a parameter of frames (nframes, values) or of atoms (nframes, natoms, values).

        Return None unless `parameters` asks for it. Values of sets without the file are NaN, or the
        default.
        """
        parameters = self.parameters
        shape: tuple[int, ...] = (len(indices), getattr(parameters, name))
        if name in ATOM_PARAMETERS:
            shape = (len(indices), self.natoms, getattr(parameters, name))
        if shape[-1] == 0:
            return None
        file_values = self._read(self._files[name], indices)
        values = np.full(shape, np.nan) if file_values is None else file_values.reshape(shape)
        if name == "charge_spin" and not parameters.partial:
            problem = charge_spin_problem(values)
            if problem is not None:
                raise SystemFormatError(self.name, name, problem)
        default = parameters.default(name)
        if default is not None:
            return np.where(np.isnan(values), np.array(default), values)
        if not parameters.partial and np.isnan(values).any():  # only of a sampled store
            raise SystemFormatError(self.name, name, "missing in some frames")
        return values

    def _read_from_all(self, file: str, numbers: np.ndarray) -> np.ndarray:
        """Read a file that every set has, as `_read` does."""
        values = self._read([file] * len(self._sets), numbers)
        assert values is not None
        return values

    def _read(self, files: _Files, numbers: np.ndarray) -> np.ndarray | None:
        """Read one quantity of some frames as float64 (nframes, width).

        Frames of sets without a file are NaN. Return None if no frame is in a set with a file.
        """
        result: np.ndarray | None = None
        for request in self._split(numbers):
            file = files[request.set]
            if file is None:
                continue
            values = self._read_from_set(request.set, file, request.rows)
            if len(values) == len(numbers):
                return values
            if result is None:
                result = np.full((len(numbers), values.shape[1]), np.nan)
            result[request.places] = values
        return result

    def _split(self, numbers: np.ndarray) -> list[_SetRequest]:
        """Divide frames into those of each set."""
        numbers = self._numbers_in_sets(numbers)
        if len(self._sets) == 1:
            return [_SetRequest(0, slice(None), numbers)]
        sets = np.searchsorted(self._ends, numbers, side="right")  # of each frame
        rows = numbers - (self._ends - self._counts)[sets]
        return [_SetRequest(k, sets == k, rows[sets == k]) for k in np.unique(sets).tolist()]

    def _numbers_in_sets(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of frames among those of all sets."""
        numbers = numbers + self._first_frame
        return numbers if self._selected is None else self._selected[numbers]

    def _read_from_set(self, k: int, file: str, rows: np.ndarray) -> np.ndarray:
        """Read rows of a file of set `k` as float64 (nframes, width); refuse impossible values."""
        path = f"{self._sets[k]}/{file}"
        values = np.asarray(self._rows(path, rows, int(self._counts[k])), dtype=np.float64)
        values = values.reshape(len(rows), -1)
        are_lengths = file in ("coord.npy", "box.npy")
        longest = np.abs(values).max(initial=0.0) if are_lengths else 0.0  # NaN if a value is
        if file == "weight.npy" and (values < 0.0).any():
            raise SystemFormatError(self.name, path, "a weight in the loss is less than 0")
        # A sampled store refuses such values itself, and has NaN for missing labels.
        if not self._store.sampled:
            all_finite = np.isfinite(longest) if are_lengths else np.isfinite(values).all()
            if not all_finite:
                bad_rows = rows[~np.isfinite(values).all(axis=1)]
                raise SystemFormatError(
                    self.name, path, f"value that is not finite in frame {bad_rows[0]} of this set"
                )
        if longest > MAX_LENGTH:
            raise SystemFormatError(self.name, path, f"a length of {longest:g} Å; check the units")
        return values

    def _rows(self, path: str, frames: np.ndarray, nframes: int) -> np.ndarray:
        """Return the values of some of the `nframes` frames of a file; see `rows_per_frame`."""
        n_rows = self._rows_per_frame.get(path, 1)
        if n_rows == 1:
            return self._store.rows(path, frames, single=nframes == 1)
        if n_rows > 1:
            rows = frames[:, None] * n_rows + np.arange(n_rows)
            return self._store.rows(path, rows.ravel(), single=False)
        file_values = self._store.rows(path, np.zeros(1, dtype=np.int64), single=True)
        return np.asarray(file_values.reshape(nframes, -1)[frames])


def longest_spin(systems: Sequence[System]) -> float:
    """Return the length of the longest spin of an atom in systems; 0 without spins."""
    return max((system.longest_spin() for system in systems), default=0.0)


class _SetRequest(NamedTuple):
    """The frames of a request that are in one set."""

    set: int  # number of the set
    places: slice | np.ndarray  # of the frames in the request
    rows: np.ndarray  # of the frames in the set


@functools.lru_cache(maxsize=256)
def _parse_types(words: tuple[str, ...]) -> np.ndarray:
    """Return types as int32 (natoms,), read-only; raise ValueError if a word is no type.

    Systems often have the same words.
    """
    if not words:
        raise ValueError("found none")
    types = _as_types(np.array([float(word) for word in words]))
    types.flags.writeable = False
    return types


def _as_types(numbers: np.ndarray) -> np.ndarray:
    """Convert to int32; raise ValueError if a number is not whole or does not fit."""
    fit = np.abs(numbers) <= np.iinfo(np.int32).max  # False for NaN
    wrong = ~fit | (numbers % 1 != 0)
    if wrong.any():
        raise ValueError(f"found {numbers[wrong].flat[0]:g}")
    return numbers.astype(np.int32)


def rows_per_frame(shape: Sequence[int], nframes: int, width: int, natoms: int) -> int | None:
    """Find how the frames of an array follow each other, `width` values each.

    deepmd-kit's `dp test` takes any array of the right size. We take arrays whose axes tell frames
    from the rest: frames may share their axis with the atoms, the rows of a 3×3 matrix or all
    values of a frame, and axes of length 1 may precede it. Transposed arrays are not taken.

    Returns
    -------
    int or None
        Rows of the first axis that make a frame; 0 if the whole array has to be read; None if it
        cannot hold the frames.
    """
    if math.prod(shape) != nframes * width:
        return None
    if nframes == 1 or shape[0] == nframes:
        return 1  # a set of one frame may be written without the axis of frames
    axis_length = next((length for length in shape if length != 1), 1)
    rows, remainder = divmod(axis_length, max(nframes, 1))
    possible_rows = [1, width, natoms]
    if width == 9:
        possible_rows.append(3)
    if remainder or rows not in possible_rows:
        return None
    return rows if shape[0] == axis_length else 0


@functools.lru_cache(maxsize=256)
def _named_files(names: frozenset[str]) -> dict[str, str | None]:
    """Return the file of each label and parameter among the files of a set, None without one.

    Systems often have the same names.
    """
    files: dict[str, str | None] = {}
    for name in (*LABELS, *PARAMETERS):
        spellings = f"{name}.npy", f"{name}.npy".replace("atom_", "atomic_", 1)
        files[name] = next((file for file in spellings if file in names), None)
    return files
