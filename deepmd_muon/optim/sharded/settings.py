"""Settings of the sharded step."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deepmd_muon.optim.setting import check_settings, setting

Exchange = Literal["owners", "reference"]
Replication = Literal["auto", "spread", "repeat"]
GatherDtype = Literal["full", "bfloat16"]
ReturnDtype = Literal["full", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class ShardedSettings:
    """How the Muon step of sharded and replicated parameters is carried out."""

    exchange: Exchange = setting(
        "owners",
        choices=("owners", "reference"),
        doc=(
            "'owners' sends every matrix to one rank and its update back. 'reference' gathers every parameter and "
            "steps it everywhere: slow, needs the memory of the whole model, and defines what 'owners' must give."
        ),
    )
    replication: Replication = setting(
        "auto",
        choices=("auto", "spread", "repeat"),
        doc=(
            "What happens where several ranks hold the same elements (DDP, HSDP): 'spread' gives each matrix one "
            "owner among all of them, 'repeat' one in every replica, which costs work and saves bytes. 'auto' takes "
            "the one that the three rates below predict to be faster."
        ),
    )
    bucket_bytes: int = setting(
        64 * 2**20,
        minimum=1,
        doc="Bound on the bytes that one rank receives or sends in one exchange; a larger matrix goes alone.",
    )
    ahead: int = setting(
        1,
        minimum=0,
        maximum=8,
        doc="Exchanges that are under way while a bucket is orthogonalized; 0 is strictly serial.",
    )
    gather_dtype: GatherDtype = setting(
        "full",
        choices=("full", "bfloat16"),
        doc=(
            "Element type on the way to the owner; 'full' is float32, or float64 for float64 parameters. Rounding "
            "before the orthogonalization lifts the noise of low-rank matrices to full strength."
        ),
    )
    return_dtype: ReturnDtype = setting(
        "full", choices=("full", "bfloat16", "float16"), doc="Element type of the updates on the way back."
    )
    free_gradients: bool = setting(
        False,
        doc="Set the gradient of a parameter that is exchanged to None as soon as its momentum has taken it up.",
    )
    flops_per_second: float = setting(1e14, above=0.0, doc="Rate of one rank's orthogonalizations, for 'auto'.")
    bytes_per_second: float = setting(2e10, above=0.0, doc="Rate at which one rank sends, for 'auto'.")
    latency: float = setting(5e-5, minimum=0.0, doc="Time that one exchange takes whatever its size, for 'auto' [s].")

    def __post_init__(self) -> None:
        check_settings(self)
