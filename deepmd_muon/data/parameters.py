"""Frame and atomic parameters: inputs of a model beside the structure, such as a temperature or a charge."""

from __future__ import annotations

from typing import Any, NamedTuple


class Parameters(NamedTuple):
    """The parameters that a model reads."""

    fparam: int = 0  # how many a frame has (``fparam.npy``)
    aparam: int = 0  # how many an atom has (``aparam.npy``)
    # Frame parameters of frames without ``fparam.npy``; None where they need it.
    default_fparam: tuple[float, ...] | None = None
    partial: bool = False  # whether values may be missing, which are NaN then

    @property
    def required(self) -> bool:
        """Whether a prediction needs values that nobody but the caller has."""
        return self.aparam > 0 or (self.fparam > 0 and self.default_fparam is None)

    @classmethod
    def of(cls, fitting_net: Any) -> Parameters:
        """Return what a fitting net with these settings reads; nothing if it does not know of parameters."""
        default = getattr(fitting_net, "default_fparam", None)
        return cls(getattr(fitting_net, "numb_fparam", 0), getattr(fitting_net, "numb_aparam", 0), default)
