"""Settings of the sharded step."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deepmd_muon.setting import Needs, check_settings, setting

Exchange = Literal["owners", "reference"]
Replication = Literal["auto", "spread", "repeat"]
GatherDtype = Literal["full", "bfloat16"]
ReturnDtype = Literal["full", "bfloat16", "float16"]
StatePlace = Literal["replicated", "sharded"]


_BY_OWNERS = Needs(("exchange",), lambda exchange: exchange == "owners", "exchange 'owners'")
_PREDICTED = Needs(
    ("replication",), lambda replication: replication == "auto", "replication 'auto'"
)


@dataclasses.dataclass(frozen=True)
class ShardedSettings:
    """How several processes step the parameters that they share."""

    exchange: Exchange = setting(
        "owners",
        doc=(
            "'owners' sends every matrix to one rank and its update back. 'reference' gathers every parameter and "
            "steps it on every rank: slow, needs memory for the whole model, and defines the result of 'owners'."
        ),
    )
    replication: Replication = setting(
        "auto",
        needs=(_BY_OWNERS,),
        doc=(
            "Where several ranks hold the same elements (DDP, HSDP): 'spread' gives each matrix one owner among all "
            "replicas; 'repeat' gives it one owner per replica, which costs work and saves bytes. Replicas that repeat "
            "the work with state in parts gather the momenta before the step, if these fit a bucket. 'auto' takes the "
            "faster way, as predicted from the three rates below."
        ),
    )
    bucket_bytes: int = setting(
        128 * 2**20,
        minimum=1,
        needs=(_BY_OWNERS,),
        doc="Bound on the bytes that one rank receives or sends in one exchange; a larger matrix goes alone.",
    )
    slots: int = setting(
        3,
        minimum=1,
        maximum=10,
        needs=(_BY_OWNERS,),
        doc=(
            "Number of bucket-sized buffers, kept from step to step. With 3, one bucket is orthogonalized while the "
            "next is sent to its owners and the previous one back; 1 is strictly serial."
        ),
    )
    state: StatePlace = setting(
        "replicated",
        doc=(
            "Where plain parameters given with `replicas` keep momenta and Adam's moments: 'replicated': whole on "
            "every rank; 'sharded': an equal part on each rank (ZeRO-1), as DTensors in the state dict. The state of "
            "DTensor parameters always has their layout. Under `dp train`, zero_stage 1 selects 'sharded'."
        ),
    )
    gather_dtype: GatherDtype = setting(
        "full",
        needs=(_BY_OWNERS,),
        doc=(
            "Element type of the messages to the owner; 'full' is float32, or float64 for float64 parameters. Rounding "
            "before the orthogonalization amplifies the noise of low-rank matrices to full strength."
        ),
    )
    return_dtype: ReturnDtype = setting(
        "full", needs=(_BY_OWNERS,), doc="Element type of the returned updates."
    )
    free_gradients: bool = setting(
        False,
        needs=(_BY_OWNERS,),
        doc="Set the gradient of an exchanged parameter to None as soon as its momentum is updated.",
    )
    flops_per_second: float = setting(
        1e14,
        above=0.0,
        needs=(_PREDICTED, _BY_OWNERS),
        doc="Rate of one rank's orthogonalizations, for 'auto'.",
    )
    bytes_per_second: float = setting(
        2e10,
        above=0.0,
        needs=(_PREDICTED, _BY_OWNERS),
        doc="Rate at which one rank sends, for 'auto'.",
    )
    latency: float = setting(
        5e-5,
        minimum=0.0,
        needs=(_PREDICTED, _BY_OWNERS),
        doc="Fixed time of one exchange, for 'auto' [s].",
    )

    def __post_init__(self) -> None:
        check_settings(self)
