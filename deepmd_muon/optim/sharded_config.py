"""Settings of the sharded step."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deepmd_muon.setting import check_settings, setting

Exchange = Literal["owners", "reference"]
Replication = Literal["auto", "spread", "repeat"]
GatherDtype = Literal["full", "bfloat16"]
ReturnDtype = Literal["full", "bfloat16", "float16"]
StatePlace = Literal["replicated", "sharded"]


@dataclasses.dataclass(frozen=True)
class ShardedSettings:
    """How the step of parameters that live on several processes is carried out."""

    exchange: Exchange = setting(
        "owners",
        doc=(
            "'owners' sends every matrix to one rank and its update back. 'reference' gathers every parameter and "
            "steps it everywhere: slow, needs the memory of the whole model, and defines what 'owners' must give."
        ),
    )
    replication: Replication = setting(
        "auto",
        doc=(
            "What happens where several ranks hold the same elements (DDP, HSDP): 'spread' gives each matrix one "
            "owner among all of them, 'repeat' one in every replica, which costs work and saves bytes. 'auto' takes "
            "the one that the three rates below predict to be faster."
        ),
    )
    bucket_bytes: int = setting(
        128 * 2**20,
        minimum=1,
        doc="Bound on the bytes that one rank receives or sends in one exchange; a larger matrix goes alone.",
    )
    slots: int = setting(
        3,
        minimum=1,
        maximum=10,
        doc=(
            "Buffers of the size of a bucket that the buckets take in turn, kept from step to step: with 3, one bucket "
            "is orthogonalized while the next travels to its owners and the last one back; 1 is strictly serial."
        ),
    )
    state: StatePlace = setting(
        "replicated",
        doc=(
            "Where plain parameters given with `replicas` keep momenta and Adam's moments: 'replicated' on every "
            "rank, 'sharded' each rank an equal part (ZeRO-1): DTensors in the state dict, like any sharded state. "
            "DTensors keep state laid out as themselves, whatever this says. Under `dp train` zero_stage 1 means "
            "'sharded'."
        ),
    )
    gather_dtype: GatherDtype = setting(
        "full",
        doc=(
            "Element type on the way to the owner; 'full' is float32, or float64 for float64 parameters. Rounding "
            "before the orthogonalization lifts the noise of low-rank matrices to full strength."
        ),
    )
    return_dtype: ReturnDtype = setting("full", doc="Element type of the updates on the way back.")
    free_gradients: bool = setting(
        False,
        doc="Set the gradient of a parameter that is exchanged to None as soon as its momentum has taken it up.",
    )
    flops_per_second: float = setting(1e14, above=0.0, doc="Rate of one rank's orthogonalizations, for 'auto'.")
    bytes_per_second: float = setting(2e10, above=0.0, doc="Rate at which one rank sends, for 'auto'.")
    latency: float = setting(5e-5, minimum=0.0, doc="Time that one exchange takes whatever its size, for 'auto' [s].")

    def __post_init__(self) -> None:
        check_settings(self)
