"""`dp show FILE ATTRIBUTE...`: the same report on a model as deepmd-kit's command of this form."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import HandOver

log = logging.getLogger(__name__)

ATTRIBUTES = (
    "model-branch",
    "type-map",
    "descriptor",
    "fitting-net",
    "size",
    "observed-type",
    "serialization-tree",
)
# deepmd-kit's bound [eV]: a type with a smaller energy bias was not in the data.
_UNOBSERVED = 1e-6
# Words and key of attributes that deepmd-kit shows for each branch.
_SHOWN_BY_BRANCH = {
    "type-map": ("type_map", "type_map"),
    "descriptor": ("descriptor parameter", "descriptor"),
    "fitting-net": ("fitting_net parameter", "fitting_net"),
}


def log_attributes(path: str, attributes: Sequence[str], *, trust: bool = False) -> None:
    """Log attributes of the model in a checkpoint or frozen file, in deepmd-kit's order and words.

    `trust` runs a frozen file whatever operators it calls, see `Predictor`. Attributes that only
    deepmd-kit knows are handed over: a serialization tree, the size of a model that this package
    does not have.
    """
    if "serialization-tree" in attributes:
        raise HandOver("'show serialization-tree'")
    from deepmd_muon.checkpoint_file.file import read_checkpoint, understood
    from deepmd_muon.infer.frozen import FrozenModel, is_frozen
    from deepmd_muon.model.deepmd_kit import PREFIX

    with understood(path):
        if is_frozen(path):
            frozen = FrozenModel(path, "cpu", trust=trust)
            lines = _describe_single(
                path, attributes, frozen.model_section(), frozen.observed_types()
            )
        else:
            state = read_checkpoint(path)["model"]
            section = state["_extra_state"]["model_params"]
            if "model_dict" in section:
                lines = _describe_branches(path, attributes, state, section["model_dict"])
            else:
                biased = _biased_types(state, section, PREFIX)
                lines = _describe_single(path, attributes, section, biased)
    for line in lines:
        log.info(line)


def _describe_single(
    path: str, attributes: Sequence[str], section: Mapping[str, Any], biased: list[str] | None
) -> list[str]:
    """Return the lines on a single model."""
    if "model-branch" in attributes:
        raise CommandError(
            f"show model-branch needs a multi-task checkpoint; {path} holds a single model"
        )
    lines = ["This is a singletask model"]
    if "type-map" in attributes:
        lines.append(f"The type_map is {list(section['type_map'])}")
    if "descriptor" in attributes:
        lines.append(f"The descriptor parameter is {_part_of(section, 'descriptor')}")
    if "fitting-net" in attributes:
        lines.append(f"The fitting_net parameter is {_part_of(section, 'fitting_net')}")
    if "size" in attributes:
        lines += _size_lines(section)
    if "observed-type" in attributes:
        observed = _observed_types(path, section, biased)
        lines += [
            "The observed types for this model: ",
            f"Number of observed types: {len(observed)} ",
            f"Observed types: {observed} ",
        ]
    return lines


def _part_of(section: Mapping[str, Any], part: str) -> Any:
    """Return a part of a model, or those of each model in a sum."""
    if part in section:
        return section[part]
    return [model.get(part) for model in section.get("models", ())]


def _biased_types(
    state: Mapping[str, Any], section: Mapping[str, Any], prefix: str
) -> list[str] | None:
    """Return the types with an energy bias that is not 0; None if the file does not say."""
    endings = ("atomic_model.out_bias", "backbone_model.atomic_model.out_bias")  # with spins
    bias = next((state[name] for end in endings if (name := prefix + end) in state), None)
    if bias is None:
        return None
    type_map = section["type_map"]
    # (1, ntypes, 1), virtual atoms of spins last
    pairs = zip(type_map, bias[0, : len(type_map)], strict=True)
    return [name for name, energy in pairs if bool((energy.abs() > _UNOBSERVED).any())]


def _describe_branches(
    path: str,
    attributes: Sequence[str],
    state: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Return the lines on a checkpoint of several branches."""
    lines = ["This is a multitask model"]
    if "model-branch" in attributes:
        names = [*sections, "RANDOM"]
        lines.append(
            f"Available model branches are {names}, where 'RANDOM' means using a randomly "
            "initialized fitting net."
        )
        rows = [
            (name, ", ".join(section.get("model_branch_alias") or ()))
            for name, section in sections.items()
        ]
        lines.append("Detailed information: \n" + _table([("Model Branch", "Alias"), *rows]))
    for attribute, (words, key) in _SHOWN_BY_BRANCH.items():
        if attribute in attributes:
            for name, section in sections.items():
                lines.append(f"The {words} of branch {name} is {_part_of(section, key)}")
    if "size" in attributes:
        _, *sizes = _size_lines(next(iter(sections.values())))
        lines += ["Parameter counts for a single branch model:", *sizes]
    if "observed-type" in attributes:
        lines.append("The observed types for each branch: ")
        all_types: list[str] = []
        for name, section in sections.items():
            biased = _biased_types(state, section, f"model.{name}.")
            observed = _observed_types(path, section, biased)
            all_types += [kind for kind in observed if kind not in all_types]
            lines += [
                f"{name}: Number of observed types: {len(observed)} ",
                f"{name}: Observed types: {observed} ",
            ]
        lines += [
            f"TOTAL number of observed types in the model: {len(all_types)} ",
            f"TOTAL observed types in the model: {all_types} ",
        ]
    return lines


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in a frame as deepmd-kit draws it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [rule]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines += [f"| {' | '.join(cells)} |", rule]
    return "\n".join(lines)


def _size_lines(section: Mapping[str, Any]) -> list[str]:
    from deepmd_muon.model import build_model
    from deepmd_muon.model.deepmd_kit import settings_of
    from deepmd_muon.model.errors import ForeignModelError

    try:
        model = build_model(settings_of(section))
    except ForeignModelError as error:
        raise HandOver(f"this model ({error})") from error
    # A sum of models has several of each.
    sizes = {"descriptor": 0, "fitting-net": 0, "total": 0}
    for name, p in model.named_parameters():
        if "atomic_model." not in name:
            continue
        sizes["descriptor"] += p.numel() if "descriptor." in name else 0
        sizes["fitting-net"] += p.numel() if "fitting_net." in name else 0
        sizes["total"] += p.numel()
    return [
        "Parameter counts:",
        *(f"Parameters in {name}: {size:,}" for name, size in sizes.items()),
    ]


def _observed_types(path: str, section: Mapping[str, Any], biased: list[str] | None) -> list[str]:
    """Return the types that the training data had, in the order of the type map."""
    recorded = section.get("info", {}).get("observed_type", biased)
    if recorded is None:
        raise CommandError(
            f"{path} does not say which types its training data had; give its checkpoint"
        )
    # deepmd-kit also records the types of virtual atoms.
    return [kind for kind in recorded if kind in section["type_map"]]
