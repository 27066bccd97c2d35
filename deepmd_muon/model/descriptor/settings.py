"""The interface of all descriptors' settings; torch-free, so that the input check can read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

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
    smoothing_inside,
    some_layer,
    some_neighbors,
)
from deepmd_muon.section import Rule, Section, thaw
from deepmd_muon.setting import setting

Self = TypeVar("Self", bound="DescriptorSettings")


@dataclasses.dataclass(frozen=True)
class NeighborRequest:
    """The neighbour list that a descriptor reads.

    A row of the list has the neighbours of one atom, nearest first, in one section (mixed types)
    or one section for each type. In a mixed list the neighbours within a shorter cut-off are the
    first columns of the row, so that a descriptor with several cut-offs needs one list and the
    counts of `inner`.

    Attributes
    ----------
    rcut
        Cut-off radius [Å].
    sel
        Most neighbours kept: for each type when `by_type`, else one number for all.
    by_type
        Whether the columns are grouped by the neighbour's type.
    inner
        Shorter cut-offs [Å] of a mixed list, each with the most neighbours kept within it.
        `Structures.inner` then counts for every atom the leading columns inside.
    bound_edges
        Whether the model reads a list of edges, so that `Structures.edges` saves it the empty slots.
    """

    rcut: float
    sel: tuple[int, ...]
    by_type: bool
    inner: tuple[tuple[float, int], ...] = ()
    bound_edges: bool = False


class NeighborCounts(Protocol):
    """Most neighbours that an atom of the training data has within some cut-off."""

    @property
    def max_neighbors(self) -> tuple[int, ...]:
        """Return the largest counts of each type `(ntypes,)`."""

    @property
    def max_total(self) -> int:
        """Return the largest count of all types together."""


class DescriptorSettings(Section):
    """Base of a descriptor's settings: its keys, and what follows from them without a module."""

    type: ClassVar[str]
    share_levels: ClassVar[tuple[int, ...]] = (0,)
    """Levels at which branches may share the descriptor: 0 all of it, 1 its `type_embedding`."""
    one_fitting_net: ClassVar[bool] = False
    """Whether one fitting net serves all types: the descriptor depends on the centre's type."""

    def neighbors(self) -> NeighborRequest:
        """Return the neighbour list the descriptor reads.

        Raises
        ------
        InvalidSettingError
            When `needs_counts` still holds.
        """
        raise NotImplementedError(f"{type(self).__name__}.neighbors")

    @property
    def needs_counts(self) -> bool:
        """Whether a setting such as `sel: "auto"` waits for the neighbours in the training data."""
        return False

    def with_counts(self: Self, count: Callable[[float], NeighborCounts]) -> Self:
        """Return the settings with numbers in place of "auto".

        Parameters
        ----------
        count
            Counts the neighbours in the training data within a cut-off [Å]; called only if
            `needs_counts`.
        """
        return self

    def with_counts_of(self: Self, saved: DescriptorSettings) -> Self:
        """Return the settings with the numbers of a checkpoint's descriptor in place of "auto"."""
        return self

    def statistics_key(self) -> dict[str, Any]:
        """Return the settings that determine the descriptor's statistics, as plain values.

        These are all settings unless a subclass overrides the method.
        """
        return {"type": self.type, **thaw(self)}


SEL: dict[str, Any] = {"minimum": 0, **SLOTS, "pattern": AUTO_SEL}
"""Limits of a `sel` that may be left to the data."""


@dataclasses.dataclass(frozen=True)
class EmbeddingSettings(DescriptorSettings):
    """Keys of the descriptors that embed the distance of every neighbour."""

    sel: Any = setting(
        "auto",
        **SEL,
        forms='"auto", "auto:factor" or whole numbers',
        doc="Most neighbours inside rcut.",
    )
    rcut: float = setting(6.0, **CUTOFF, doc="Cut-off radius [Å].")
    rcut_smth: float = setting(
        0.5,
        minimum=0.0,
        doc="Radius [Å] from which the weight of a neighbour falls smoothly to 0 at rcut.",
    )
    neuron: tuple[int, ...] = setting(
        (10, 20, 40),
        **WIDTH,
        doc=(
            "Widths of the embedding net. A layer as wide as the one before it, or twice as wide, "
            "adds its input to its output."
        ),
    )
    axis_neuron: int = setting(
        4,
        **WIDTH,
        alias=("n_axis_neuron",),
        doc=(
            "Number of columns of the embedding matrix that the descriptor multiplies the whole "
            "matrix with."
        ),
    )
    activation_function: str = setting("tanh", **ACTIVATION)
    resnet_dt: bool = setting(
        False, doc="Multiply the term that a layer adds to its input by a trainable vector."
    )
    precision: Precision = setting("default", **PRECISION)
    trainable: bool = setting(True, doc="Train the parameters of the descriptor.")
    seed: int | None = setting(
        None, minimum=0, doc="Seed of the initial parameters; left out, they are random."
    )
    exclude_types: tuple[tuple[int, int], ...] = setting((), **EXCLUDE_TYPES)
    env_protection: float = setting(
        0.0, minimum=0.0, doc="Length [Å] added to every distance before dividing by it."
    )

    rules = (
        Rule(("rcut_smth", "rcut"), smoothing_inside),
        Rule(("axis_neuron", "neuron"), axis_inside),
        Rule(("neuron",), some_layer),
        Rule(("sel",), some_neighbors),
    )

    @property
    def needs_counts(self) -> bool:
        """Whether `sel` is "auto"."""
        return isinstance(self.sel, str)
