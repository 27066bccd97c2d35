"""Words for frames in the sentences of the checks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Frames that a sentence names.
_NAMED = 5


def frame_words(numbers: Sequence[int] | np.ndarray) -> str:
    """Name frames by their numbers in a system: "frame 7", or "frames 1, 2, 5 and 12 others"."""
    named = [str(int(number)) for number in numbers[:_NAMED]]
    n_unnamed = len(numbers) - len(named)
    if len(named) == 1:
        return f"frame {named[0]}"
    last = f"{n_unnamed} other{'s' if n_unnamed > 1 else ''}" if n_unnamed else named.pop()
    return f"frames {', '.join(named)} and {last}"
