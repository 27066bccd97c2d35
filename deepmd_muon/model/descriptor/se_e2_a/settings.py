"""Settings of `se_e2_a`; torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from deepmd_muon.model.descriptor.settings import (
    SEL,
    DescriptorSettings,
    EmbeddingSettings,
    NeighborCounts,
    NeighborRequest,
)
from deepmd_muon.model.shared_settings import slots_for
from deepmd_muon.section import thaw
from deepmd_muon.setting import InvalidSettingError, setting


@dataclasses.dataclass(frozen=True)
class SeE2ASettings(EmbeddingSettings):
    """Smooth two-body embedding descriptor built from full relative coordinates."""

    type: ClassVar[str] = "se_e2_a"

    sel: str | tuple[int, ...] = setting(
        "auto",
        **SEL,
        forms='"auto", "auto:factor" or one whole number for each type',
        doc=(
            "Largest number of neighbours of each type that an atom may have inside rcut. "
            "'auto:factor' takes the largest number found in the training data, times factor, "
            "rounded up to a multiple of 4; 'auto' is 'auto:1.1'."
        ),
    )
    type_one_side: bool = setting(
        False,
        doc="One embedding net for each type of neighbour instead of one for each pair of types.",
    )
    set_davg_zero: bool = setting(
        False,
        doc=(
            "Keep the mean of the environment at 0 instead of taking it from the data; meant for "
            "atom_ener."
        ),
    )

    def neighbors(self) -> NeighborRequest:
        """Return the list of neighbours grouped by type."""
        if isinstance(self.sel, str):
            raise InvalidSettingError(
                f"sel must be numbers by now; found {self.sel!r}: count the neighbours first"
            )
        return NeighborRequest(self.rcut, self.sel, by_type=True)

    def with_counts(self, count: Callable[[float], NeighborCounts]) -> SeE2ASettings:
        """Return the settings with a number for each type in `sel`."""
        if not isinstance(self.sel, str):
            return self
        rule = self.sel
        max_neighbors = count(self.rcut).max_neighbors
        sel = tuple(slots_for(rule, number) for number in max_neighbors)
        return dataclasses.replace(self, sel=sel)

    def with_counts_of(self, saved: DescriptorSettings) -> SeE2ASettings:
        """Return the settings with the `sel` of a checkpoint's descriptor."""
        return dataclasses.replace(self, sel=saved.neighbors().sel)

    def statistics_key(self) -> dict[str, Any]:
        """Return the settings behind the environment rows."""
        keys = (
            "sel",
            "rcut",
            "rcut_smth",
            "type_one_side",
            "exclude_types",
            "set_davg_zero",
            "env_protection",
        )
        return {"type": self.type, **{key: thaw(getattr(self, key)) for key in keys}}
