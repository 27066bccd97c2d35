"""Systems: frames of one set of atoms, read lazily from npy folders, HDF5 groups or LMDB databases."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from deepmd_muon.data.errors import SystemFormatError, TypeMapError
from deepmd_muon.data.frames import (
    ATOM_LABELS,
    FRAME_LABELS,
    LABELS,
    PARAMETERS,
    Frames,
    Parameters,
    label_shape,
)
from deepmd_muon.data.neighbors.far_atoms import MAX_LENGTH
from deepmd_muon.data.stores.storage import Store

# Atoms up to which the types of a system are remembered for others with the same words.
_FEW_ATOMS = 1000
# Type of atoms whose element the type map lacks.
_UNKNOWN = -2


class System:
    """One system: constant number of atoms, any number of frames in any number of ``set.*`` folders.

    Opening reads ``type.raw``, ``type_map.raw`` and the headers of all arrays; frames are read when asked
    for. Atoms keep the order of the files. Pickles carry no open file.

    Parameters
    ----------
    store : Store
        Where the arrays lie.
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
        The frame and atomic parameters that frames carry; none unless asked for, see `with_parameters`.

    Raises
    ------
    SystemFormatError
        When a file is missing, truncated or of a wrong shape.
    TypeMapError
        When the system has atoms of an element that `type_map` lacks. Where a store was looked at
        in part, frames are checked when they are read.
    """

    def __init__(self, store: Store, type_map: Sequence[str] | None = None) -> None:
        self._store = store
        self.name: str = store.root
        here = store.names("")
        self.pbc = "nopbc" not in here
        types = self._read_types()
        self.natoms = len(types)
        self._sets = store.sets()
        if not self._sets:
            raise SystemFormatError(
                self.name, "set.*", "no set folder found; frames lie in set.000/coord.npy etc."
            )
        contents = [store.names(folder) for folder in self._sets]
        flags = ["real_atom_types.npy" in names for names in contents]
        self.mixed = flags[0]
        if len(set(flags)) > 1:
            lacking = f"{self._sets[flags.index(False)]}/real_atom_types.npy"
            raise SystemFormatError(
                self.name, lacking, "missing, but other sets of this system have it"
            )
        self._own_types = tuple(store.words("type_map.raw")) if "type_map.raw" in here else None
        self.type_map, self._translation = self._translate(type_map)
        self._atype = self._apply_translation(types, "type.raw") if not self.mixed else None
        # File of each label and parameter in each set, None in sets that lack it; labels that no set has are left out.
        found = [_files_of(names) for names in contents]
        every = {name: [files[name] for files in found] for name in (*LABELS, *PARAMETERS)}
        self._files = {label: every[label] for label in LABELS if any(every[label])}
        self._parameter_files = {name: every[name] for name in PARAMETERS}
        self._has_spins = any("spin.npy" in names for names in contents)
        self.labels = frozenset(self._files)
        self.parameters = Parameters()
        # Of files whose first axis does not count frames; filled when their shapes are checked.
        self._rows_per_frame: dict[str, int] = {}
        counts = [self._check_set(k, names) for k, names in enumerate(contents)]
        self.nframes = sum(counts)
        if self.nframes == 0:
            raise SystemFormatError(
                self.name, f"{self._sets[0]}/coord.npy", "the system has no frames"
            )
        self._counts = np.array(counts)
        self._ends = np.cumsum(counts)
        self._first = 0  # of the frames of all sets, see `part`
        if self.mixed and not store.sampled and self._lacks_names:
            self.types(np.arange(self.nframes))

    def __repr__(self) -> str:
        labels = ", ".join(sorted(self.labels)) or "none"
        boundary = "periodic" if self.pbc else "no cell"
        return f"System({self.name!r}: {self.nframes} frames of {self.natoms} atoms, {boundary}, labels {labels})"

    def __len__(self) -> int:
        return self.nframes

    def with_types(self, type_map: Sequence[str]) -> System:
        """Return the same frames with types that index another type map; errors are those of the class."""
        found = System(self._store, type_map)
        found.parameters, found._rows_per_frame = self.parameters, self._rows_per_frame
        found._first, found.nframes = self._first, self.nframes
        return found

    def with_parameters(self, wanted: Parameters) -> System:
        """Return the same system, whose frames carry frame and atomic parameters.

        Raises
        ------
        SystemFormatError
            When a set lacks a file that `wanted` needs, or one has another number of values.
        """
        for name, width in (("fparam", wanted.fparam), ("aparam", wanted.aparam)):
            optional = wanted.partial or (name == "fparam" and wanted.default_fparam is not None)
            sets = zip(self._sets, self._parameter_files[name], self._counts.tolist(), strict=True)
            for folder, file, nframes in sets if width else ():
                if file is not None:
                    values = width if name == "fparam" else width * self.natoms
                    self._check_shape(f"{folder}/{file}", nframes, values)
                elif not optional:
                    hint = ", and fitting_net/default_fparam is not set" if name == "fparam" else ""
                    raise SystemFormatError(self.name, f"{folder}/{name}.npy", f"missing{hint}")
        found = copy.copy(self)
        found.parameters = wanted
        return found

    def problem_with(self, wanted: Parameters) -> str | None:
        """Return what `with_parameters` would raise, as text; None if the system has what is wanted."""
        try:
            self.with_parameters(wanted)
        except SystemFormatError as error:
            return str(error)
        return None

    def with_own_parameters(self) -> System:
        """Return the same system, whose frames carry all parameters that its files have; NaN in sets without."""
        widths = dict.fromkeys(PARAMETERS, 0)
        for name, files in self._parameter_files.items():
            for folder, file, nframes in zip(self._sets, files, self._counts.tolist(), strict=True):
                if file is not None and not widths[name]:
                    values = int(np.prod(self._store.shape(f"{folder}/{file}"))) // nframes
                    widths[name] = values if name == "fparam" else values // self.natoms
        return self.with_parameters(Parameters(widths["fparam"], widths["aparam"], partial=True))

    @property
    def has_other_inputs(self) -> bool:
        """Whether a set has inputs beside the structure, on which labels may depend, asked for or not.

        These are frame and atomic parameters, and spins, which no model reads.
        """
        return self._has_spins or any(any(files) for files in self._parameter_files.values())

    @property
    def uniform_labels(self) -> bool:
        """Whether every frame is known to have the same labels."""
        return not self._store.sampled and all(None not in files for files in self._files.values())

    # -- opening ---------------------------------------------------------------------------------------------

    def _read_types(self) -> np.ndarray:
        words = self._store.words("type.raw")
        if len(words) <= _FEW_ATOMS and (known := _types_of(tuple(words))) is not None:
            return known
        try:
            types = np.array([float(word) for word in words])
        except ValueError as error:
            if isinstance(error, SystemFormatError):
                raise
            raise SystemFormatError(
                self.name, "type.raw", f"expected one integer per atom: {error}"
            ) from error
        if len(types) == 0:
            raise SystemFormatError(
                self.name, "type.raw", "expected one integer per atom, found none"
            )
        return self._as_types(types, "type.raw")

    def _as_types(self, values: np.ndarray, file: str) -> np.ndarray:
        """Convert numbers that must be whole and fit into int32."""
        wrong = _no_types(values)
        if wrong.any():
            raise SystemFormatError(
                self.name, file, f"expected one integer per atom, found {values[wrong].flat[0]:g}"
            )
        return values.astype(np.int32)

    def _translate(
        self, type_map: Sequence[str] | None
    ) -> tuple[tuple[str, ...] | None, np.ndarray | None]:
        """Find how the system's type numbers become indices into `type_map`."""
        own = self._own_types
        if own is not None and len(set(own)) < len(own):
            twice = sorted({name for name in own if own.count(name) > 1})
            raise TypeMapError(
                f"system {self.name}: type_map.raw has {twice} more than once: their types are mixed up"
            )
        if type_map is None or len(type_map) == 0:
            if own is None and self.mixed:
                raise TypeMapError(
                    f"system {self.name}: a mixed-type system needs type_map.raw or a type map"
                )
            return own, None
        if own is None:
            return tuple(type_map), None
        # Data sets often share one list of names: a system may name elements that no atom has.
        index = {element: k for k, element in enumerate(type_map)}
        indices = [index.get(element, _UNKNOWN) for element in own]
        return tuple(type_map), np.array([*indices, -1], dtype=np.int32)

    @property
    def _lacks_names(self) -> bool:
        """Whether the type map lacks an element that type_map.raw names."""
        return self._translation is not None and _UNKNOWN in self._translation

    def _apply_translation(self, types: np.ndarray, file: str) -> np.ndarray:
        """Translate type numbers; −1 (padding) is kept and allowed in mixed-type systems only."""
        names = self._own_types if self._own_types is not None else self.type_map
        lowest = -1 if self.mixed else 0
        limit = len(names) if names is not None else np.iinfo(np.int32).max
        if types.size and (types.min() < lowest or types.max() >= limit):
            raise SystemFormatError(
                self.name,
                file,
                f"expected types from {lowest} to {limit - 1} (type map {names}), found {types.min()} to {types.max()}",
            )
        if self._translation is None:
            return types
        translated: np.ndarray = self._translation[types]
        if self._lacks_names and (unknown := np.unique(types[translated == _UNKNOWN])).size:
            elements = [names[kind] for kind in unknown] if names else []
            raise TypeMapError(
                f"system {self.name}: it has atoms of {elements}, which the type map "
                f"{list(self.type_map or ())} lacks; add them to it (model.type_map of an input, "
                "-t of neighbor-stat) or leave this system out"
            )
        return translated

    def _check_set(self, k: int, names: frozenset[str]) -> int:
        """Check the shapes of all arrays of set `k` and return its number of frames."""
        folder = self._sets[k]
        for required in ("coord.npy", *(("box.npy",) if self.pbc else ())):
            if required not in names:
                hint = (
                    "; a system without periodic boundaries needs a file nopbc"
                    if required == "box.npy"
                    else ""
                )
                raise SystemFormatError(self.name, f"{folder}/{required}", f"missing{hint}")
        coord = self._store.shape(f"{folder}/coord.npy")
        if not coord:
            raise SystemFormatError(
                self.name, f"{folder}/coord.npy", "expected frames of positions, found one number"
            )
        nframes = 1 if len(coord) == 1 else coord[0]
        widths = {"coord.npy": 3 * self.natoms}
        if self.pbc:
            widths["box.npy"] = 9
        if self.mixed:
            widths["real_atom_types.npy"] = self.natoms
        for label, files in self._files.items():
            if (file := files[k]) is not None:
                widths[file] = FRAME_LABELS.get(label) or ATOM_LABELS[label] * self.natoms
        for file, width in widths.items():
            self._check_shape(f"{folder}/{file}", nframes, width)
        return nframes

    def _check_shape(self, path: str, nframes: int, width: int) -> None:
        shape = self._store.shape(path)
        rows = rows_per_frame(shape, nframes, width, self.natoms)
        if rows is None:
            problem = f"expected shape ({nframes}, {width}) for {nframes} frames of {self.natoms} atoms, found {shape}"
            raise SystemFormatError(self.name, path, problem)
        if rows != 1:
            self._rows_per_frame[path] = rows

    # -- reading ---------------------------------------------------------------------------------------------

    def frames(self, indices: Sequence[int] | np.ndarray) -> Frames:
        """Read some frames, numbered over all sets, in the order asked for.

        Raises
        ------
        IndexError
            When a number is outside of the system.
        SystemFormatError
            When a value is not finite, or a type is out of range.
        """
        wanted = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        if wanted.size == 0 or wanted.min() < 0 or wanted.max() >= self.nframes:
            raise IndexError(
                f"system {self.name} has frames 0 to {self.nframes - 1}, asked for {wanted.tolist()}"
            )
        n = len(wanted)
        atoms = self.natoms
        of_sets = [k for k, _, _ in self._places(wanted)]
        labels = {
            label: self._read(files, wanted).reshape(label_shape(label, n, atoms))
            for label, files in self._files.items()
            if any(files[k] is not None for k in of_sets)
        }
        every_set = len(self._sets)
        return Frames(
            atype=self.types(wanted),
            coord=self._read(["coord.npy"] * every_set, wanted).reshape(n, atoms, 3),
            box=self._read(["box.npy"] * every_set, wanted).reshape(n, 3, 3) if self.pbc else None,
            fparam=self._parameter("fparam", wanted),
            aparam=self._parameter("aparam", wanted),
            **labels,
        )

    def _parameter(self, name: str, indices: np.ndarray) -> np.ndarray | None:
        """Frame parameters (nframes, numb_fparam) or atomic ones (nframes, natoms, numb_aparam); None if unasked for.

        NaN, or the default, where a set has none.
        """
        wanted, files = self.parameters, self._parameter_files[name]
        shape = (wanted.fparam,) if name == "fparam" else (self.natoms, wanted.aparam)
        if not shape[-1]:
            return None
        if all(files[k] is None for k, _, _ in self._places(indices)):
            values = np.full((len(indices), *shape), np.nan)
        else:
            values = self._read(files, indices).reshape(len(indices), *shape)
        if name == "fparam" and wanted.default_fparam is not None:
            return np.where(np.isnan(values), np.array(wanted.default_fparam), values)
        if not wanted.partial and np.isnan(values).any():  # a store that was looked at in part
            raise SystemFormatError(self.name, name, "missing in some frames")
        return values

    def types(self, indices: np.ndarray) -> np.ndarray:
        """Types of the atoms of some frames, int32 (nframes, natoms); −1 is padding."""
        if self._atype is not None:
            return np.repeat(self._atype[None], len(indices), axis=0)
        files = ["real_atom_types.npy"] * len(self._sets)
        raw = self._read(files, indices).reshape(len(indices), self.natoms)
        equal = len(raw) > 1 and bool((raw == raw[0]).all())  # often: then one frame stands for all
        types = self._as_types(raw[:1] if equal else raw, files[0])
        if (empty := (types == -1).all(axis=1)).any():
            frame = indices[np.flatnonzero(empty)[0]]
            problem = f"frame {frame} has no atoms: all of its types are -1, which is padding"
            raise SystemFormatError(self.name, files[0], problem)
        types = self._apply_translation(types, files[0])
        return np.repeat(types, len(raw), axis=0) if equal else types

    def _places(self, wanted: np.ndarray) -> list[tuple[int, slice | np.ndarray, np.ndarray]]:
        """Return each set that has wanted frames, their places among the wanted ones, and their rows in the set."""
        wanted = wanted + self._first
        if len(self._sets) == 1:
            return [(0, slice(None), wanted)]
        of_set = np.searchsorted(self._ends, wanted, side="right")
        rows = wanted - (self._ends - self._counts)[of_set]
        return [(k, of_set == k, rows[of_set == k]) for k in np.unique(of_set).tolist()]

    def _read(self, files: Sequence[str | None], wanted: np.ndarray) -> np.ndarray:
        """Rows of one quantity over all sets as float64, (nframes, width); NaN in sets without a file."""
        result: np.ndarray | None = None
        for k, mine, local in self._places(wanted):
            if files[k] is None:
                continue
            path = f"{self._sets[k]}/{files[k]}"
            values = np.asarray(self._rows(path, local, int(self._counts[k])), dtype=np.float64)
            values = values.reshape(len(local), -1)
            are_lengths = files[k] in ("coord.npy", "box.npy")
            largest = (
                np.abs(values).max(initial=0.0) if are_lengths else 0.0
            )  # NaN where a value is
            if not self._store.sampled and not (
                np.isfinite(largest) if are_lengths else np.isfinite(values).all()
            ):
                bad = local[~np.isfinite(values).all(axis=1)]
                raise SystemFormatError(
                    self.name, path, f"value that is not finite in frame {bad[0]} of this set"
                )
            if largest > MAX_LENGTH:
                raise SystemFormatError(
                    self.name, path, f"a length of {largest:g} Å; check the units"
                )
            if len(values) == len(wanted):
                return values
            if result is None:
                result = np.full((len(wanted), values.shape[1]), np.nan)
            result[mine] = values
        assert result is not None  # asked for frames of which one set at least has the file
        return result

    def _rows(self, path: str, frames: np.ndarray, nframes: int) -> np.ndarray:
        """Values of some of the `nframes` frames of a file, whatever its axes (see `rows_per_frame`)."""
        each = self._rows_per_frame.get(path, 1)
        if each == 1:
            return self._store.rows(path, frames, single=nframes == 1)
        if each:
            return self._store.rows(
                path, (frames[:, None] * each + np.arange(each)).ravel(), single=False
            )
        whole = self._store.rows(path, np.zeros(1, dtype=np.int64), single=True)
        return np.asarray(whole.reshape(nframes, -1)[frames])

    def part(self, first: int, end: int) -> System:
        """Return consecutive frames of the same system as a system; `labels` are those of the whole."""
        if not 0 <= first < end <= self.nframes:
            raise IndexError(
                f"system {self.name} has frames 0 to {self.nframes - 1}, asked for {first} to {end - 1}"
            )
        part = copy.copy(self)
        part._first, part.nframes = self._first + first, end - first
        return part

    def structures(self, indices: Sequence[int] | np.ndarray) -> Frames:
        """Read types, positions and cells of some frames, numbered as in `frames`, and no label."""
        wanted = np.asarray(indices, dtype=np.int64)
        n, every_set = len(wanted), len(self._sets)
        return Frames(
            atype=self.types(wanted),
            coord=self._read(["coord.npy"] * every_set, wanted).reshape(n, self.natoms, 3),
            box=self._read(["box.npy"] * every_set, wanted).reshape(n, 3, 3) if self.pbc else None,
        )

    def fingerprint(self) -> str:
        """Hash of types, shapes, energies, first and last positions and cells, wherever the files lie."""
        digest = hashlib.sha256(
            repr((self.natoms, self.nframes, self.type_map, self.pbc, self.mixed)).encode()
        )
        every = np.arange(self.nframes)
        if self._atype is not None:
            digest.update(self._atype.tobytes())
        for file in ("coord.npy", "box.npy") if self.pbc else ("coord.npy",):
            digest.update(self._read([file] * len(self._sets), every[[0, -1]]).tobytes())
        if "energy" in self.labels:
            digest.update(self._read(self._files["energy"], every).tobytes())
        for values in (self._parameter("fparam", every), self._parameter("aparam", every[[0, -1]])):
            digest.update(b"" if values is None else values.tobytes())
        return digest.hexdigest()


@functools.lru_cache(maxsize=256)
def _types_of(words: tuple[str, ...]) -> np.ndarray | None:
    """Return types as int32 `(natoms,)`, read-only; None where a word is no type. Systems often have the same words."""
    try:
        values = np.array([float(word) for word in words])
    except ValueError:
        return None
    if not words or _no_types(values).any():
        return None
    types = values.astype(np.int32)
    types.flags.writeable = False
    return types


def _no_types(values: np.ndarray) -> np.ndarray:
    """Return which numbers are not whole or do not fit into int32."""
    return np.asarray(~(np.abs(values) <= np.iinfo(np.int32).max) | (values % 1 != 0))


def rows_per_frame(shape: Sequence[int], nframes: int, width: int, natoms: int) -> int | None:
    """Find how the frames of an array follow each other, `width` values each; None where it cannot hold them.

    deepmd-kit's `dp test` takes any array of the right size. We take those whose axes tell frames from the rest: frames
    may share their axis with the atoms, the rows of a 3×3 matrix or all values of a frame, and axes of length 1 may
    precede it. Transposed arrays are not taken.

    Returns
    -------
    int or None
        Rows of the first axis that make a frame; 0 where the whole array has to be read.
    """
    if math.prod(shape) != nframes * width:
        return None
    if nframes == 1 or shape[0] == nframes:
        return 1  # a set of one frame may be written without the axis of frames
    first = next((n for n in shape if n != 1), 1)
    each, rest = divmod(first, max(nframes, 1))
    if rest or each not in (1, width, natoms, *((3,) if width == 9 else ())):
        return None
    return each if shape[0] == first else 0


@functools.lru_cache(maxsize=256)
def _files_of(names: frozenset[str]) -> dict[str, str | None]:
    """Return the file of each label and parameter in a set of files with these names, None without one.

    Systems often have the same names.
    """

    def file_of(name: str) -> str | None:
        usual = f"{name}.npy"
        return next(
            (file for file in (usual, usual.replace("atom_", "atomic_", 1)) if file in names), None
        )

    return {name: file_of(name) for name in (*LABELS, *PARAMETERS)}
