"""Changes to a module of deepmd-kit that let a CUDA graph hold its steps, made from outside.

They replace numbers that the module reads from the device in every step by the same numbers on the
host. Results do not change.
"""

from __future__ import annotations

from typing import Any

import torch


def make_capturable(model: torch.nn.Module) -> str | None:
    """Change the modules of a model; return why a graph cannot hold its steps, None if it can."""
    obstacle = None
    for module in model.modules():
        _read_sections_once(module)
        _sort_cutoffs_once(module)
        obstacle = obstacle or _remaining_read(module)
    return obstacle


def _read_sections_once(module: Any) -> None:
    """se_e2_r: the limits of its sections are a tensor that slices its rows."""
    limits = getattr(module, "sec", None)
    if isinstance(limits, torch.Tensor):
        module.sec = limits.tolist()


def _sort_cutoffs_once(module: Any) -> None:
    """linear_ener: the cut-offs of its parts are sorted on the device in every step."""
    if hasattr(module, "_sort_rcuts_sels"):
        in_order = module._sort_rcuts_sels()
        module._sort_rcuts_sels = lambda: in_order


def _remaining_read(module: Any) -> str | None:
    """Return why a module still reads numbers from the device in every step; None if it does not."""
    kind = type(module).__name__
    if kind == "PairTabAtomicModel":
        return "deepmd-kit's tabulated pair potential looks for distances below its table"
    if kind == "DescrptBlockSeA" and not module.type_one_side:
        return "deepmd-kit's se_e2_a without type_one_side selects the atoms of each type"
    if kind == "DescrptBlockRepflows" and module.use_dynamic_sel:
        return "deepmd-kit's dpa3 with use_dynamic_sel counts its edges"
    if kind == "DescrptDPA3" and module.add_chg_spin_ebd:
        return "deepmd-kit's dpa3 checks the range of charge and spin"
    return None
