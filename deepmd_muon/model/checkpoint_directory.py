"""Checkpoints as directories of torch.distributed.checkpoint: the content of a file, its tensors in parts.

`CONTENT` in the directory is the file's content without its large tensors, and says where they belong; the tensors lie
in torch's own files, whole or cut over the ranks that wrote them.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

SUFFIX = ".dcp"
CONTENT = "content.pt"
_METADATA = ".metadata"
# What reading a checkpoint that is incomplete or damaged, or none at all, may raise.
READ_ERRORS = (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, OSError)
_HARMLESS = {("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}

_Keys = tuple[str | int, ...]
"""From the top of the content down to a tensor."""


def is_directory(path: Path) -> bool:
    """Return whether a path is such a checkpoint, complete."""
    return (path / CONTENT).is_file() and (path / _METADATA).is_file()


def take_apart(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Separate the tensors of a checkpoint from the rest.

    Parameters
    ----------
    content
        Nested dicts and lists with string and integer keys.

    Returns
    -------
    tuple
        What `CONTENT` holds, and the tensors by name. A tensor that appears several times has one name. Empty tensors
        stay in the content.
    """
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    places: list[tuple[str, _Keys]] = []

    def walk(node: Any, path: _Keys) -> Any:
        if isinstance(node, Tensor) and node.numel():
            if id(node) not in names:
                names[id(node)] = "/".join(map(str, path))
                tensors[names[id(node)]] = node
            places.append((names[id(node)], path))
            return None
        if isinstance(node, Mapping):
            return {key: walk(value, (*path, key)) for key, value in node.items()}
        return [walk(value, (*path, i)) for i, value in enumerate(node)] if isinstance(node, list) else node

    return {"content": walk(content, ()), "tensors": places}, tensors


def put_together(parts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the content that `take_apart` was given."""
    content: dict[str, Any] = parts["content"]
    for name, path in parts["tensors"]:
        node: Any = content
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = tensors[name]
    return content


def read_directory(path: Path, leave: Collection[str] = ()) -> dict[str, Any]:
    """Read a directory onto the CPU; nothing in it is executed, and no other process takes part.

    Parameters
    ----------
    path
        The directory.
    leave
        Keys at the top of the content whose tensors are not read: meta tensors stand for them, for `read_into`.

    Raises
    ------
    One of READ_ERRORS
        When a file is missing or damaged, or holds other than tensors, plain values and torch's description of parts.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    parts = torch.load(path / CONTENT, map_location="cpu", weights_only=True)
    wanted = {name for name, place in parts["tensors"] if place[0] not in leave}
    entries = _metadata(path).state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu" if name in wanted else "meta")
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _read(path, {name: tensor for name, tensor in tensors.items() if name in wanted})
    return put_together(parts, tensors)


def read_into(path: Path, targets: Mapping[_Keys, Tensor]) -> None:
    """Read tensors of a directory into given ones of the same shape, of a DTensor only what this process holds.

    Parameters
    ----------
    path
        The directory.
    targets
        By the keys that lead to them from the top of the content.

    Raises
    ------
    As `read_directory`.
    """
    parts = torch.load(path / CONTENT, map_location="cpu", weights_only=True)
    names = {tuple(place): name for name, place in parts["tensors"]}
    _read(path, {names[place]: target for place, target in targets.items()})


def _metadata(path: Path) -> Metadata:
    """Read torch's description of the parts without running anything."""
    with (path / _METADATA).open("rb") as file:
        metadata: Metadata = _Unpickler(file).load()
    return metadata


def _read(path: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return _metadata(path)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # no other process: as intended
        try:
            load(tensors, storage_reader=Reader(path), no_dist=True)
        except CheckpointException as error:  # which is no Exception
            causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
            raise RuntimeError(causes) from error


class _Unpickler(pickle.Unpickler):
    """Builds plain values and the dataclasses and enumerations of torch.distributed.checkpoint, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what may be built."""
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 write a member of an enumeration
            return _member
        if module.startswith("torch.distributed.checkpoint."):
            found = super().find_class(module, name)
            if dataclasses.is_dataclass(found) or (isinstance(found, type) and issubclass(found, enum.Enum)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into the description of a checkpoint")


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration, and nothing of anything else."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"{name!r} of {kind!r} does not belong into the description of a checkpoint")
