"""Words for frames in the sentences of the checks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Frames that a sentence names.
_NAMED = 5


def frame_words(numbers: Sequence[int] | np.ndarray) -> str:
    """Name frames by their numbers in a system: "frame 7", or "frames 1, 2, 5 and 12 others"."""
    named = [int(number) for number in numbers[:_NAMED]]
    others = len(numbers) - len(named)
    if len(named) == 1:
        return f"frame {named[0]}"
    listed = ", ".join(map(str, named if others else named[:-1]))
    return f"frames {listed} and {f'{others} others' if others else named[-1]}"
