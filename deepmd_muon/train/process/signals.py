"""End a run after a checkpoint at SIGINT and SIGTERM, and never while one is being written."""

from __future__ import annotations

import logging
import signal
import types
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

#: Signals that end a run after its step. The ranks of a run agree on them in this order.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles SIGINT and SIGTERM in a `with` block of the main thread; idle in others.

    The first signal asks for the end of the run. Later ones end the process at once, as usual,
    unless a checkpoint is being written: then the run ends after it, however many come. SIGQUIT and
    SIGKILL are not handled.

    Parameters
    ----------
    request
        Asks for the end of the run after the present step; gets the signal's number.
    writing
        Returns whether a checkpoint is being written.
    repeats
        Signals after the first that change nothing. Under torchrun a process gets Ctrl-C twice,
        from the terminal and from torchrun.
    """

    def __init__(
        self, request: Callable[[int], None], writing: Callable[[], bool], repeats: int = 0
    ) -> None:
        self.number: int | None = None
        self._request = request
        self._writing = writing
        self._repeats = repeats
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        try:
            for caught in SIGNALS:
                self._previous[caught] = signal.signal(caught, self._receive)
        except ValueError:  # only the main thread may handle signals
            self._previous.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for caught, handler in self._previous.items():
            signal.signal(caught, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.number is None:
            self.number = number
            self._request(number)
            log.warning("%s: finishing the step and saving", name)
        elif self._writing():
            log.warning("%s: the run ends when its checkpoint is written", name)
        elif self._repeats:
            self._repeats -= 1
        else:
            log.warning("%s again: ending at once, without a checkpoint of this step", name)
            signal.signal(number, self._previous[signal.Signals(number)])
            signal.raise_signal(number)
