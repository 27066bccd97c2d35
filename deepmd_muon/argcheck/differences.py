"""Settings with which deepmd-kit 3.2.0 does something else than their documentation says, which this package does."""

from __future__ import annotations

from deepmd_muon.argcheck.load import Branch
from deepmd_muon.loss.ener.settings import EnerLossSettings
from deepmd_muon.model.settings import DEFAULT_ALPHA, ModelSettings

EXCLUDED_ATOMS = (
    "the energy bias is fitted without the atoms of atom_exclude_types, which have no energy; "
    "deepmd-kit counts them here"
)


def unlike_deepmd_kit(branch: Branch, *, finetune: bool = False) -> list[str]:
    """Return one line for each setting of a branch with which deepmd-kit's run from the same input is another one.

    `finetune` says whether the run fits the energy bias of a trained model.
    """
    found = [f"{branch.model_path}/{line}" for line in _of_model(branch.model)]
    loss = branch.loss
    if isinstance(loss, EnerLossSettings) and not loss.has("e"):
        found.append(
            "without start_pref_e and limit_pref_e above 0, energies only give the energy bias; "
            "deepmd-kit does not read them, and its bias is 0"
        )
    if finetune and branch.model.atom_exclude_types:
        found.append(EXCLUDED_ATOMS)
    return found


def _of_model(model: ModelSettings) -> list[str]:
    found = []
    if model.use_srtab is not None and model.pair_exclude_types:
        found.append(
            "pair_exclude_types: excluded pairs are empty in the statistics of the descriptor; "
            "with use_srtab, deepmd-kit counts them there"
        )
    descriptor, fitting = model.descriptor, model.fitting_net
    if model.smin_alpha not in (None, DEFAULT_ALPHA):
        found.append(
            f"smin_alpha: deepmd-kit computes with {DEFAULT_ALPHA} whatever the input says"
        )
    if any(energy is not None for energy in getattr(fitting, "atom_ener", ())):
        found.append(
            "fitting_net/atom_ener: these energies are the bias of their types; deepmd-kit fits "
            "the bias to the data"
        )
    if getattr(fitting, "rcond", None) is not None:
        found.append("fitting_net/rcond: deepmd-kit ignores it")
    layers: int = getattr(descriptor, "attn_layer", 0)
    if layers and not getattr(descriptor, "trainable_ln", True):
        found.append(
            "descriptor/trainable_ln: deepmd-kit trains the layer normalisation all the same"
        )
    return found
