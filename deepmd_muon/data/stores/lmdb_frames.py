"""Decode the frames of an LMDB database: a msgpack map of arrays each.

`decode_frame` decodes one frame, and defines the result. Most databases were written by one
program, so that frames of one length differ in the values of their arrays only. `FrameDecoder`
learns where the arrays are in such a frame (`FrameLayout`), and then takes them out of many frames
by slices.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from deepmd_muon.data.errors import DataError, SystemFormatError
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS, FRAME_PARAMETERS, PARAMETERS

Raw = bytes | memoryview
"""The bytes of a frame."""

# deepmd-kit's names of fields that are called otherwise in npy files.
_NPY_NAMES = {
    "coords": "coord",
    "cells": "box",
    "energies": "energy",
    "forces": "force",
    "virials": "virial",
    "atom_types": "atype",
}
_READ_FIELDS = frozenset(("atype", "coord", "box", *FRAME_LABELS, *ATOM_LABELS, *PARAMETERS))
_MAX_DIMENSIONS = 8

_DOUBLE = struct.Struct(">d")  # a float of Python, as msgpack has it

_LAYOUTS_PER_LENGTH = 4  # that stay in memory
_MAX_LENGTHS = 4096  # lengths of frames whose layouts stay in memory
# Learning a layout takes some times as long as decoding a frame, in vain if each frame has its own,
# as with an identifier. So learning stops after `_FREE_LAYOUTS`, and goes on with one for each
# `_FITS_PER_LAYOUT` frames that fitted a layout.
_FREE_LAYOUTS = 64
_FITS_PER_LAYOUT = 8


def width_of(name: str, natoms: int) -> int:
    """Return the number of values that a quantity has in a frame."""
    if name in FRAME_LABELS:
        return FRAME_LABELS[name]
    if name in ATOM_LABELS:
        return ATOM_LABELS[name] * natoms
    return {"coord": 3 * natoms, "box": 9}.get(name, natoms)


# ----- one frame ---------------------------------------------------------------------------------


def decode_frame(system: str, where: str, raw: Raw) -> dict[str, np.ndarray]:
    """Decode a frame.

    Returns
    -------
    dict
        Flat arrays: "atype" (int64), "coord", "box" if there is a cell, and labels, under the names
        of npy files.

    Raises
    ------
    SystemFormatError
        When an array is damaged, of another kind or size, or types or positions are missing.
    """
    frame: dict[str, np.ndarray] = {}
    absent: set[str] = set()  # labels whose flag "find_…" is 0
    for key, value in unpack(system, where, raw).items():
        name = _npy_name(key)
        if name is None:
            continue
        try:
            array = _decode_array(value)
        except ValueError as error:
            raise SystemFormatError(system, f"{where}, {key}", str(error)) from error
        if not name.startswith("find_"):
            frame[name] = array
        elif not array.any():
            absent.add(name.removeprefix("find_"))

    for name, key in (("atype", "atom_types"), ("coord", "coords")):
        if name not in frame:
            raise SystemFormatError(system, where, f"{key}: missing")
    types = frame["atype"]
    natoms = len(types)
    if types.dtype.kind == "f" or natoms == 0:
        raise SystemFormatError(
            system, where, f"atom_types: expected whole numbers, found {types[:3]} of {types.dtype}"
        )
    frame["atype"] = types.astype(np.int64)
    if "box" in frame and not frame["box"].any():
        del frame["box"]
    for name in absent & (frame.keys() - {"atype", "coord"}):
        del frame[name]

    for name, array in frame.items():
        # A single number named spin may belong to the frame.
        if name in (*FRAME_PARAMETERS, "spin"):
            continue  # of any width
        width = width_of(name, natoms)
        if name == "aparam":
            width = max(1, array.size // natoms) * natoms
        if array.size != width:
            problem = f"{name}: expected {width} values for {natoms} atoms, found {array.size}"
            raise SystemFormatError(system, where, problem)
    return frame


def unpack(system: str, where: str, raw: Raw) -> dict[str, Any]:
    """Unpack a msgpack map with text keys.

    Lengths in it are bounded by the length of `raw`, and nothing is executed.
    """
    try:
        import msgpack
    except ImportError as error:
        raise DataError("LMDB data need the package msgpack: pip install msgpack") from error
    try:
        content = msgpack.unpackb(raw, raw=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise SystemFormatError(
            system,
            where,
            f"cannot be read as msgpack ({type(error).__name__}: {str(error)[:80]}); "
            "write the database again",
        ) from error
    if not isinstance(content, dict):
        raise SystemFormatError(
            system, where, f"expected a msgpack map, found {type(content).__name__}"
        )
    return {_text(key): value for key, value in content.items()}


def is_count(value: object) -> bool:
    """Return whether a value of a msgpack map is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@functools.lru_cache(maxsize=256)
def _npy_name(key: str) -> str | None:
    """Return the name of a field or flag "find_…" in npy files; None if it is not read."""
    name = _NPY_NAMES.get(key, re.sub(r"^(find_)?atomic_", r"\1atom_", key))
    return name if name in _READ_FIELDS or name.startswith("find_") else None


def _decode_array(value: Any) -> np.ndarray:
    """Return a number or an encoded array, flat; raise ValueError with the problem."""
    if isinstance(value, (bool, int, float)):
        return np.array([value])
    if not isinstance(value, dict):
        raise ValueError(f"expected an array, found a {type(value).__name__}")
    if b"data" in value:
        value = {
            key.decode("utf-8", "replace"): entry
            for key, entry in value.items()
            if isinstance(key, bytes)
        }
    kind = value.get("type")
    shape = value.get("shape")
    data = value.get("data")
    dtype = _real_dtype(kind if isinstance(kind, str) else f"{type(kind).__name__}?")
    if not isinstance(data, bytes) or len(data) % dtype.itemsize:
        raise ValueError(f"expected bytes of {dtype}, found {type(data).__name__}")
    if shape is not None:
        is_shape = (
            isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS and all(map(is_count, shape))
        )
        if not is_shape or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"shape {repr(shape)[:40]} of {dtype} does not fit {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype)


@functools.lru_cache(maxsize=64)
def _real_dtype(kind: str) -> np.dtype:
    """Return the dtype of real numbers; ValueError for any other one."""
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "fiub" or dtype.names is not None:
        raise ValueError(f"expected real numbers, found values of dtype {kind[:40]}")
    return dtype


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode("utf-8", "replace")


# ----- many frames -------------------------------------------------------------------------------


class Block(NamedTuple):
    """Some frames of a request with the same names."""

    rows: np.ndarray  # (nframes,) places in the request
    columns: dict[str, np.ndarray]  # (nframes, width) values by name, as `decode_frame` has them

    @classmethod
    def of_one(cls, row: int, frame: Mapping[str, np.ndarray]) -> Block:
        """Return one frame."""
        return cls(np.array([row]), {name: values[None] for name, values in frame.items()})


class FrameDecoder:
    """Decodes the frames of a database; frames whose layout is known together."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._layouts: dict[int, list[FrameLayout]] = {}  # by length of the frame
        self._n_learned = 0
        self._n_fitted = 0

    def blocks(self, numbers: Sequence[int], values: Sequence[Raw]) -> Iterator[Block]:
        """Decode frames; errors are those of `decode_frame`, but not in the order of the frames."""
        lengths = np.array([len(value) for value in values])
        for length in np.unique(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            yield from self._blocks_of_length(length, rows, numbers, values)

    def _blocks_of_length(
        self, length: int, rows: np.ndarray, numbers: Sequence[int], values: Sequence[Raw]
    ) -> Iterator[Block]:
        joined = b"".join([values[row] for row in rows.tolist()])
        frames = np.frombuffer(joined, np.uint8).reshape(len(rows), length)
        known_layouts = iter(self._layouts.get(length, ()))
        while len(rows):
            layout = next(known_layouts, None)
            if layout is None:
                row = int(rows[0])
                frame = decode_frame(self._system, f"frame {numbers[row]}", values[row])
                yield Block.of_one(row, frame)
                rows = rows[1:]
                frames = frames[1:]
                layout = self._learn(values[row], frame)
            if layout is None or not len(rows):
                continue
            fits = layout.fits(frames)
            self._n_fitted += int(fits.sum())
            if fits.all():  # usual; without copies
                yield Block(rows, layout.columns(frames))
                return
            if fits.any():
                yield Block(rows[fits], layout.columns(frames[fits]))
                rows = rows[~fits]
                frames = frames[~fits]

    def _learn(self, raw: Raw, frame: Mapping[str, np.ndarray]) -> FrameLayout | None:
        """Find the layout of a frame and remember it; None if few frames fitted earlier ones."""
        if self._n_learned > _FREE_LAYOUTS + self._n_fitted // _FITS_PER_LAYOUT:
            return None
        self._n_learned += 1
        layout = FrameLayout.of(raw, frame)
        if layout is not None:
            if len(self._layouts) >= _MAX_LENGTHS:
                self._layouts.clear()
            earlier = self._layouts.get(len(raw), [])
            self._layouts[len(raw)] = [layout, *earlier][:_LAYOUTS_PER_LENGTH]
        return layout


class _ArrayBytes(NamedTuple):
    """The place of an array in the bytes of a frame."""

    start: int
    end: int
    dtype: np.dtype

    def view(self, frames: np.ndarray) -> np.ndarray:
        """Return the array (nframes, width) of frames (nframes, length), uint8."""
        values: np.ndarray = frames[:, self.start : self.end].view(self.dtype)
        return values


@dataclass(frozen=True)
class FrameLayout:
    """The places of the arrays in the bytes of a frame.

    Frames that one program writes with the same number of atoms have the same length and, apart
    from the values, the same bytes. msgpack writes lengths before values, so that the values of
    such frames are in the same places.

    Attributes
    ----------
    places
        (nbytes,) numbers of the bytes that frames of the layout have in common.
    masks
        (nbytes,) which bits of these bytes they have in common.
    content
        (nbytes,) these bits.
    arrays
        Places of the arrays by name; an array that all frames lack because of a flag is left out.
    no_cell
        Place of the cell if frames have none, because it is zero.
    """

    places: np.ndarray
    masks: np.ndarray
    content: np.ndarray
    arrays: dict[str, _ArrayBytes]
    no_cell: _ArrayBytes | None

    @classmethod
    def of(cls, raw: Raw, frame: Mapping[str, np.ndarray]) -> FrameLayout | None:
        """Find the layout of a decoded frame; None if it has fields of another kind.

        Encode each field again with inverted values, and see which bits change.
        """
        import msgpack

        original = np.frombuffer(raw, np.uint8)
        masks = np.full(len(raw), 0xFF, np.uint8)
        arrays: dict[str, _ArrayBytes] = {}
        try:
            fields = msgpack.unpackb(raw, raw=False)
            encoded = [msgpack.packb(key) + msgpack.packb(value) for key, value in fields.items()]
            end = len(raw) - sum(map(len, encoded))  # of the header of the map
            if raw[max(0, end) :] != b"".join(encoded):
                return None  # another program may encode small numbers in more bytes, for example
            for (key, value), field in zip(fields.items(), encoded, strict=True):
                start = end
                end += len(field)
                name = _npy_name(_text(key))
                if name is not None and name.startswith("find_"):
                    continue  # the value decides which labels a frame has
                inverted = _invert(value)
                inverted_field = msgpack.packb(key) + msgpack.packb(inverted.value)
                changed_bits = original[start:end] ^ np.frombuffer(inverted_field, np.uint8)
                masks[start:end] = ~changed_bits
                if name is None:
                    continue
                places = start + np.flatnonzero(changed_bits)
                # Which of two fields of one name is read depends on their keys.
                if inverted.dtype is None or not len(places) or name in arrays:
                    return None
                arrays[name] = _ArrayBytes(
                    start=int(places[0]), end=int(places[-1]) + 1, dtype=inverted.dtype
                )
        except ValueError:  # msgpack encodes less deeply than it decodes
            return None
        if frame.keys() - arrays.keys():
            return None
        one_frame = original[None]
        for name, values in frame.items():
            if arrays[name].view(one_frame).astype(values.dtype).tobytes() != values.tobytes():
                return None
        box = arrays.get("box")
        has_zero_cell = box is not None and "box" not in frame and not box.view(one_frame).any()
        places = np.flatnonzero(masks)
        return cls(
            places=places,
            masks=masks[places],
            content=original[places] & masks[places],
            arrays={name: arrays[name] for name in frame},
            no_cell=box if has_zero_cell else None,
        )

    def fits(self, frames: np.ndarray) -> np.ndarray:
        """Return which frames (nframes, length), uint8, have this layout, (nframes,)."""
        shared_bits = frames.take(self.places, axis=1) & self.masks
        fits: np.ndarray = (shared_bits == self.content).all(axis=1)
        cell = self.no_cell or self.arrays.get("box")
        if cell is not None:
            fits &= cell.view(frames).any(axis=1) == (self.no_cell is None)
        return fits

    def columns(self, frames: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of frames that fit, as `Block` has them."""
        columns = {name: array.view(frames) for name, array in self.arrays.items()}
        columns["atype"] = columns["atype"].astype(np.int64)
        return columns


class _Inverted(NamedTuple):
    """A value of which all bits that may differ between frames of one layout are inverted."""

    value: Any
    dtype: np.dtype | None  # of an array or number


def _invert(value: Any) -> _Inverted:
    """Invert the values of an encoded array, a number, or a list of counts, such as `atom_numbs`.

    Leave anything else as it is.
    """
    if isinstance(value, float):
        (inverted,) = _DOUBLE.unpack(_invert_bits(_DOUBLE.pack(value)))
        return _Inverted(inverted, np.dtype(">f8"))
    # A whole number below 128 is one byte, and its highest bit is 0.
    if isinstance(value, list) and all(type(x) is int and 0 <= x < 128 for x in value):
        return _Inverted([x ^ 0x7F for x in value], None)
    if isinstance(value, dict):
        type_key, data_key = (b"type", b"data") if b"data" in value else ("type", "data")
        kind = value.get(type_key)
        data = value.get(data_key)
        if isinstance(kind, str) and isinstance(data, bytes):
            with suppress(ValueError):
                return _Inverted({**value, data_key: _invert_bits(data)}, _real_dtype(kind))
    return _Inverted(value, None)


def _invert_bits(data: bytes) -> bytes:
    return (~np.frombuffer(data, np.uint8)).tobytes()
