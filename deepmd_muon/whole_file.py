"""Writing a file in one piece."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing beside `path` and put it in its place at the end of the `with` block.

    It is synced to the disk before that, so a reader (or a machine that comes up after a power cut) finds the old
    file or the new one, never a part. After an exception the old file is untouched.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield cast("BinaryIO", file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes a private file; this one is meant to be read like any other.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
