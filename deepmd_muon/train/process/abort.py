"""End a run that cannot continue with one message: step, cause, remedy, last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from deepmd_muon.failures import failure_of
from deepmd_muon.train.errors import RunError
from deepmd_muon.train.ranks.watchdog import is_lost_connection

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Moment:
    """The present activity of a run.

    Attributes
    ----------
    doing
        In words.
    step
        1-based; 0 before the first.
    reads_data
        Whether it waits for data, so that any error comes from reading them.
    between_steps
        Whether the last step is complete and the next one has not begun.
    """

    doing: str
    step: int = 0
    reads_data: bool = False
    between_steps: bool = False

    def __str__(self) -> str:
        when = f"at step {self.step}" if self.step else "before its first step"
        return f"{when} ({self.doing})"


@contextlib.contextmanager
def explained(moment: Callable[[], Moment], newest: Callable[[], Path | None]) -> Iterator[None]:
    """Turn the error that ends a run in a `with` block into a `RunError`.

    A full disk, lack of memory, a failing device and, after the first step, unreadable data are not
    errors of this package, so no traceback is shown. Other errors are not changed, and the log says
    how far the run was. `moment` and `newest` return the run's activity and last checkpoint; they
    are called when it ends.
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        cause = _cause(error, moment())
        if cause is None:
            if moment().step:
                log.error("training stopped %s; %s", moment(), last_good(newest()))
            raise
        raise RunError(f"training stopped {moment()}: {cause}; {last_good(newest())}") from error


def _cause(error: Exception, moment: Moment) -> str | None:
    """Return the cause in words; None when only a traceback, or another rank, shows it."""
    if is_lost_connection(error):
        return None
    names_cause = type(error).__module__.startswith("deepmd_muon")
    # An error at the end of a graph capture may hide a lack of memory, which is in the chain of its
    # causes.
    for link in [error] if names_cause else _chain(error):
        if failure := failure_of(link):
            return failure
    if moment.step and (names_cause or isinstance(error, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}" if moment.reads_data else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def last_good(checkpoint: Path | None) -> str:
    """Name the checkpoint to continue from."""
    return (
        f"the last good checkpoint is {checkpoint}"
        if checkpoint
        else "no checkpoint has been written yet"
    )
