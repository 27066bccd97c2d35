"""Settings of DPA-1 (`se_atten`, also called `dpa1`, and `se_atten_v2`); torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from deepmd_muon.model.descriptor.settings import (
    SEL,
    DescriptorSettings,
    EmbeddingSettings,
    NeighborCounts,
    NeighborRequest,
)
from deepmd_muon.model.shared_settings import WIDTH, slots_for
from deepmd_muon.section import Foreign, thaw
from deepmd_muon.setting import InvalidSettingError, Needs, above_zero, setting

TebdInputMode = Literal["concat", "strip"]

_ATTENDS = above_zero("attn_layer")
_BY_FACTOR = Needs(("temperature",), lambda temperature: temperature is None, "temperature null")


@dataclasses.dataclass(frozen=True)
class AttentionSettings(EmbeddingSettings):
    """Settings of both forms of DPA-1."""

    share_levels: ClassVar[tuple[int, ...]] = (0, 1)
    one_fitting_net: ClassVar[bool] = True

    sel: str | int | tuple[int, ...] = setting(
        "auto",
        **SEL,
        forms='"auto", "auto:factor", a whole number or a list of whole numbers',
        doc=(
            "Largest number of neighbours of all types that an atom may have inside rcut; of a "
            "list, only the sum counts. 'auto:factor' takes the largest number found in the "
            "training data, times factor, rounded up to a multiple of 4; 'auto' is 'auto:1.1'."
        ),
    )
    tebd_dim: int = setting(8, **WIDTH, doc="Length of the trained vector of each type.")
    type_one_side: bool = setting(
        False, doc="Embed the neighbour's type only, not that of the centre."
    )
    attn: int = setting(
        128, minimum=1, needs=(_ATTENDS,), doc="Width of queries, keys and values of the attention."
    )
    attn_layer: int = setting(2, minimum=0, doc="Number of attention layers.")
    attn_dotr: bool = setting(
        True,
        needs=(_ATTENDS,),
        doc="Multiply attention weights by the cosine of the angle between neighbours.",
    )
    normalize: bool = setting(
        True, needs=(_ATTENDS,), doc="Scale queries, keys and values to length 1."
    )
    scaling_factor: float = setting(
        1.0,
        above=0.0,
        needs=(_ATTENDS, _BY_FACTOR),
        doc="Without temperature, attention scores are divided by sqrt(attn · scaling_factor).",
    )
    temperature: float | None = setting(
        None, needs=(_ATTENDS,), doc="Factor of the attention scores in place of the one above."
    )
    concat_output_tebd: bool = setting(
        True, doc="Append the vector of the atom's type to the descriptor."
    )
    trainable_ln: bool = setting(
        True, needs=(_ATTENDS,), doc="Train scale and shift of the layer normalisation."
    )
    ln_eps: float | None = setting(
        None, above=0.0, needs=(_ATTENDS,), doc="ε of the layer normalisation; 1e-5 when left out."
    )
    use_tebd_bias: bool = setting(False, doc="Add a trained vector to those of the types.")
    seed: int | None = setting(
        None,
        minimum=0,
        doc=(
            "Seed of the initial parameters, equal to deepmd-kit's from the same seed; left out, "
            "they are random."
        ),
    )
    foreign: ClassVar[dict[str, Foreign]] = {
        "lmax": Foreign("angular moments beyond vectors, which deepmd-kit has", (1,)),
        "use_econf_tebd": Foreign(
            "type vectors from electron configurations, which deepmd-kit has", (False,)
        ),
        "attn_mask": Foreign("a masked diagonal of the attention", (False,)),
        "stripped_type_embedding": Foreign(
            'the older spelling of tebd_input_mode ("strip" for true)'
        ),
        "spin": Foreign("atomic spins"),
    }

    def neighbors(self) -> NeighborRequest:
        """Return one list of the neighbours of all types."""
        if isinstance(self.sel, str):
            raise InvalidSettingError(
                f"sel must be numbers by now; found {self.sel!r}: count the neighbours first"
            )
        slots = self.sel if isinstance(self.sel, int) else sum(self.sel)
        return NeighborRequest(self.rcut, (slots,), by_type=False)

    def with_counts(self, count: Callable[[float], NeighborCounts]) -> AttentionSettings:
        """Return the settings with a number in `sel`."""
        if not isinstance(self.sel, str):
            return self
        return dataclasses.replace(self, sel=slots_for(self.sel, count(self.rcut).max_total))

    def with_counts_of(self, saved: DescriptorSettings) -> AttentionSettings:
        """Return the settings with the `sel` of a checkpoint's descriptor."""
        return dataclasses.replace(self, sel=sum(saved.neighbors().sel))

    def statistics_key(self) -> dict[str, Any]:
        """Return the settings behind the environment rows."""
        keys = ("sel", "rcut", "rcut_smth", "set_davg_zero", "env_protection")
        settings = {key: thaw(getattr(self, key)) for key in keys}
        if self.exclude_types:
            settings["exclude_types"] = thaw(self.exclude_types)
        return {"type": self.type, **settings}


@dataclasses.dataclass(frozen=True)
class DPA1Settings(AttentionSettings):
    """DPA-1: embedding of distances and types, then attention between the neighbours of an atom."""

    type: ClassVar[str] = "se_atten"

    tebd_input_mode: TebdInputMode = setting(
        "concat",
        doc=(
            "How the types enter the embedding: 'concat' appends their vectors to the distance; "
            "'strip' multiplies the embedding of the distance by 1 + the output of a net of their "
            "own."
        ),
    )
    smooth_type_embedding: bool = setting(
        False,
        alias=("smooth_type_embdding",),
        needs=(
            Needs(
                ("attn_layer", "tebd_input_mode"),
                lambda layers, mode: layers > 0 or mode == "strip",
                "attn_layer above 0 or tebd_input_mode 'strip'",
            ),
        ),
        doc="Let attention, and the net of the types in 'strip' mode, vanish smoothly at rcut.",
    )
    set_davg_zero: bool = setting(
        True, doc="Keep the mean of the environment at 0 instead of taking it from the data."
    )


@dataclasses.dataclass(frozen=True)
class SeAttenV2Settings(AttentionSettings):
    """Smooth DPA-1: 'se_atten' with tebd_input_mode 'strip' and smooth_type_embedding true."""

    type: ClassVar[str] = "se_atten_v2"
    tebd_input_mode: ClassVar[TebdInputMode] = "strip"
    smooth_type_embedding: ClassVar[bool] = True

    set_davg_zero: bool = setting(
        False, doc="Keep the mean of the environment at 0 instead of taking it from the data."
    )
