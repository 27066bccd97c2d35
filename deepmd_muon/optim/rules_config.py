"""Settings of the update rules of the Muon route, and the location of each rule. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from deepmd_muon.setting import Needs, above_zero, setting, switched_on

# Module and class of each rule in `deepmd_muon.optim.rules`, in the order in which they act.
RULES = (
    "soap:SoapMuon",
    "magma:Magma",
    "normuon:NorMuon",
    "cautious_decay:CautiousDecay",
    "norm_control:NormControl",
    "master_weights:MasterWeights",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """Settings of rules that every optimizer with a Muon route has; Magma's switch is among DeePMD's settings."""

    normuon: bool = setting(
        False,
        doc=(
            "NorMuon (arXiv:2510.05491): the update of each neuron of a matrix is divided by its running root mean "
            "square, and the matrix is rescaled to its former norm. Neurons are columns if `layout` is 'in_out', else "
            "rows."
        ),
    )
    normuon_beta: float = setting(
        0.95,
        minimum=0.0,
        below=1.0,
        needs=(switched_on("normuon"),),
        doc="Decay β₂ of the second moments of `normuon`, one per neuron.",
    )
    cautious_decay: bool = setting(
        False,
        needs=(above_zero("weight_decay"),),
        doc=(
            "Cautious weight decay (arXiv:2510.12402) on the Muon route: a weight decays only where the update does "
            "not move it away from zero."
        ),
    )
    soap_muon: bool = setting(
        False,
        doc=(
            "SOAP before the polar factor: the direction is rotated into the eigenbases of running averages of G Gᵀ "
            "and Gᵀ G, divided there by the root of its second moment, and rotated back. Experimental."
        ),
    )
    soap_beta: float = setting(
        0.9,
        minimum=0.0,
        below=1.0,
        needs=(switched_on("soap_muon"),),
        doc="Decay of the averages and of the second moment of `soap_muon`.",
    )
    norm_control: Literal["none", "radial_brake"] = setting(
        "none",
        needs=(Needs(("norm_brake",), lambda kept: kept < 1.0, "norm_brake below 1"),),
        doc=(
            "Norms of weights on the Muon route: 'radial_brake' multiplies the growth of a matrix's norm "
            "by norm_brake. Experimental."
        ),
    )
    norm_brake: float = setting(
        0.5,
        minimum=0.0,
        maximum=1.0,
        needs=(
            Needs(
                ("norm_control",),
                lambda kind: kind == "radial_brake",
                "norm_control 'radial_brake'",
            ),
        ),
        doc="Fraction of the growth of a matrix's norm that norm_control 'radial_brake' keeps.",
    )
    master_weights: bool = setting(
        False,
        doc=(
            "Keep a float32 copy of every float16 and bfloat16 parameter, on all routes: a step changes the copy, and "
            "the parameter is the rounded copy. Without it, updates below half of a weight's last bit are lost. It "
            "takes 4 bytes per weight, in the layout of the momentum and, with `offload`, in host memory."
        ),
    )
    rules: Sequence[str] = setting(
        (),
        doc=(
            "Rules of other packages on the Muon route, by their registered names, in the order in which they act (see "
            "doc/add-an-update-rule.md)."
        ),
    )
