"""A model of deepmd-kit as an `EnergyModel`: its module computes energies, we sum forces."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.settings import NeighborRequest
from deepmd_muon.model.edges import edge_vectors, force_and_virial
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.hosted.adapt import make_capturable
from deepmd_muon.model.hosted.evaluators import EdgeEvaluator, evaluator_of
from deepmd_muon.model.hosted.kit import has_operators, import_deepmd_kit
from deepmd_muon.model.hosted.layout import lay_out, within_cutoff
from deepmd_muon.model.hosted.spins import spin_types, with_virtual_atoms
from deepmd_muon.model.interface import EnergyModel
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS
from deepmd_muon.model.settings import HostedSettings
from deepmd_muon.model.structures import Structures

_SPIN_WIDTH = 3  # the last columns of `Structures.aparam` of a model that reads spins
# deepmd-kit's DPA-4 leaves out shorter edges, which have no direction [Å].
_LEAST_EDGE = 1e-5


class HostedModel(EnergyModel):
    """Maps structures to energies, forces and virial by a module of deepmd-kit.

    The parts of the module are parts of this one, so that parameters and buffers have deepmd-kit's
    names.

    Parameters
    ----------
    settings
        The model section as deepmd-kit normalizes it.
    seed
        Seed of the weights of parts without a `seed` in the section; None draws fresh entropy.

    Raises
    ------
    ModelError
        If deepmd-kit cannot build the model.
    """

    settings: HostedSettings
    #: Names of the tensors of low-rank adapters. Checkpoints of a model without adapters lack them.
    adapters: frozenset[str]
    fits_own_statistics = True
    why_foreign = "deepmd-kit's module computes it"
    hosted: Any
    #: See `SpinTypes`.
    magnetic: Tensor | None
    virtual_scale: Tensor | None

    def __init__(self, settings: HostedSettings, seed: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.type_map = settings.type_map
        self.ntypes = len(self.type_map)
        module = _build(settings.plain_form(), seed)
        self.adapters = _add_adapters(module, settings.section.get("lora"))
        # The module itself is not registered: names of parameters would begin with "hosted.".
        object.__setattr__(self, "hosted", module)
        for name, child in module.named_children():
            self.add_module(name, child)
        for parameter in self.parameters():
            if not parameter.numel():  # filled only in compressed models
                parameter.requires_grad_(False)
        self.register_buffer("counted", _counted(module, self.ntypes), persistent=False)
        obstacle_to_capture = make_capturable(module)
        self.why_not_captured = self.why_not_compiled = obstacle_to_capture
        self.asks_for_compiler = bool(settings.section.get("use_compile"))
        self.adamw_substrings = _adamw_substrings(module)
        spins = spin_types(module)
        self.register_buffer("magnetic", spins.magnetic, persistent=False)
        self.register_buffer("virtual_scale", spins.virtual_scale, persistent=False)
        self._evaluator = evaluator_of(module)
        self.neighbors = self._neighbor_request()

    def _neighbor_request(self) -> NeighborRequest:
        """Return the neighbour list that the module reads."""
        by_type = not self.hosted.mixed_types()
        sel = tuple(int(count) for count in self.hosted.get_sel())
        reads_edges = isinstance(self._evaluator, EdgeEvaluator)
        if reads_edges or self.lists_depend_on_spins:
            # DPA-4 reads all neighbours within its cut-off, whatever `sel` says. Among virtual
            # atoms, deepmd-kit selects the neighbours itself.
            sel = (MOST_NEIGHBORS,)
            by_type = False
        elif not by_type:
            sel = (sum(sel),)
        return NeighborRequest(
            rcut=float(self.hosted.get_rcut()), sel=sel, by_type=by_type, bound_edges=reads_edges
        )

    def train(self, mode: bool = True) -> HostedModel:
        """Set the mode of the module, too; see `torch.nn.Module.train`."""
        self.hosted.train(mode)
        self.training = mode
        return self

    def forward(
        self, structures: Structures, *, force: bool = True, virial: bool = True
    ) -> dict[str, Tensor]:
        """Predict a batch; see `EnergyModel`."""
        self.check_batch(structures)
        edges = edge_vectors(structures)
        vectors = edges.detach().requires_grad_(force)
        variables = [vectors]
        if self.magnetic is not None:
            aparam = _aparam_with_spins(structures).detach().requires_grad_(force)
            structures = dataclasses.replace(structures, aparam=aparam)
            variables.append(aparam)
        training = torch.is_grad_enabled()
        gradients: Sequence[Tensor] = ()
        with torch.set_grad_enabled(training or force), self.precision():
            energy = self._energies(structures, vectors)
            if force:
                gradients = torch.autograd.grad(energy.sum(), variables, create_graph=training)
        if not training:
            energy = energy.detach()
        shape = structures.atype.shape
        # From sorted atoms back to (nframes, natoms); padding keeps 0.
        atom_energy = energy.new_zeros(shape.numel())
        atom_energy = atom_energy.index_copy(0, structures.order, energy).view(shape)
        out = {"energy": atom_energy.sum(1), "atom_energy": atom_energy}
        if not force:
            return out
        edge_gradient, *aparam_gradient = gradients
        out.update(force_and_virial(structures, edges, edge_gradient, virial=virial))
        if self.magnetic is not None:
            is_magnetic = self.magnetic[structures.atype.clamp(min=0)] & (structures.atype >= 0)
            force_mag = -aparam_gradient[0][..., -_SPIN_WIDTH:]
            out["force_mag"] = torch.where(is_magnetic.unsqueeze(2), force_mag, 0.0)
            out["mask_mag"] = is_magnetic
        return out

    def _energies(self, structures: Structures, vectors: Tensor) -> Tensor:
        """Return the energy of every sorted atom `(nreal,)` [eV]."""
        batch = lay_out(
            structures,
            vectors,
            numb_fparam=self.hosted.get_dim_fparam(),
            numb_aparam=self.hosted.get_dim_aparam(),
        )
        if self.virtual_scale is None:
            return batch.sorted_values(self._evaluator.energies(batch))
        least_distance = 0.0
        if not self._evaluator.virtual_by_distance:
            batch = within_cutoff(batch, self.hosted.get_rcut())
            least_distance = _LEAST_EDGE
        extended = with_virtual_atoms(batch, self.virtual_scale, least_distance=least_distance)
        energies = self._evaluator.energies(extended)
        # Virtual atoms, the second half of each frame, have none.
        return batch.sorted_values(energies.view(len(batch.atype), 2, -1)[:, 0].flatten())

    @property
    def lists_depend_on_spins(self) -> bool:
        """Whether neighbour lists have to reach virtual atoms; see `EnergyModel`."""
        return self.virtual_scale is not None and self._evaluator.virtual_by_distance

    def reach_spins(self, longest: float) -> None:
        """Widen the neighbour lists for virtual atoms of spins up to a length; see `EnergyModel`."""
        if not self.lists_depend_on_spins:
            return
        assert self.virtual_scale is not None
        # Both atoms of a pair may have a virtual atom.
        reach = 2.0 * longest * float(self.virtual_scale.max())
        rcut = max(self.rcut, float(self.hosted.get_rcut()) + reach)
        self.neighbors = dataclasses.replace(self.neighbors, rcut=rcut)

    def obsolete_names(self, saved: Collection[str]) -> frozenset[str]:
        """Return the tensors that earlier versions of DPA-4 saved; see `EnergyModel`.

        They were computed from the settings, as deepmd-kit's descriptor still does when it is
        built. When it loads a checkpoint it drops them, as this package must.
        """
        if not isinstance(self._evaluator, EdgeEvaluator):
            return frozenset()
        prefix = "atomic_model.descriptor."
        unknown = {name for name in saved if name.startswith(prefix)} - set(self.state_dict())
        return frozenset(name for name in unknown if not _is_of_adapter(name))

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the module's own context if it has one, as DPA-4 does; see `EnergyModel`."""
        return self._evaluator.precision()

    @property
    def statistics_owner(self) -> object:
        """The descriptor, which branches may share; the model itself if it has several."""
        return getattr(self.hosted.atomic_model, "descriptor", self)

    def early_parameters(self) -> set[torch.nn.Parameter]:
        """Return the parameters of the fitting net, if there is one; see `EnergyModel`."""
        net = getattr(self.hosted.atomic_model, "fitting_net", None)
        return set() if net is None else set(net.parameters())

    @property
    def out_bias(self) -> Tensor:
        """Energy that is added to each atom of a type `(1, ntypes, 1)` [eV]."""
        bias: Tensor = self.hosted.get_out_bias()
        return bias[:, : self.ntypes]  # without virtual atoms

    @property
    def why_not_frozen(self) -> str | None:
        """Why deepmd-kit cannot freeze the model in this environment; None if it can."""
        if not isinstance(self._evaluator, EdgeEvaluator) or has_operators():
            return None
        return (
            "deepmd-kit compiles DPA-4 together with its own operators for several ranks, which do "
            "not fit the installed torch: freeze in an environment with deepmd-kit's torch "
            "(pip install 'deepmd-kit[torch]')"
        )

    @property
    def frozen_without(self) -> str | None:
        """What a frozen form made in this environment cannot do; None if it can do all."""
        if isinstance(self._evaluator, EdgeEvaluator) and self.virtual_scale is not None:
            return (
                "LAMMPS can run the file on one rank only, and deepmd-kit's dp test cannot read "
                "it, because the model has virtual atoms"
            )
        if not self.hosted.has_message_passing() or has_operators():
            return None
        return (
            "LAMMPS cannot run the file, because deepmd-kit's compiled operators do not fit the "
            "installed torch; dp test and ASE can. Freeze in an environment with deepmd-kit's "
            "torch (pip install 'deepmd-kit[torch]') for LAMMPS"
        )

    def fit_statistics(self, samples: Sequence[Mapping[str, Tensor]]) -> None:
        """Fit all statistics, the energy bias included; see `EnergyModel`."""
        batches = [dict(sample) for sample in samples]
        self.hosted.compute_or_load_stat(lambda: batches)


# What deepmd-kit raises if it cannot build a model.
_BUILD_ERRORS = (
    ValueError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    KeyError,
    OSError,
    AssertionError,
)
_LONGEST_REASON = 200


def _build(section: dict[str, Any], seed: int | Sequence[int] | None) -> Any:
    """Return the module that a section describes."""
    import_deepmd_kit()
    from deepmd.pt.model.model import get_model

    for subsection in _subsections_with_seed(section):
        if subsection.get("seed") is None:
            subsection["seed"] = copy.deepcopy(seed)
    try:
        return get_model(section)
    except _BUILD_ERRORS as error:
        # Further lines of some messages print the whole model.
        reason = str(error).strip().partition("\n")[0][:_LONGEST_REASON] or type(error).__name__
        raise ModelError(f"deepmd-kit cannot build the model: {reason}") from error


def _add_adapters(module: Any, lora: Mapping[str, Any] | None) -> frozenset[str]:
    """Add deepmd-kit's low-rank adapters (LoRA) of DPA-4, and freeze what they adapt.

    Return the names of their tensors; none without `lora`, the section with rank and scale. They
    begin at an output of 0.
    """
    if not lora:
        return frozenset()
    from deepmd.pt.model.descriptor.sezm_nn import apply_lora_to_sezm

    names = set(module.state_dict())
    # The same numbers in every process; the generators of the run keep their states.
    device = next(module.parameters()).device
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed all GPUs
        for gpu in gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(0)
        apply_lora_to_sezm(module, rank=int(lora["rank"]), alpha=lora.get("alpha"))
    return frozenset(set(module.state_dict()) - names - {"_extra_state"})


def _is_of_adapter(name: str) -> bool:
    """Return whether a tensor belongs to a low-rank adapter of DPA-4."""
    return re.search(r"\.(A_by_l|B_by_l|A_m0|B_m0|[AB]_m\.\d+|lora_scaling)$", name) is not None


def _adamw_substrings(module: Any) -> tuple[str, ...]:
    """Return the parts of names that the module leaves to AdamW; deepmd-kit 3.2.0 has none."""
    from deepmd.pt.optimizer import hybrid_muon

    patterns = getattr(hybrid_muon, "adam_route_patterns", None)
    return () if patterns is None else tuple(patterns([module]))


def _aparam_with_spins(structures: Structures) -> Tensor:
    """Return the parameters of atoms, with spins in the last columns.

    Raises
    ------
    ModelError
        If the batch has no spins.
    """
    aparam = structures.aparam
    if aparam is None or aparam.shape[2] < _SPIN_WIDTH:
        raise ModelError("the model reads the spin of each atom (spin.npy); the batch has none")
    return aparam


def _subsections_with_seed(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the descriptors and fitting nets of a model section."""
    subsections: list[dict[str, Any]] = []
    for model in (section, *section.get("models", ())):
        descriptor = model.get("descriptor", {})
        subsections += descriptor.get("list", [descriptor])
        subsections.append(model.get("fitting_net", {}))
    return subsections


def _counted(module: Any, ntypes: int) -> Tensor | None:
    """Return 1 for types whose atoms have an energy, 0 for others; None if all have one."""
    excluded = [
        kind for kind in getattr(module.atomic_model, "atom_exclude_types", ()) if kind < ntypes
    ]
    if not excluded:
        return None
    counted = torch.ones(ntypes, dtype=torch.float64)
    counted[excluded] = 0.0
    return counted
