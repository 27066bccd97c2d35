"""Small work on a GPU beside large work: launches of one step that need not wait for each other."""

from __future__ import annotations

from types import TracebackType

import torch


class Beside:
    """A second stream of a device.

    What is launched inside ``with beside:`` waits for what the current stream held at the last `open`, and not for what
    it was given since; at the end the current stream waits for it. Captures take the fork and the join along.

    Parameters
    ----------
    device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._inside = torch.cuda.stream(self._stream)
        self._opened = torch.cuda.Event()

    def open(self) -> None:
        """Let what is launched inside wait for everything up to here."""
        self._opened.record(torch.cuda.current_stream(self.device))

    def __enter__(self) -> None:
        self._stream.wait_event(self._opened)
        self._inside.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.__exit__(kind, error, trace)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
