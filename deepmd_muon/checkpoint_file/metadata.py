"""The description of the parts in a directory of torch.distributed.checkpoint, checked value by value.

torch pickles it into the file ``.metadata``. Here it is read as data, and torch's objects are built from its
values: names, shapes, dtypes, and the location of each part.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from deepmd_muon.checkpoint_file.pickles import Name, Pairs, Record, read_pickle
from deepmd_muon.files import open_regular

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"
# A part takes about 300 bytes.
_MAX_BYTES = 1 << 28
_MAX_INTEGER = (1 << 63) - 1
_MAX_DIMENSIONS = 64
Kind = TypeVar("Kind")
_PART_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")

_CLASSES = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Name("torch", "Size")
_MEMORY_FORMAT = Name(_CLASSES, "_MEM_FORMAT_ENCODING")
# Python 3.11.0 to 3.11.3 write a member of an enumeration as getattr(class, name), others as class(value).
_CONTIGUOUS = (
    Record(_MEMORY_FORMAT, (0,)),
    Record(Name("builtins", "getattr"), (_MEMORY_FORMAT, "TORCH_CONTIGUOUS_FORMAT")),
)
_STRIDED = Record(Name("torch.serialization", "_get_layout"), ("torch.strided",))
_DTYPES = {
    Name("torch", str(dtype).removeprefix("torch.")): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_ALLOWED = frozenset(
    [
        *(
            Name(_CLASSES, name)
            for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
        ),
        *(Name(_CLASSES, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
        *(_STORAGE_INFO, _SIZE, _MEMORY_FORMAT, _STRIDED.kind, *_DTYPES),
        *(record.kind for record in _CONTIGUOUS),
        # The folder where the checkpoint was written, not used here; Python 3.13 has the class in another module.
        *(Name(module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    ]
)


class _Place(NamedTuple):
    """The place of a part in a file."""

    file: str
    offset: int
    length: int


class _Part(NamedTuple):
    """A part of a tensor, identified by its first element."""

    name: str
    offsets: tuple[int, ...]


def read_metadata(folder: Path) -> Metadata:
    """Read the description of the parts in `folder`; no code in it runs.

    Returns
    -------
    Metadata
        Descriptions of tensors only. Their parts lie in files of this folder, do not overlap, and are not larger than
        these files.

    Raises
    ------
    pickle.UnpicklingError
        When the description is damaged or holds anything else.
    OSError
        When it cannot be read.
    """
    with open_regular(folder / METADATA) as file:
        size = os.fstat(file.fileno()).st_size
        _expect(size <= _MAX_BYTES, f"{size} bytes")
        return _metadata(read_pickle(file.read(_MAX_BYTES), _ALLOWED), folder)


def _metadata(found: Any, folder: Path) -> Metadata:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    fields = _fields(found, Name(_CLASSES, "Metadata"))
    places = {
        _part(key): _place(value) for key, value in _is(fields.get("storage_data"), Pairs).items
    }
    _check_places(places.values(), folder)
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in _is(fields.get("state_dict_metadata"), Pairs).items:
        _expect(_is(name, str) not in entries, f"{_shown(name)} is listed twice")
        entries[name] = _fields(entry, Name(_CLASSES, "TensorStorageMetadata"))
    # A pickle may refer to one list from many entries, so bound the work by the number of places before the loop.
    counts = [len(_is(entry.get("chunks"), list)) for entry in entries.values()]
    _expect(sum(counts) == len(places), f"{sum(counts)} parts at {len(places)} places")
    return Metadata(
        {name: _tensor(name, entry, places) for name, entry in entries.items()},
        storage_data={MetadataIndex(*part): _StorageInfo(*place) for part, place in places.items()},
    )


def _tensor(
    name: str, entry: Mapping[str, Any], places: Mapping[_Part, _Place]
) -> TensorStorageMetadata:
    """Check one tensor against its parts and their places."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    dtype, size, chunks = _dtype(entry.get("properties")), _size(entry.get("size")), []
    for chunk in _is(entry.get("chunks"), list):
        fields = _fields(chunk, Name(_CLASSES, "ChunkStorageMetadata"))
        offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
        _expect(
            len(offsets) == len(sizes) == len(size),
            f"a part of {_shown(name)} has other dimensions",
        )
        inside = all(o + s <= n for o, s, n in zip(offsets, sizes, size, strict=True))
        place = places.get(_Part(name, offsets))
        _expect(inside and place is not None, f"a part of {_shown(name)} has no place in a file")
        assert place is not None
        _expect(
            math.prod(sizes) * dtype.itemsize <= place.length,
            f"a part of {_shown(name)} is too short",
        )
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    _expect(
        covered == math.prod(size),
        f"{_shown(name)} has {covered} elements in its parts, shape {size}",
    )
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _dtype(properties: Any) -> torch.dtype:
    _expect(
        isinstance(properties, Record) and properties.kind == Name(_CLASSES, "TensorProperties"),
        "no properties",
    )
    state = properties.state
    # torch 2.15 adds the strides of the tensor that was saved; parts are read into tensors that exist.
    _expect(isinstance(state, tuple) and len(state) in (5, 6), "no properties")
    dtype, layout, _, memory_format = state[:4]
    _expect(isinstance(dtype, Name) and dtype in _DTYPES, "an unknown dtype")
    _expect(
        layout == _STRIDED and memory_format in _CONTIGUOUS,
        "a tensor that is not dense and contiguous",
    )
    return _DTYPES[dtype]


def _part(found: Any) -> _Part:
    fields = _fields(found, Name(_CLASSES, "MetadataIndex"))
    return _Part(_is(fields.get("fqn"), str), _size(fields.get("offset")))


def _place(found: Any) -> _Place:
    fields = _fields(found, _STORAGE_INFO)
    file = _is(fields.get("relative_path"), str)
    _expect(_PART_FILE.fullmatch(file) is not None, f"a part in the file {_shown(file)}")
    _expect(fields.get("transform_descriptors") is None, "a transformed part")
    return _Place(file, _integer(fields.get("offset")), _integer(fields.get("length")))


def _check_places(places: Iterable[_Place], folder: Path) -> None:
    """Check that places lie inside their files and do not overlap, so that a file yields no more bytes than it has."""
    before = _Place("", 0, 0)
    for place in sorted(places):
        if place.file != before.file:
            with open_regular(folder / place.file) as file:
                size = os.fstat(file.fileno()).st_size
        begin = before.offset + before.length if place.file == before.file else 0
        _expect(
            begin <= place.offset and place.offset + place.length <= size,
            f"{place.file} is cut short or damaged",
        )
        before = place


def _fields(found: Any, kind: Name) -> dict[str, Any]:
    """Return the attributes of an object of a dataclass."""
    _expect(
        isinstance(found, Record) and found.kind == kind and found.arguments == (),
        f"no {kind.name}",
    )
    fields: dict[str, Any] = {}
    for key, value in _is(found.state, Pairs).items:
        _expect(
            isinstance(key, str) and key not in fields,
            f"an attribute of {kind.name} that is not a name",
        )
        fields[key] = value
    return fields


def _is(found: Any, kind: type[Kind]) -> Kind:
    _expect(isinstance(found, kind), f"no {kind.__name__} where one belongs")
    return found  # type: ignore[no-any-return]


def _size(found: Any) -> tuple[int, ...]:
    _expect(
        isinstance(found, Record) and found.kind == _SIZE and len(found.arguments) == 1,
        "no torch.Size",
    )
    (size,) = found.arguments
    _expect(isinstance(size, tuple) and len(size) <= _MAX_DIMENSIONS, "no torch.Size")
    return tuple(_integer(length) for length in size)


def _integer(found: Any) -> int:
    _expect(type(found) is int and 0 <= found <= _MAX_INTEGER, "no whole number where one belongs")
    return found  # type: ignore[no-any-return]


def _shown(name: str) -> str:
    return repr(name[:100])


def _expect(right: bool, found: str) -> None:
    if not right:
        raise pickle.UnpicklingError(
            f"{METADATA} does not describe the tensors of a checkpoint: {found}"
        )
