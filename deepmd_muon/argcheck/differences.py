"""Settings that deepmd-kit 3.2.0 treats otherwise than it documents them; this package does not."""

from __future__ import annotations

from deepmd_muon.argcheck.load import Branch
from deepmd_muon.loss.ener.settings import EnerLossSettings
from deepmd_muon.model.settings import DEFAULT_ALPHA, ModelSettings

EXCLUDED_ATOMS = (
    "the energy bias is fitted without the atoms of atom_exclude_types, which have no energy; "
    "deepmd-kit counts them here"
)


def unlike_deepmd_kit(branch: Branch, *, finetune: bool = False) -> list[str]:
    """Return one line for each setting of a branch that makes deepmd-kit's run another one.

    `finetune` says whether the run fits the energy bias of a trained model.
    """
    lines = [f"{branch.model_path}/{line}" for line in _model_lines(branch.model)]
    loss = branch.loss
    if isinstance(loss, EnerLossSettings) and not loss.has("e"):
        lines.append(
            "without start_pref_e and limit_pref_e above 0, energies only give the energy bias; "
            "deepmd-kit does not read them, and its bias is 0"
        )
    if finetune and branch.model.atom_exclude_types:
        lines.append(EXCLUDED_ATOMS)
    return lines


def _model_lines(model: ModelSettings) -> list[str]:
    descriptor = model.descriptor
    fitting_net = model.fitting_net
    lines = []
    if model.use_srtab is not None and model.pair_exclude_types:
        lines.append(
            "pair_exclude_types: excluded pairs are empty in the statistics of the descriptor; "
            "with use_srtab, deepmd-kit counts them there"
        )
    if model.smin_alpha not in (None, DEFAULT_ALPHA):
        lines.append(
            f"smin_alpha: deepmd-kit computes with {DEFAULT_ALPHA} whatever the input says"
        )
    if any(energy is not None for energy in getattr(fitting_net, "atom_ener", ())):
        lines.append(
            "fitting_net/atom_ener: these energies are the bias of their types; deepmd-kit fits "
            "the bias to the data"
        )
    if getattr(fitting_net, "rcond", None) is not None:
        lines.append("fitting_net/rcond: deepmd-kit ignores it")
    layers: int = getattr(descriptor, "attn_layer", 0)
    if layers and not getattr(descriptor, "trainable_ln", True):
        lines.append(
            "descriptor/trainable_ln: deepmd-kit trains the layer normalisation all the same"
        )
    return lines
