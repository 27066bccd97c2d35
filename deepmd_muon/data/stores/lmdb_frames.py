"""Frames of an LMDB database: a msgpack map of arrays each, decoded one by one or many of one layout together."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS, PARAMETERS

_NAMES = {
    "coords": "coord",
    "cells": "box",
    "energies": "energy",
    "forces": "force",
    "virials": "virial",
}
_NAMES["atom_types"] = "atype"
# msgpack's first bytes of numbers, and their dtypes.
_FLOATS: dict[int, np.dtype] = {0xCA: np.dtype(">f4"), 0xCB: np.dtype(">f8")}
# Layouts of frames of one length, and lengths, that stay in memory.
_KEPT_LAYOUTS, _KEPT_LENGTHS = 4, 4096
# Finding a layout takes as long as decoding a frame: at most so many are found, plus one for so many frames that
# fitted a known layout.
_FREE_LAYOUTS, _FITS_PER_LAYOUT = 64, 8


def width_of(name: str, natoms: int) -> int:
    """Values of a quantity in a frame."""
    if name in FRAME_LABELS:
        return FRAME_LABELS[name]
    if name in ATOM_LABELS:
        return ATOM_LABELS[name] * natoms
    return {"coord": 3 * natoms, "box": 9}.get(name, natoms)


@functools.lru_cache(maxsize=256)
def _canonical(name: str) -> str | None:
    """Return a field's name as npy files have it, "find_…" for a flag, and None for unread fields."""
    name = _NAMES.get(name, re.sub(r"^(find_)?atomic_", r"\1atom_", name))
    known = ("atype", "coord", "box", *FRAME_LABELS, *ATOM_LABELS, *PARAMETERS)
    return name if name in known or name.startswith("find_") else None


def is_count(value: object) -> bool:
    """Return whether a value of a msgpack map is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@functools.lru_cache(maxsize=64)
def _dtype(kind: str) -> np.dtype:
    """Return the dtype of real numbers; ValueError for any other one."""
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "fiub" or dtype.names is not None:
        raise ValueError(f"expected real numbers, found values of dtype {kind[:40]}")
    return dtype


def decode_frame(system: str, where: str, raw: bytes | memoryview) -> dict[str, np.ndarray]:
    """Decode a frame.

    Returns
    -------
    dict
        Flat arrays: "atype" (int64), "coord", "box" where there is a cell, and labels, under the names of npy files.

    Raises
    ------
    SystemFormatError
        When an array is damaged, of another kind or size, or types or positions are missing.
    """
    frame: dict[str, np.ndarray] = {}
    absent: set[str] = set()
    field = ""
    try:
        for field, value in unpack(system, where, raw).items():
            name = _canonical(field)
            if name is None:
                continue
            if name.startswith("find_"):
                if not _numbers(value).any():
                    absent.add(name.removeprefix("find_"))
            else:
                frame[name] = _numbers(value)
    except ValueError as error:
        if isinstance(error, SystemFormatError):
            raise
        raise SystemFormatError(system, f"{where}, {field}", str(error)) from error
    for name in ("atype", "coord"):
        if name not in frame:
            raise SystemFormatError(
                system, where, f"{'atom_types' if name == 'atype' else 'coords'}: missing"
            )
    types = frame["atype"]
    if types.dtype.kind == "f" or not len(types):
        raise SystemFormatError(
            system, where, f"atom_types: expected whole numbers, found {types[:3]} of {types.dtype}"
        )
    frame["atype"] = types.astype(np.int64)
    if "box" in frame and not frame["box"].any():
        del frame["box"]
    for name in absent & (frame.keys() - {"atype", "coord"}):
        del frame[name]
    for name, array in frame.items():
        width = width_of(name, len(types))
        if name in PARAMETERS:
            width = (
                array.size if name == "fparam" else max(1, array.size // len(types)) * len(types)
            )
        if array.size != width:
            problem = f"{name}: expected {width} values for {len(types)} atoms, found {array.size}"
            raise SystemFormatError(system, where, problem)
    return frame


def _numbers(value: Any) -> np.ndarray:
    """Return a number or an encoded array, flat; raise ValueError with the problem."""
    if isinstance(value, (bool, int, float)):
        return np.array([value])
    if not isinstance(value, dict):
        raise ValueError(f"expected an array, found a {type(value).__name__}")
    if b"data" in value:
        value = {
            key.decode("utf-8", "replace"): one
            for key, one in value.items()
            if isinstance(key, bytes)
        }
    kind, shape, data = value.get("type"), value.get("shape"), value.get("data")
    dtype = _dtype(kind if isinstance(kind, str) else f"{type(kind).__name__}?")
    if not isinstance(data, bytes) or len(data) % dtype.itemsize:
        raise ValueError(f"expected bytes of {dtype}, found {type(data).__name__}")
    if shape is not None:
        fits = isinstance(shape, list) and len(shape) <= 8 and all(map(is_count, shape))
        if not fits or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"shape {repr(shape)[:40]} of {dtype} does not fit {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype)


def unpack(system: str, where: str, raw: bytes | memoryview) -> dict[str, Any]:
    """Unpack a msgpack map with text keys; lengths in it are bounded by those of `raw`, and nothing is executed."""
    try:
        import msgpack
    except ImportError as error:
        raise DataError("LMDB data need the package msgpack: pip install msgpack") from error
    try:
        found = msgpack.unpackb(raw, raw=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        problem = f"cannot be read as msgpack ({type(error).__name__}: {str(error)[:80]}); write the database again"
        raise SystemFormatError(system, where, problem) from error
    if not isinstance(found, dict):
        raise SystemFormatError(
            system, where, f"expected a msgpack map, found {type(found).__name__}"
        )
    return {_text(key): value for key, value in found.items()}


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "replace")


class Block(NamedTuple):
    """Some frames of a request with the same names."""

    rows: np.ndarray  # their places in the request `(nframes,)`
    columns: dict[str, np.ndarray]  # values by name, as `decode_frame` has them, `(nframes, width)`

    @classmethod
    def of_one(cls, row: int, frame: Mapping[str, np.ndarray]) -> Block:
        """Return one frame."""
        return cls(np.array([row]), {name: values[None] for name, values in frame.items()})


class _Place(NamedTuple):
    """The place of an array in the bytes of a frame."""

    start: int
    end: int
    dtype: np.dtype

    def view(self, frames: np.ndarray) -> np.ndarray:
        """Return the array of frames `(nframes, length)`, uint8, as `(nframes, width)`."""
        values: np.ndarray = frames[:, self.start : self.end].view(self.dtype)
        return values


@dataclass(frozen=True)
class FrameLayout:
    """The places of the arrays in the bytes of a frame.

    Frames that one program writes with the same number of atoms have the same length and, beside the values, the same
    bytes. msgpack writes lengths before values, so the values of such frames are in the same places.

    Attributes
    ----------
    places, masks, content
        Numbers of the bytes that frames have in common `(nbytes,)`, which bits of them, and these bits. Whole numbers
        below 128 in fields that are not read, one in a byte, share the highest bit.
    arrays
        By name, without those that all frames lack because of a flag.
    no_cell
        The cell, where it is zero: then frames have none.
    """

    places: np.ndarray
    masks: np.ndarray
    content: np.ndarray
    arrays: dict[str, _Place]
    no_cell: _Place | None

    @classmethod
    def of(cls, raw: bytes | memoryview, frame: Mapping[str, np.ndarray]) -> FrameLayout | None:
        """Find the layout of a frame that `decode_frame` has decoded; None for one that is written in another way."""
        found = _Stretches.of(raw)
        if found is None or frame.keys() - found.arrays.keys():
            return None
        whole = np.frombuffer(raw, np.uint8)[None]
        for name, values in frame.items():
            if found.arrays[name].view(whole).astype(values.dtype).tobytes() != values.tobytes():
                return None
        box = found.arrays.get("box")
        no_cell = None if box is None or "box" in frame or box.view(whole).any() else box
        masks = np.full(len(raw), 0xFF, np.uint8)
        for start, end in [
            (place.start, place.end) for place in found.arrays.values()
        ] + found.free:
            masks[start:end] = 0
        for start, end in found.counts:
            masks[start:end] = 0x80
        places = np.flatnonzero(masks)
        arrays = {name: found.arrays[name] for name in frame}
        return cls(places, masks[places], whole[0, places] & masks[places], arrays, no_cell)

    def fits(self, frames: np.ndarray) -> np.ndarray:
        """Return which frames `(nframes, length)`, uint8, have this layout `(nframes,)`."""
        fits: np.ndarray = (frames.take(self.places, axis=1) & self.masks == self.content).all(
            axis=1
        )
        cell = self.no_cell or self.arrays.get("box")
        if cell is not None:
            fits &= cell.view(frames).any(axis=1) == (self.no_cell is None)
        return fits

    def columns(self, frames: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of frames that fit, as `Block` has them."""
        found = {name: place.view(frames) for name, place in self.arrays.items()}
        return {**found, "atype": found["atype"].astype(np.int64)}


class _Stretches(NamedTuple):
    """Ranges of bytes that may differ between frames of one layout."""

    arrays: dict[str, _Place]  # of the fields that are read
    free: list[tuple[int, int]]  # first byte and end of the values of arrays in other fields
    counts: list[tuple[int, int]]  # of whole numbers below 128, one in a byte, in other fields

    @classmethod
    def of(cls, raw: bytes | memoryview) -> _Stretches | None:
        """Go through a frame that `decode_frame` has decoded; None if a field is no array, or occurs twice."""
        import msgpack

        found = cls({}, [], [])
        unpacker = msgpack.Unpacker(raw=False, max_buffer_size=len(raw))
        unpacker.feed(raw)
        for _ in range(unpacker.read_map_header()):
            name = _canonical(_text(unpacker.unpack()))
            start = unpacker.tell()
            if name is None or name.startswith("find_"):
                if name is None:
                    found._pass(unpacker, raw)
                else:
                    unpacker.skip()
                continue
            if raw[start] in _FLOATS:
                unpacker.skip()
                place: _Place | None = _Place(start + 1, unpacker.tell(), _FLOATS[raw[start]])
            else:
                place = _place_of(unpacker) if _is_map(raw[start]) else None
            if (
                place is None or name in found.arrays
            ):  # which of two fields is read depends on their keys
                return None
            found.arrays[name] = place
        return found

    def _pass(self, unpacker: Any, raw: bytes | memoryview) -> None:
        """Go over a field that is not read."""
        start = unpacker.tell()
        if _is_map(raw[start]):
            place = _place_of(unpacker)
            if place is not None:
                self.free.append((place.start, place.end))
            return
        value = unpacker.unpack()
        if (
            isinstance(value, list)
            and value
            and all(type(one) is int and 0 <= one < 128 for one in value)
        ):
            first, end = unpacker.tell() - len(value), unpacker.tell()
            if raw[first:end] == bytes(
                value
            ):  # other programs may write small numbers in more bytes
                self.counts.append((first, end))


def _is_map(first: int) -> bool:
    """Return whether an object of msgpack that starts with this byte is a map."""
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _place_of(unpacker: Any) -> _Place | None:
    """Go over an encoded array and return the place of its values; None for another map."""
    entries: dict[str, tuple[Any, int]] = {}
    twice = False
    for _ in range(unpacker.read_map_header()):
        key, value = _text(unpacker.unpack()), unpacker.unpack()
        twice |= key in entries
        entries[key] = value, unpacker.tell()
    kind, _ = entries.get("type", (None, 0))
    data, end = entries.get("data", (None, 0))
    if twice or not isinstance(kind, str) or not isinstance(data, bytes) or not data:
        return None
    try:
        return _Place(end - len(data), end, _dtype(kind))
    except ValueError:
        return None


class FrameDecoder:
    """Decodes the frames of a database; those whose layout is known together."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._layouts: dict[int, list[FrameLayout]] = {}  # by length
        self._learned = self._fitted = 0

    def blocks(
        self, numbers: Sequence[int], values: Sequence[bytes | memoryview]
    ) -> Iterator[Block]:
        """Decode frames; errors are those of `decode_frame`, but not in the order of the frames."""
        lengths = np.array([len(value) for value in values])
        for length in np.unique(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            yield from self._of_length(length, rows, numbers, values)

    def _of_length(
        self,
        length: int,
        rows: np.ndarray,
        numbers: Sequence[int],
        values: Sequence[bytes | memoryview],
    ) -> Iterator[Block]:
        """Decode frames of one length."""
        joined = b"".join([values[row] for row in rows.tolist()])
        frames = (
            np.frombuffer(joined, np.uint8).reshape(len(rows), length)
            if length
            else np.zeros((len(rows), 0))
        )
        known = iter(self._layouts.get(length, ()))
        while len(rows):
            layout = next(known, None)
            if layout is None:
                row = int(rows[0])
                frame = decode_frame(self._system, f"frame {numbers[row]}", values[row])
                yield Block.of_one(row, frame)
                layout = self._learn(length, values[row], frame)
                rows, frames = rows[1:], frames[1:]
            if layout is None or not len(rows):
                continue
            fits = layout.fits(frames)
            if fits.any():
                self._fitted += int(fits.sum())
                whole = fits.all()
                yield Block(
                    *(
                        (rows, layout.columns(frames))
                        if whole
                        else (rows[fits], layout.columns(frames[fits]))
                    )
                )
                rows, frames = rows[~fits], frames[~fits]

    def _learn(
        self, length: int, raw: bytes | memoryview, frame: Mapping[str, np.ndarray]
    ) -> FrameLayout | None:
        """Find the layout of a frame and remember it; None if too few frames fitted earlier layouts."""
        if self._learned > _FREE_LAYOUTS + self._fitted // _FITS_PER_LAYOUT:
            return None
        self._learned += 1
        layout = FrameLayout.of(raw, frame)
        if layout is not None:
            if len(self._layouts) >= _KEPT_LENGTHS:
                self._layouts.clear()
            self._layouts[length] = [layout, *self._layouts.get(length, ())][:_KEPT_LAYOUTS]
        return layout
