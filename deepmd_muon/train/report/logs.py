"""Logging set-up of a command: to stderr, and to a file when one is named."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from deepmd_muon.failures import failure_of
from deepmd_muon.files import fresh_file, make_folder_of

# The line form of deepmd-kit's log, so that scripts which read it read ours.
_CONSOLE = "[%(asctime)s] DEEPMD {rank}%(levelname)-7s %(message)s"
_FILE = "[%(asctime)s] DEEPMD {rank}%(levelname)-7s %(name)-45s %(message)s"

if TYPE_CHECKING:
    _Handler = logging.StreamHandler[TextIO]
else:
    _Handler = logging.StreamHandler  # takes a parameter from Python 3.11 on


class _StderrHandler(_Handler):
    """Write to the current `sys.stderr`, which a progress line replaces by a proxy."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore the stream that `StreamHandler.__init__` sets."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging calls it)
        """Go on when stderr leads to a full disk: there is no other place to say so."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _FileHandler(_Handler):
    """Write to a new file; `logging.FileHandler` would open it through a link.

    The log goes to stderr as well, where a file that can no longer be written causes one warning;
    the run continues.
    """

    broken = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        if not self.broken:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging calls it)
        """Stop writing to the file after a system error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.broken = True
        logging.getLogger(__name__).warning(
            "%s; the log continues without this file", failure_of(error) or error
        )

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # handleError has logged it
            self.stream.close()
        super().close()


@contextlib.contextmanager
def separate_log() -> Iterator[None]:
    """Let a block set up a log of its own; continue the present one after it."""
    logger = logging.getLogger("deepmd_muon")
    level = logger.level
    handlers = _own_handlers(logger)
    for handler in handlers:
        logger.removeHandler(handler)
    try:
        yield
    finally:
        for handler in _own_handlers(logger):
            logger.removeHandler(handler)
            handler.close()
        for handler in handlers:
            logger.addHandler(handler)
        logger.setLevel(level)


def _own_handlers(logger: logging.Logger) -> list[logging.Handler]:
    return [handler for handler in logger.handlers if getattr(handler, "_deepmd_muon", False)]


def set_up_logging(
    level: int | str = "INFO",
    path: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
    console_level: int | str | None = None,
) -> None:
    """Send this package's log to stderr and, when `path` is given, to a new file there as well.

    `console_level` is that of stderr, if it differs from the file's `level`.

    Another call replaces the set-up of the last one. In a distributed run every line shows the
    `rank`; ranks other than 0 show warnings and errors only, and rank 0 keeps the file.
    """
    logger = logging.getLogger("deepmd_muon")
    for handler in _own_handlers(logger):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    prefix = "" if rank is None else f"rank:{rank:<2d} "
    console = _StderrHandler()
    console.setFormatter(logging.Formatter(_CONSOLE.format(rank=prefix)))
    if console_level is not None:
        console.setLevel(console_level)
    if rank:
        console.setLevel(logging.WARNING)
    handlers: list[logging.Handler] = [console]
    if path is not None and not rank:
        make_folder_of(Path(path))
        stream = io.TextIOWrapper(
            fresh_file(Path(path)), encoding="utf-8", errors="backslashreplace"
        )
        file = _FileHandler(stream)
        file.setFormatter(logging.Formatter(_FILE.format(rank=prefix)))
        handlers.append(file)
    for handler in handlers:
        handler._deepmd_muon = True  # type: ignore[attr-defined]  # our mark, to find them again
        logger.addHandler(handler)
