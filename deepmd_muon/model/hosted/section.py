"""Numbers for `sel: "auto"` in a section of deepmd-kit, by deepmd-kit's own rules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

from deepmd_muon.model.descriptor.settings import NeighborCounts
from deepmd_muon.model.hosted.kit import import_deepmd_kit
from deepmd_muon.model.settings import HostedSettings

_NO_DISTANCE = 100.0  # where deepmd-kit's search for the smallest distance starts [Å]


def with_counts(
    settings: HostedSettings, count: Callable[[float], NeighborCounts]
) -> HostedSettings:
    """Return the settings with numbers in place of "auto"; the same ones without "auto".

    Parameters
    ----------
    settings
        The model.
    count
        Counts the neighbours in the training data within a cut-off [Å].
    """
    section = settings.plain_form()
    if '"auto' not in json.dumps(section):  # "auto" or "auto:1.1", in any sub-section
        return settings
    import_deepmd_kit()
    from deepmd.pt.model.model import BaseModel
    from deepmd.utils.update_sel import BaseUpdateSel

    def get_nbor_stat(
        self: Any, train_data: Any, type_map: Any, rcut: float, mixed_type: bool = False
    ) -> tuple[float, list[int]]:
        counts = count(rcut)
        return _NO_DISTANCE, [counts.max_total] if mixed_type else list(counts.max_neighbors)

    # deepmd-kit counts in its own data objects; its rules need the counts alone.
    with mock.patch.object(BaseUpdateSel, "get_nbor_stat", get_nbor_stat):
        resolved, _ = BaseModel.update_sel(None, list(settings.type_map), section)
    return dataclasses.replace(settings, section=resolved)
