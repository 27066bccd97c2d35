"""Checkpoints as directories of torch.distributed.checkpoint: the content of a checkpoint file, its tensors in parts.

The file `CONTENT` holds everything but the large tensors, and the place of each of them in the content. The tensors are
in torch's own files, whole or divided among the ranks that wrote them.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmd_muon.checkpoint_file.archive import ArchiveError, load_archive
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.metadata import METADATA, read_metadata
from deepmd_muon.files import open_regular

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

SUFFIX = ".dcp"
CONTENT = "content.pt"
# Exceptions of reading a directory that is incomplete or damaged, or not a checkpoint.
READ_ERRORS = (
    *(ArchiveError, pickle.UnpicklingError),
    *(RuntimeError, EOFError, LookupError, ValueError, TypeError, OSError),
)

_Keys = tuple[str | int, ...]
"""Keys that lead from the top of the content to a tensor."""


def is_directory(path: Path) -> bool:
    """Return whether a path is a complete checkpoint directory."""
    return (path / CONTENT).is_file() and (path / METADATA).is_file()


def take_apart(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Separate the tensors of a checkpoint (nested dicts and lists) from the rest.

    Returns
    -------
    tuple
        The content of `CONTENT`, and the tensors by name. A tensor that appears several times has one name. Empty
        tensors stay in the content.
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
        return (
            [walk(value, (*path, i)) for i, value in enumerate(node)]
            if isinstance(node, list)
            else node
        )

    return {"content": walk(content, ()), "tensors": places}, tensors


def put_together(parts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Put the tensors back into the content: the inverse of `take_apart`."""
    content: dict[str, Any] = parts["content"]
    for name, path in parts["tensors"]:
        node: Any = content
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = tensors[name]
    return content


def read_directory(path: Path, leave: Collection[str] = ()) -> dict[str, Any]:
    """Read a directory onto the CPU; nothing in it is executed, and no other process takes part.

    Every file is opened once, so that it cannot change between check and use. Tensors below the top-level keys `leave`
    are not read but become meta tensors; `read_into` reads them later.

    Raises
    ------
    One of READ_ERRORS
        When a file is missing or damaged, or holds other than tensors, plain values and torch's description of parts.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    parts = _read_content(path)
    wanted = {name for name, place in parts["tensors"] if place[0] not in leave}
    metadata = read_metadata(path)
    tensors = {
        name: torch.empty(
            entry.size, dtype=entry.properties.dtype, device="cpu" if name in wanted else "meta"
        )
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _read(path, metadata, {name: tensor for name, tensor in tensors.items() if name in wanted})
    return put_together(parts, tensors)


def read_into(path: Path, targets: Mapping[_Keys, Tensor]) -> None:
    """Read tensors of a directory into `targets` of the same shapes; into a DTensor, only the part of this process.

    The keys of `targets` are the tensors' places in the content.

    Raises
    ------
    CheckpointError
        When the directory is incomplete or damaged.
    """
    try:
        names = {tuple(place): name for name, place in _read_content(path)["tensors"]}
        _read(
            path, read_metadata(path), {names[place]: target for place, target in targets.items()}
        )
    except READ_ERRORS as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}"
        ) from error


def _read_content(path: Path) -> dict[str, Any]:
    """Read the content without its tensors, and check that it has the form of `take_apart`."""
    try:
        with open_regular(path / CONTENT) as file:
            parts: dict[str, Any] = load_archive(file)
    except ArchiveError as error:
        raise ArchiveError(f"{CONTENT}: {error}") from error
    places = parts.get("tensors") if isinstance(parts, dict) else None
    if not isinstance(places, list) or not all(_is_place(place) for place in places):
        raise ArchiveError(f"{CONTENT}: it does not say where the tensors belong")
    return parts


def _is_place(found: Any) -> bool:
    """Return whether something is the name of a tensor and the keys that lead to it."""
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    name, keys = found
    return (
        isinstance(name, str)
        and isinstance(keys, tuple)
        and bool(keys)
        and all(type(k) in (str, int) for k in keys)
    )


def _read(path: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from deepmd_muon.checkpoint_file.parts import TensorReader

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is", UserWarning
        )  # reading in one process is intended
        try:
            load(tensors, storage_reader=TensorReader(path, metadata), no_dist=True)
        except CheckpointException as error:  # not a subclass of Exception
            causes = "; ".join(
                str(cause) or type(cause).__name__ for cause, _ in error.failures.values()
            )
            raise RuntimeError(causes) from error
