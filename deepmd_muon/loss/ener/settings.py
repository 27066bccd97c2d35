"""Section `loss` of type `ener`: which errors count, and how much; torch-free."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, ClassVar, Literal

from deepmd_muon.loss.settings import LossSettings, Quantity
from deepmd_muon.section import Foreign, Rule
from deepmd_muon.setting import Needs, above_zero, setting, switched_on

Name = Literal["e", "f", "v", "ae", "pf"]
"""The terms, as the names of their prefactors end."""
LABELS: dict[Name, str] = {"e": "energy", "f": "force", "v": "virial", "ae": "atom_ener"}
"""The label that a term compares."""


def _prefactor(default: float, *, what: str, end: str, other: str) -> Any:
    """Declare the prefactor of a term at one end of training; `other` is that at the other end."""
    return setting(
        default,
        minimum=0.0,
        needs=(above_zero(other, neutral=(0.0,)),),
        doc=(
            f"Prefactor of the {what} term {end}. In between it is limit + "
            "(start − limit)·rate/start_lr; a term counts only when both prefactors are above 0."
        ),
    )


def start_prefactor(default: float, term: str, what: str) -> Any:
    """Declare the prefactor of a term at the start of training."""
    end = "at the start of training"
    return _prefactor(default, what=what, end=end, other=f"limit_pref_{term}")


def limit_prefactor(default: float, term: str, what: str) -> Any:
    """Declare the prefactor of a term at the end of training."""
    end = "in the limit of a vanishing learning rate"
    return _prefactor(default, what=what, end=end, other=f"start_pref_{term}")


def _counts(*terms: Name) -> Needs:
    """Return the condition that one of some terms counts."""
    reads = tuple(f"{end}_pref_{term}" for term in terms for end in ("start", "limit"))

    def any_counts(*prefactors: float) -> bool:
        pairs = zip(prefactors[::2], prefactors[1::2], strict=True)
        return any(start and limit for start, limit in pairs)

    pairs = [f"start_pref_{term} and limit_pref_{term}" for term in terms]
    return Needs(reads, any_counts, f"{' or '.join(pairs)} above 0")


def _norm_needs_mae(f_use_norm: bool, loss_func: str, use_huber: bool) -> str | None:
    if f_use_norm and loss_func != "mae" and not use_huber:
        return "needs loss_func 'mae' or use_huber; set one of them or remove it"
    return None


def _huber_without_mae(use_huber: bool, loss_func: str) -> str | None:
    if use_huber and loss_func == "mae":
        return "excludes loss_func 'mae'; keep one of them"
    return None


def _huber_without_prefactors(
    use_huber: bool, start_pref_pf: float, limit_pref_pf: float
) -> str | None:
    if use_huber and start_pref_pf and limit_pref_pf:
        return "is not defined for the term with atomic prefactors (start_pref_pf, limit_pref_pf)"
    return None


def _huber_without_relative(use_huber: bool, relative_f: float | None) -> str | None:
    return "excludes relative_f; keep one of them" if use_huber and relative_f is not None else None


def _three_deltas(huber_delta: float | tuple[float, ...]) -> str | None:
    if isinstance(huber_delta, tuple) and len(huber_delta) != 3:
        return (
            f"must be one number or three, for energy, force and virial; found {len(huber_delta)}"
        )
    return None


def some_term(*prefactors: float) -> str | None:
    """Return what is wrong with prefactors, in pairs, of which none counts; None if one does."""
    if not any(
        start and limit for start, limit in zip(prefactors[::2], prefactors[1::2], strict=True)
    ):
        return "leaves no term: start_pref_… and limit_pref_… of at least one must both be above 0"
    return None


_PREFACTORS = tuple(
    f"{end}_pref_{term}" for term in typing.get_args(Name) for end in ("start", "limit")
)


@dataclasses.dataclass(frozen=True)
class EnerLossSettings(LossSettings):
    """Errors of energy, forces, virial and atomic labels; prefactors follow the learning rate."""

    type: ClassVar[str] = "ener"

    start_pref_e: float = start_prefactor(0.02, "e", "energy")
    limit_pref_e: float = limit_prefactor(1.0, "e", "energy")
    start_pref_f: float = start_prefactor(1000.0, "f", "force")
    limit_pref_f: float = limit_prefactor(1.0, "f", "force")
    start_pref_v: float = start_prefactor(0.0, "v", "virial")
    limit_pref_v: float = limit_prefactor(0.0, "v", "virial")
    start_pref_ae: float = start_prefactor(0.0, "ae", "atomic energy (atom_ener.npy)")
    limit_pref_ae: float = limit_prefactor(0.0, "ae", "atomic energy (atom_ener.npy)")
    start_pref_pf: float = start_prefactor(
        0.0, "pf", "force with atomic prefactors (atom_pref.npy)"
    )
    limit_pref_pf: float = limit_prefactor(
        0.0, "pf", "force with atomic prefactors (atom_pref.npy)"
    )
    use_default_pf: bool = setting(
        False,
        needs=(_counts("pf"),),
        doc="Take 1 for every atomic prefactor where a system has no atom_pref.npy.",
    )
    relative_f: float | None = setting(
        None,
        above=0.0,
        needs=(_counts("f", "pf"),),
        doc="Divide the force error of an atom by its labelled force plus this [eV/Å].",
    )
    enable_atom_ener_coeff: bool = setting(
        False,
        needs=(_counts("e"),),
        doc=(
            "Weight the atomic energies with atom_ener_coeff.npy when they are summed to the "
            "energy."
        ),
    )
    loss_func: Literal["mse", "mae"] = setting(
        "mse", doc="Mean squared ('mse') or mean absolute ('mae') errors."
    )
    f_use_norm: bool = setting(
        False,
        needs=(_counts("f"),),
        doc=(
            "Take the length of an atom's force error instead of its components; for 'mae' and "
            "Huber."
        ),
    )
    use_huber: bool = setting(
        False,
        alias=("huber",),
        doc="Errors count half their square up to huber_delta and grow linearly beyond it.",
    )
    huber_delta: float | tuple[float, ...] = setting(
        0.01,
        above=0.0,
        needs=(switched_on("use_huber"),),
        doc="Where the Huber loss turns linear: one number, or three for energy, force and virial.",
    )
    intensive_ener_virial: bool = setting(
        False,
        needs=(
            Needs(
                ("loss_func", "use_huber"),
                lambda loss_func, use_huber: loss_func == "mse" and not use_huber,
                "loss_func 'mse' without use_huber",
            ),
            _counts("e", "v"),
        ),
        doc=(
            "Divide the squared errors of energy and virial by the squared number of atoms instead "
            "of the number."
        ),
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("f_use_norm", "loss_func", "use_huber"), _norm_needs_mae),
        Rule(("use_huber", "loss_func"), _huber_without_mae),
        Rule(("use_huber", "start_pref_pf", "limit_pref_pf"), _huber_without_prefactors),
        Rule(("use_huber", "relative_f"), _huber_without_relative),
        Rule(("huber_delta",), _three_deltas),
        Rule(_PREFACTORS, some_term),
    )
    hints: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("energy_weight", "pref_e"), "start_pref_e and limit_pref_e"),
        **dict.fromkeys(
            ("force_weight", "forces_weight", "pref_f"), "start_pref_f and limit_pref_f"
        ),
        **dict.fromkeys(
            ("virial_weight", "stress_weight", "pref_v"),
            "start_pref_v and limit_pref_v; both must be above 0",
        ),
        **{name: f'loss_func: "{name}"' for name in ("mse", "mae")},
    }
    foreign: ClassVar[dict[str, Foreign]] = {
        "start_pref_h": Foreign("a Hessian term", (0,)),
        "limit_pref_h": Foreign("a Hessian term", (0,)),
        "start_pref_gf": Foreign("a generalised force term", (0,)),
        "limit_pref_gf": Foreign("a generalised force term", (0,)),
        "numb_generalized_coord": Foreign("a generalised force term", (0,)),
    }

    def has(self, term: Name) -> bool:
        """Whether a term counts."""
        return bool(getattr(self, f"start_pref_{term}") and getattr(self, f"limit_pref_{term}"))

    @property
    def names(self) -> tuple[Name, ...]:
        """The terms that count."""
        return tuple(term for term in typing.get_args(Name) if self.has(term))

    @property
    def is_plain(self) -> bool:
        """Whether terms are mean squares of plain errors."""
        return self.loss_func == "mse" and not self.use_huber

    def needed_labels(self, term: Name) -> frozenset[str]:
        """Labels without which a term compares nothing."""
        if term == "pf":
            return frozenset({"force"} if self.use_default_pf else {"force", "atom_pref"})
        return frozenset({LABELS[term]})

    def obstacle_to(self, quantity: Quantity) -> str | None:
        """Return why training does not lower the error of a quantity, None if it does."""
        term: Name = quantity[0]  # type: ignore[assignment]  # e, f or v
        if self.has(term):
            return None
        start, limit = (getattr(self, f"{end}_pref_{term}") for end in ("start", "limit"))
        return (
            f"needs loss/start_pref_{term} and loss/limit_pref_{term} above 0; "
            f"found {start:g} and {limit:g}"
        )
