"""Data formats of other packages, by the ending of their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from deepmd_muon.data.errors import DataError
from deepmd_muon.data.stores.storage import Store

Reader = Callable[[str], Iterable[Store]]
_READERS: dict[str, str | Reader] = {}


def register_format(ending: str, read: str | Reader) -> None:
    """Read paths with an ending by a function of another package.

    Parameters
    ----------
    ending
        Of files or folders, such as ".mydata"; compared with the end of the path.
    read
        Maps the path to a `Store` for each system in it, for instance a `MemoryStore`, or names such a function as
        "module:attribute". It raises `DataError` for a file that it cannot read.

    Raises
    ------
    DataError
        When the ending is empty or taken by another function.
    """
    if not ending.startswith(".") or len(ending) < 2:
        raise DataError(f"the ending of a data format is a dot and letters, such as '.mydata'; found {ending!r}")
    if _READERS.setdefault(ending, read) != read:
        raise DataError(f"paths that end with {ending} are read by {_READERS[ending]}; choose another ending")


def reader_of(path: str) -> Reader | None:
    """Return the registered function for a path, or None where no registered ending fits."""
    for ending, read in _READERS.items():
        if path.endswith(ending):
            if isinstance(read, str):
                module, _, name = read.partition(":")
                found: Reader = getattr(import_module(module), name)
                return found
            return read
    return None
