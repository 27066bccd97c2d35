"""Features of deepmd-kit 3.2 that this package lacks.

Inputs that request them can go to deepmd-kit instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from deepmd_muon.argcheck.errors import Problem
from deepmd_muon.argcheck.schema import Key
from deepmd_muon.setting import did_you_mean, nearest_of

# Names of deepmd-kit's kinds, aliases included. A kind that this package or a plugin registers does
# not count.
TYPES: dict[str, tuple[str, ...]] = {
    "model": (
        "dpa4",
        "DPA4",
        "SeZM",
        "sezm",
        "frozen",
        "pairtab",
        "pairwise_dprc",
        "linear_ener",
    ),
    "model/descriptor": (
        "loc_frame",
        "se_e2_a",
        "se_a",
        "se_e2_r",
        "se_r",
        "se_e3",
        "se_at",
        "se_a_3be",
        "se_t",
        "se_a_tpe",
        "se_a_ebd",
        "se_e3_tebd",
        "se_a_mask",
        "se_atten",
        "dpa1",
        "se_atten_v2",
        "se_a_ebd_v2",
        "se_a_tpe_v2",
        "hybrid",
        "dpa2",
        "dpa3",
        "dpa4",
        "DPA4",
        "SeZM",
        "sezm",
        "dpa4c",
        "DPA4C",
    ),
    "model/fitting_net": (
        "ener",
        "dpa4_ener",
        "sezm_ener",
        "dos",
        "population",
        "property",
        "polar",
        "dipole",
    ),
    "loss": ("ener", "ener_hess", "dens", "ener_spin", "dos", "population", "property", "tensor"),
    "optimizer": ("Adam", "AdamW", "HybridMuon", "LKF", "AdaMuon"),
}
# Keys that change the meaning of their whole section.
KEYS = {
    "nvnmd": "training for non-von-Neumann hardware",
    "model/spin": "atomic spins",
    "model/preset": "a model that a preset names",
    "model/vacuum_ref": "energies of isolated atoms as the reference",
}


def only_in_deepmd_kit(data: Mapping[str, Any], schema: Key) -> list[Problem]:
    """Return the features of an input that only deepmd-kit has.

    Callers then report these and no other problem.

    The input is in today's spelling; `schema` is the `tree` of the whole input.
    """
    features = {path: what for path, what in KEYS.items() if _value(data, path)}
    for path, names in TYPES.items():
        kind = _value(data, f"{path}/type")
        if kind in names and kind not in _own_kinds(path, schema):
            features[f"{path}/type"] = f"the {path.rpartition('/')[2].replace('_', ' ')} {kind!r}"
    return [
        Problem(path, f"deepmd-kit has {what}, this package does not", what)
        for path, what in features.items()
    ]


def with_unknown_models(
    problems: list[Problem], data: Mapping[str, Any], schema: Key
) -> list[Problem]:
    """Return the problems of an input; those of a model of unknown kind become a single one.

    Arguments are as in `only_in_deepmd_kit`.
    """
    for path in ("model", "model/descriptor"):
        kind = _value(data, f"{path}/type")
        ours = _own_kinds(path, schema) or {"standard"}
        names = {*ours, *TYPES[path]}
        if not isinstance(kind, str) or kind in names:
            continue
        near = nearest_of(kind, sorted(names))
        near_ours = nearest_of(kind, sorted(ours))
        # If one of ours is as near, the problems that it has are known, too.
        if near is None or near_ours is None or _likeness(kind, near_ours) < _likeness(kind, near):
            what = path.rpartition("/")[2]
            unknown = Problem(
                f"{path}/type",
                f"there is no {what} {kind!r}: this package has {_listed(ours)}, and deepmd-kit "
                f"adds {_listed(names - ours)}{did_you_mean(near)}",
            )
            return [unknown, *(p for p in problems if not p.path.startswith("model/"))]
    return problems


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _own_kinds(path: str, schema: Key) -> set[str]:
    """Return the kinds of a section that this package or a plugin has, aliases included."""
    section = schema
    for name in path.split("/"):
        section = section.keys[name]
    return {*section.kinds, *section.variants.alias} if section.variants else set()


def _listed(kinds: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(kinds)))


def _value(data: Any, path: str) -> Any:
    """Return the value at a path of sections and a key, None if it is absent."""
    for name in path.split("/"):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data
