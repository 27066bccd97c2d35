"""Read files of torch.save: verify the checksum of every member first, and execute nothing."""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

import torch

# Values of a checkpoint other than elements of tensors; a run writes a few for every parameter.
_MOST_VALUES = 10_000_000
# Bytes of a program's source code, which torch compresses, after unpacking; deepmd-kit's examples
# have up to 1 MB.
_MOST_PACKED = 64 * 1024**2


class ArchiveError(Exception):
    """An archive is damaged, or holds objects that this package refuses.

    The message does not name the file.
    """


def load_archive(file: BinaryIO) -> Any:
    """Load the content of a file of torch.save onto the CPU.

    torch does not verify the checksums that it writes: a damaged byte would silently change a
    weight.

    Raises
    ------
    ArchiveError
        If a member does not fit its checksum, or the archive holds other than tensors and plain
        values.
    """
    try:
        check_members(file)
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True)
        # A few hundred bytes of nested references can describe 2^60 values.
        if _count_values(content, counted={}) > _MOST_VALUES:
            raise ArchiveError(
                "its lists contain one another, and stand for more values than fit into memory"
            )
        return content
    except (ArchiveError, OSError):
        raise
    except pickle.UnpicklingError as error:
        # torch's own message advises to run the code in the file.
        raise ArchiveError(
            "it holds Python objects besides tensors and plain values, "
            "and loading those could run any code"
        ) from error
    except MemoryError as error:
        raise ArchiveError("it does not fit into memory") from error
    except Exception as error:  # torch does not document what it raises for other contents
        if "can't allocate memory" in str(error):
            raise ArchiveError("it does not fit into memory") from error
        raise ArchiveError(
            "torch.save did not write it like this: it is damaged or made by other means"
        ) from error


def _count_values(value: Any, counted: dict[int, float]) -> float:
    """Count the values in nested containers, shared ones at each use; infinite for a cycle.

    `counted` has the count of each container by its id.
    """
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return 1
    if id(value) not in counted:
        counted[id(value)] = math.inf  # until the container is complete: it may hold itself
        elements = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count_values(element, counted) for element in elements)
    return counted[id(value)]


def check_members(file: BinaryIO, *, program: bool = False) -> None:
    """Verify the checksums of all members, as torch's own reader finds them.

    With `program`, the archive must hold a TorchScript program, otherwise a checkpoint.

    Raises
    ------
    ArchiveError
        If a member does not fit its checksum, or the archive is of the other kind.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
        names = {member.filename for member in members}
        _check_form(members, names, program=program)
        file.seek(0)
        reader = torch._C.PyTorchFileReader(file)
        folder = members[0].filename.partition("/")[0]
        if {f"{folder}/{name}" for name in reader.get_all_records()} != names:
            raise ArchiveError("torch.save did not write it: its members are not in one folder")
        for member in members:
            _check_member(reader, member)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ArchiveError("it is damaged, or torch.save did not write it") from error
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        EOFError,
        ValueError,
        LookupError,
        RuntimeError,
        struct.error,
    ) as error:
        raise ArchiveError("it is damaged, or torch.save did not write it") from error


def _check_form(members: list[zipfile.ZipInfo], names: set[str], *, program: bool) -> None:
    """Refuse an archive of the other kind, or with members that torch.save does not write."""
    if any("/code/" in name for name in names) != program:
        raise ArchiveError(
            "it is not a TorchScript program" if program else "it is a frozen model (TorchScript)"
        )
    packed = [member for member in members if member.compress_type != zipfile.ZIP_STORED]
    if len(names) != len(members) or (packed and not program):
        raise ArchiveError("torch.save did not write it: members are compressed or there twice")
    if sum(member.file_size for member in packed) > _MOST_PACKED:
        raise ArchiveError(f"its source unpacks to more than {_MOST_PACKED >> 20} MiB")
    # torch ignores the bytes of a member that is marked as a folder.
    if any(member.is_dir() or member.external_attr for member in members):
        raise ArchiveError("it is damaged: a member is marked as a folder")


def _check_member(reader: torch._C.PyTorchFileReader, member: zipfile.ZipInfo) -> None:
    try:
        content = reader.get_record(member.filename.partition("/")[2])
    except RuntimeError as error:
        raise ArchiveError(f"it is damaged: its part {member.filename} cannot be read") from error
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise ArchiveError(f"it is damaged: its part {member.filename} does not fit its checksum")
