"""Property tests draw the same examples in every run; with HYPOTHESIS_PROFILE=default they draw others each time."""

from __future__ import annotations

import contextlib
import os

with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, database=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
