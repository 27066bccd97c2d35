"""Settings of `dpa3`; torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from deepmd_muon.model.descriptor.settings import (
    DescriptorSettings,
    NeighborCounts,
    NeighborRequest,
)
from deepmd_muon.model.shared_settings import (
    ACTIVATION,
    AUTO_SEL,
    CUTOFF,
    EXCLUDE_TYPES,
    PRECISION,
    SLOTS,
    WIDTH,
    Precision,
    slots_for,
    smoothing_inside,
    some_neighbors,
)
from deepmd_muon.section import Foreign, Rule, Section, section, thaw
from deepmd_muon.setting import InvalidSettingError, Needs, above_zero, setting, switched_on

UpdateStyle = Literal["res_residual", "res_avg", "res_incr"]
_TRAINED_STEPS = Needs(
    ("update_style",), lambda style: style == "res_residual", "update_style 'res_residual'"
)
OLD_FIXED_DEVIATION = 0.3  # the value that deepmd-kit's `skip_stat` implies

_SEL: dict[str, Any] = {
    "minimum": 1,
    **SLOTS,
    "pattern": AUTO_SEL,
    "forms": '"auto", "auto:factor" or a whole number',
}


def _not_above(key: str, *limits: str) -> Rule:
    """Return the rule that a number must not exceed some others; it does not judge "auto"."""

    def problem(value: Any, *bounds: Any) -> str | None:
        if any(isinstance(number, str) for number in (value, *bounds)):
            return None
        if value <= min(bounds):
            return None
        bound_texts = [f"{limit} {bound:g}" for limit, bound in zip(limits, bounds, strict=True)]
        return (
            f"must not exceed {' and '.join(limits)}; "
            f"found {value:g} with {' and '.join(bound_texts)}"
        )

    return Rule((key, *limits), problem)


def _compressible(rate: int, e_rate: int, a_dim: int) -> str | None:
    if rate and (a_dim * e_rate) % (2 * rate):
        return (
            "twice its value must divide a_dim · a_compress_e_rate; "
            f"found {rate} with {a_dim} · {e_rate}"
        )
    if rate and (a_dim // rate) % 2:
        return f"must leave an even number of features of a_dim; found {rate} with {a_dim}"
    return None


def _enough_to_split(
    use_split: bool, rate: int, e_rate: int, a_dim: int, n_dim: int, e_dim: int
) -> str | None:
    if not (use_split and rate):
        return None
    needs = (
        (a_dim // rate, n_dim, "n_dim"),
        (a_dim // (2 * rate) * e_rate, e_dim, "e_dim"),
    )
    for needed, present, key in needs:
        if needed > present:
            return (
                f"takes the first {needed} of {present} features ({key}); "
                f"raise {key} or a_compress_rate, or set it to false"
            )
    return None


def _sequential_needs(sequential: bool, update_style: str, update_angle: bool) -> str | None:
    if sequential and (update_style != "res_residual" or not update_angle):
        return (
            "needs update_style 'res_residual' and update_angle true, as in deepmd-kit; found "
            f"{update_style!r} and {str(update_angle).lower()}"
        )
    return None


def _smooth_when_dynamic(use_dynamic_sel: bool, smooth_edge_update: bool) -> str | None:
    if use_dynamic_sel and not smooth_edge_update:
        return "needs smooth_edge_update true"
    return None


def _skip_stat_fixes(skip_stat: bool, fix_stat_std: float) -> str | None:
    if skip_stat and fix_stat_std != OLD_FIXED_DEVIATION:
        return (
            f"stands for fix_stat_std {OLD_FIXED_DEVIATION}; "
            f"found it with fix_stat_std {fix_stat_std:g}: remove it"
        )
    return None


@dataclasses.dataclass(frozen=True)
class RepflowSettings(Section):
    """Layers that update nodes, edges and angles."""

    e_rcut: float = setting(**CUTOFF, doc="Cut-off radius of edges [Å].")
    e_rcut_smth: float = setting(
        above=0.0, doc="Radius [Å] from which the weight of an edge falls smoothly."
    )
    e_sel: int | str = setting(
        **_SEL,
        doc=(
            "Largest number of neighbours that an atom may have inside e_rcut; it scales the sums "
            "over edges. 'auto:factor' takes the largest number found in the training data, times "
            "factor, rounded up to a multiple of 4; 'auto' is 'auto:1.1'."
        ),
    )
    a_rcut: float = setting(**CUTOFF, doc="Cut-off radius of the edges that form angles [Å].")
    a_rcut_smth: float = setting(
        above=0.0, doc="Radius [Å] from which the weight of an edge in its angles falls smoothly."
    )
    a_sel: int | str = setting(
        **_SEL, doc="As e_sel, for the neighbours inside a_rcut and the sums over angles."
    )
    n_dim: int = setting(128, **WIDTH, doc="Features of a node (atom).")
    e_dim: int = setting(64, **WIDTH, doc="Features of an edge.")
    a_dim: int = setting(
        64, **WIDTH, needs=(switched_on("update_angle"),), doc="Features of an angle."
    )
    nlayers: int = setting(6, minimum=1, doc="Number of layers.")
    a_compress_rate: int = setting(
        0,
        needs=(switched_on("update_angle"),),
        minimum=0,
        doc=(
            "Angles see a_dim/c features of their node and a_dim/(2c)·a_compress_e_rate of their "
            "edges; 0: all."
        ),
    )
    a_compress_e_rate: int = setting(
        1,
        minimum=1,
        needs=(above_zero("a_compress_rate"),),
        doc="Factor on the features of an edge that angles see.",
    )
    a_compress_use_split: bool = setting(
        False,
        needs=(above_zero("a_compress_rate"),),
        doc=(
            "Angles see the first features of node and edges instead of a trained linear map of "
            "all."
        ),
    )
    n_multi_edge_message: int = setting(
        1,
        minimum=1,
        doc="Number of messages that an edge sends to its node, each with an update of its own.",
    )
    axis_neuron: int = setting(
        4,
        **WIDTH,
        doc=(
            "Number of columns of the directional sums that the symmetric update multiplies them "
            "with."
        ),
    )
    fix_stat_std: float = setting(
        OLD_FIXED_DEVIATION,
        minimum=0.0,
        doc=(
            "Deviation that the environment of an atom is divided by; 0 takes it from the "
            "training data."
        ),
    )
    skip_stat: bool = setting(False, doc=f"Older way to say fix_stat_std {OLD_FIXED_DEVIATION}.")
    update_angle: bool = setting(
        True, doc="Have angles; without them, only nodes and edges are updated."
    )
    update_style: UpdateStyle = setting(
        "res_residual",
        doc=(
            "How the updates u_1 … u_n are added to features x: 'res_residual' x + Σ r_k·u_k with "
            "trained r_k, 'res_avg' (x + Σ u_k)/√(n + 1), 'res_incr' x + Σ u_k/√n."
        ),
    )
    update_residual: float = setting(
        0.1,
        minimum=0.0,
        needs=(_TRAINED_STEPS,),
        doc="Start of the trained r_k: their value or deviation.",
    )
    update_residual_init: Literal["const", "norm"] = setting(
        "const",
        needs=(_TRAINED_STEPS,),
        doc=(
            "Start the r_k at update_residual ('const') or at random around 0 with this deviation "
            "('norm')."
        ),
    )
    smooth_edge_update: bool = setting(
        False,
        needs=(switched_on("update_angle"),),
        doc=(
            "Edges without angles take no message from angles; else they take their own features "
            "as message."
        ),
    )
    edge_init_use_dist: bool = setting(
        False,
        alias=("edge_use_dist",),
        doc=(
            "Edges start from their length, without activation, instead of the weighted inverse "
            "length."
        ),
    )
    use_exp_switch: bool = setting(
        False,
        alias=("use_env_envelope",),
        doc=(
            "Weights fall as exp(−exp(20·(r − rcut_smth)/rcut_smth)) instead of the quintic "
            "polynomial."
        ),
    )
    use_dynamic_sel: bool = setting(
        False,
        doc=(
            "Divide e_sel and a_sel by sel_reduce_factor in the scales of sums, so that they may "
            "be generous."
        ),
    )
    sel_reduce_factor: float = setting(
        10.0, above=0.0, needs=(switched_on("use_dynamic_sel"),), doc="See use_dynamic_sel."
    )
    sequential_update: bool = setting(
        False,
        doc=(
            "Update edges by themselves, then angles, edges by angles, and nodes, each from the "
            "features updated before it, instead of all from those before the layer."
        ),
    )

    rules = (
        Rule(("e_rcut_smth", "e_rcut"), smoothing_inside),
        Rule(("a_rcut_smth", "a_rcut"), smoothing_inside),
        _not_above("a_rcut", "e_rcut"),
        _not_above("a_sel", "e_sel"),
        Rule(("e_sel",), some_neighbors),
        Rule(("a_sel",), some_neighbors),
        _not_above("axis_neuron", "n_dim", "e_dim"),
        Rule(("a_compress_rate", "a_compress_e_rate", "a_dim"), _compressible),
        Rule(
            (
                "a_compress_use_split",
                "a_compress_rate",
                "a_compress_e_rate",
                "a_dim",
                "n_dim",
                "e_dim",
            ),
            _enough_to_split,
        ),
        Rule(("sequential_update", "update_style", "update_angle"), _sequential_needs),
        Rule(("use_dynamic_sel", "smooth_edge_update"), _smooth_when_dynamic),
        Rule(("skip_stat", "fix_stat_std"), _skip_stat_fixes),
    )
    foreign: ClassVar[dict[str, Foreign]] = {
        "optim_update": Foreign(
            "an order of evaluation, always the fast one here", (True,), inert=True
        ),
    }

    @property
    def linear_compression(self) -> bool:
        """Whether angles see linear maps of their node and edges."""
        return self.update_angle and self.a_compress_rate > 0 and not self.a_compress_use_split

    @property
    def message(self) -> int:
        """Features of all messages of an edge to its node together."""
        return self.n_multi_edge_message * self.n_dim

    @property
    def angle_node(self) -> int:
        """Features of its node that an angle sees."""
        return self.a_dim // self.a_compress_rate if self.a_compress_rate else self.n_dim

    @property
    def angle_edge(self) -> int:
        """Features of each of its edges that an angle sees."""
        if not self.a_compress_rate:
            return self.e_dim
        return self.a_dim // (2 * self.a_compress_rate) * self.a_compress_e_rate

    @property
    def angle_input(self) -> int:
        """Features of an angle, its node and its two edges together."""
        return self.a_dim + self.angle_node + 2 * self.angle_edge

    @property
    def slots(self) -> tuple[int, int]:
        """`e_sel` and `a_sel` as numbers.

        Raises
        ------
        InvalidSettingError
            When one is still "auto".
        """
        if isinstance(self.e_sel, str) or isinstance(self.a_sel, str):
            raise InvalidSettingError(
                f"e_sel and a_sel must be numbers; found {self.e_sel!r} and {self.a_sel!r}: "
                "count the neighbours first"
            )
        return self.e_sel, self.a_sel

    @property
    def scales(self) -> tuple[float, float]:
        """Numbers that sums over edges and over angles are divided by (or their roots)."""
        factor = self.sel_reduce_factor if self.use_dynamic_sel else 1.0
        edges, angles = self.slots
        return edges / factor, angles / factor


@dataclasses.dataclass(frozen=True)
class DPA3Settings(DescriptorSettings):
    """Graph descriptor DPA-3: atoms, edges and angles that message each other over layers."""

    type: ClassVar[str] = "dpa3"
    share_levels: ClassVar[tuple[int, ...]] = (0, 1)
    one_fitting_net: ClassVar[bool] = True

    repflow: RepflowSettings = section(doc="The layers of the graph.")
    concat_output_tebd: bool = setting(
        False, doc="Append the vector of an atom's type to its descriptor."
    )
    activation_function: str = setting("silu", **ACTIVATION)
    precision: Precision = setting("default", **PRECISION)
    trainable: bool = setting(True, doc="Train the parameters of the descriptor.")
    seed: int | None = setting(
        None, minimum=0, doc="Seed of the initial parameters; left out, they are random."
    )
    use_tebd_bias: bool = setting(False, doc="Add a trained bias to the vectors of types.")
    exclude_types: tuple[tuple[int, int], ...] = setting((), **EXCLUDE_TYPES)
    env_protection: float = setting(
        0.0, minimum=0.0, doc="Added to distances [Å] where the environment divides by them."
    )

    foreign: ClassVar[dict[str, Foreign]] = {
        "add_chg_spin_ebd": Foreign("an embedding of charge and spin", (False,)),
        "default_chg_spin": Foreign("an embedding of charge and spin"),
        "use_econf_tebd": Foreign("type vectors from electron configurations", (False,)),
        "use_loc_mapping": Foreign("a way of indexing atoms", (True,), inert=True),
    }

    def neighbors(self) -> NeighborRequest:
        """Return one mixed list, with the counts inside `a_rcut`."""
        repflow = self.repflow
        edges, angles = repflow.slots
        return NeighborRequest(
            repflow.e_rcut, (edges,), by_type=False, inner=((repflow.a_rcut, angles),)
        )

    @property
    def needs_counts(self) -> bool:
        """Whether `e_sel` or `a_sel` is "auto"."""
        return isinstance(self.repflow.e_sel, str) or isinstance(self.repflow.a_sel, str)

    def with_counts(self, count: Callable[[float], NeighborCounts]) -> DPA3Settings:
        """Return the settings with numbers in `e_sel` and `a_sel`."""
        repflow = self.repflow
        e_sel = repflow.e_sel
        if isinstance(e_sel, str):
            e_sel = slots_for(e_sel, count(repflow.e_rcut).max_total)
        a_sel = repflow.a_sel
        if isinstance(a_sel, str):
            a_sel = slots_for(a_sel, count(repflow.a_rcut).max_total)
        return self._with_slots(e_sel, a_sel)

    def with_counts_of(self, saved: DescriptorSettings) -> DPA3Settings:
        """Return the settings with the numbers of a saved descriptor in place of "auto"."""
        if not isinstance(saved, DPA3Settings):
            return self
        e_sel = self.repflow.e_sel
        if isinstance(e_sel, str):
            e_sel = saved.repflow.e_sel
        a_sel = self.repflow.a_sel
        if isinstance(a_sel, str):
            a_sel = saved.repflow.a_sel
        return self._with_slots(e_sel, a_sel)

    def _with_slots(self, e_sel: int | str, a_sel: int | str) -> DPA3Settings:
        repflow = dataclasses.replace(self.repflow, e_sel=e_sel, a_sel=a_sel)
        return dataclasses.replace(self, repflow=repflow)

    def statistics_key(self) -> dict[str, Any]:
        """Return the settings behind the environment rows."""
        key: dict[str, Any] = {"type": self.type}
        for name in ("e_sel", "e_rcut", "e_rcut_smth", "use_exp_switch", "fix_stat_std"):
            key[name] = getattr(self.repflow, name)
        # At their defaults these do not change the rows.
        for name in ("exclude_types", "env_protection"):
            value = getattr(self, name)
            if value:
                key[name] = thaw(value)
        return key
