"""Settings of `se_e2_a`; torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from deepmd_muon.model.descriptor.settings import DescriptorSettings, NeighborCounts, NeighborRequest
from deepmd_muon.model.shared_settings import (
    ACTIVATION,
    AUTO_SEL,
    CUTOFF,
    EXCLUDE_TYPES,
    PRECISION,
    SLOTS,
    WIDTH,
    Precision,
    axis_inside,
    slots_for,
    smoothing_inside,
    some_layer,
    some_neighbors,
)
from deepmd_muon.section import Rule, thaw
from deepmd_muon.setting import InvalidSettingError, setting


@dataclasses.dataclass(frozen=True)
class SeE2ASettings(DescriptorSettings):
    """Smooth two-body embedding descriptor built from full relative coordinates."""

    type: ClassVar[str] = "se_e2_a"

    sel: str | tuple[int, ...] = setting(
        "auto",
        minimum=0,
        **SLOTS,
        pattern=AUTO_SEL,
        forms='"auto", "auto:factor" or one whole number for each type',
        doc=(
            "Largest number of neighbours of each type that an atom may have inside rcut. 'auto:factor' takes the "
            "largest number found in the training data, times factor, rounded up to a multiple of 4; 'auto' is "
            "'auto:1.1'."
        ),
    )
    rcut: float = setting(6.0, **CUTOFF, doc="Cut-off radius [Å].")
    rcut_smth: float = setting(
        0.5, minimum=0.0, doc="Radius [Å] from which the weight of a neighbour falls smoothly to 0 at rcut."
    )
    neuron: tuple[int, ...] = setting(
        (10, 20, 40),
        **WIDTH,
        doc=(
            "Widths of the embedding net. A layer as wide as the one before it, or twice as wide, adds its input "
            "to its output."
        ),
    )
    axis_neuron: int = setting(
        4,
        **WIDTH,
        alias=("n_axis_neuron",),
        doc="Number of columns of the embedding matrix that the descriptor multiplies the whole matrix with.",
    )
    activation_function: str = setting("tanh", **ACTIVATION)
    resnet_dt: bool = setting(False, doc="Multiply the term that a layer adds to its input by a trainable vector.")
    type_one_side: bool = setting(
        False, doc="One embedding net for each type of neighbour instead of one for each pair of types."
    )
    precision: Precision = setting("default", **PRECISION)
    trainable: bool = setting(True, doc="Train the parameters of the descriptor.")
    seed: int | None = setting(None, minimum=0, doc="Seed of the initial parameters; left out, they are random.")
    exclude_types: tuple[tuple[int, int], ...] = setting((), **EXCLUDE_TYPES)
    env_protection: float = setting(0.0, minimum=0.0, doc="Length [Å] added to every distance before dividing by it.")
    set_davg_zero: bool = setting(
        False, doc="Keep the mean of the environment at 0 instead of taking it from the data; meant for atom_ener."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("rcut_smth", "rcut"), smoothing_inside),
        Rule(("axis_neuron", "neuron"), axis_inside),
        Rule(("neuron",), some_layer),
        Rule(("sel",), some_neighbors),
    )

    def neighbors(self) -> NeighborRequest:
        """Return the list of neighbours grouped by type."""
        if isinstance(self.sel, str):
            raise InvalidSettingError(f"sel must be numbers by now; found {self.sel!r}: count the neighbours first")
        return NeighborRequest(self.rcut, self.sel, by_type=True)

    @property
    def needs_counts(self) -> bool:
        """Whether `sel` is "auto"."""
        return isinstance(self.sel, str)

    def with_counts(self, count: Callable[[float], NeighborCounts]) -> SeE2ASettings:
        """Return the settings with a number for each type in `sel`."""
        if not isinstance(self.sel, str):
            return self
        wanted = self.sel
        sel = tuple(slots_for(wanted, most) for most in count(self.rcut).max_neighbors)
        return dataclasses.replace(self, sel=sel)

    def with_counts_of(self, saved: DescriptorSettings) -> SeE2ASettings:
        """Return the settings with the `sel` of a checkpoint's descriptor."""
        return dataclasses.replace(self, sel=saved.neighbors().sel)

    def statistics_key(self) -> dict[str, Any]:
        """Return the settings behind the environment rows."""
        keys = ("sel", "rcut", "rcut_smth", "type_one_side", "exclude_types", "set_davg_zero", "env_protection")
        return {"type": self.type, **{key: thaw(getattr(self, key)) for key in keys}}
