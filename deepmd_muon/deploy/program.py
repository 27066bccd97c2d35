"""The program in a frozen file, with the methods that LAMMPS and deepmd-kit's `DeepPot` call.

The plugin asks for `get_rcut`, `get_ntypes`, `get_type_map`, `get_dim_fparam`, `get_dim_aparam`,
`is_aparam_nall` and `has_message_passing`, and runs `forward_lower` each step. `DeepPot` runs
`forward_common_lower` where it finds neighbours itself, else `forward`. Our predictor runs
`forward_lower`.

All of them end in `Program._evaluate`, which takes some local atoms at a time, the centres: find
their neighbours (`_near`), describe them, apply the fitting net, and pull the slope of the energy
back to the edges, whose sums are forces and virial (`_add_centres`).

TorchScript compiles this file. It forbids some idioms: methods of a module cannot call each other
with default arguments, and comprehensions have no condition.
"""

import copy
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.coverage import Coverage
from deepmd_muon.deploy.images import all_pairs, with_images
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE
from deepmd_muon.model.energy_model import DescriptorModel
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.registry import DESCRIPTORS, FITTING_NETS
from deepmd_muon.model.scripted.near import Near, neighbors_within, sort_by_type
from deepmd_muon.model.short_range import edge_slope

# Settings of the model that a program implements; the scripted forms of its parts list theirs in
# `covers`.
COVERAGE = Coverage(
    frozenset(
        {
            "type_map",
            "descriptor",
            "fitting_net",
            "pair_exclude_types",
            "atom_exclude_types",
            "use_srtab",
            "smin_alpha",
            "sw_rmin",
            "sw_rmax",
            # The statistics that follow from these are among the weights.
            "data_stat_nbatch",
            "data_stat_protect",
        }
    )
)

# ----- from a model to a program ------------------------------------------------------------------


def check_coverage(what: str, covers: Coverage | None, settings: Any) -> None:
    """Raise ModelError naming the settings that are not covered; None covers all."""
    names = () if covers is None else covers.uncovered(settings)
    if names:
        raise ModelError(
            f"the {what} cannot be frozen with this value of {', '.join(names)}: frozen files do "
            f"not have the setting. "
            "Compute with the checkpoint, or train with the default"
        )


def _scripted_part(registry: Any, settings: Any, module: Any) -> Any:
    """Return the scripted form of a descriptor or fitting net."""
    label = f"{registry.what} {registry.name_of(settings)!r}"
    scripted = registry.scripted(settings)
    if scripted is None:
        raise ModelError(f"the {label} cannot be frozen: it was registered without `scripted`")
    check_coverage(label, getattr(scripted, "covers", None), settings)
    return scripted(module)


class _WithoutParameters(torch.nn.Module):
    """A scripted fitting net that reads neither frame nor atomic parameters."""

    default_fparam: Tensor
    if TYPE_CHECKING:
        net: Any

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net
        self.numb_fparam = 0
        self.numb_aparam = 0
        self.register_buffer("default_fparam", torch.zeros(0))

    @torch.jit.export
    def energy_and_slope(
        self, descriptor: Tensor, counts: list[int], parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Call the net, which takes no parameters."""
        results: tuple[Tensor, Tensor] = self.net.energy_and_slope(descriptor, counts)
        return results


# ----- input and results of an evaluation ---------------------------------------------------------


class Frames(NamedTuple):
    """The arguments of `forward_lower`, with the atoms of all frames in a row.

    Attributes
    ----------
    coord
        Positions `(nframes·nall, 3)` [Å], float64.
    types
        Types `(nframes·nall,)`, −1 for padding.
    centre
        Number of every local atom among all atoms `(nframes·nloc,)`.
    listed
        `nlist`: atoms near each local atom `(nframes·nloc, n)`, −1 for an empty entry.
    nall, nloc
        Atoms, and local atoms, of a frame.
    """

    coord: Tensor
    types: Tensor
    centre: Tensor
    listed: Tensor
    nall: int
    nloc: int


class Sums(NamedTuple):
    """Results: a chunk of centres writes its energies, and adds to the others, in place.

    Attributes
    ----------
    energy
        Of every local atom `(nframes·nloc,)`.
    force
        On every atom `(nframes·nall, 3)`.
    virial
        Of every frame `(nframes, 9)`.
    atom_virial
        Of every atom `(nframes·nall, 9)`, or without rows.
    """

    energy: Tensor
    force: Tensor
    virial: Tensor
    atom_virial: Tensor


# ----- the program --------------------------------------------------------------------------------


class Program(torch.nn.Module):
    """Energy, forces and virial from positions and a neighbour list; see the module.

    Parameters
    ----------
    model
        The trained model; its weights are copied.
    section
        The model section in deepmd-kit's form; `DeepPot` reads it from the file.
    min_distance
        Smallest distance in the training data [Å]; `dp compress` reads it from the file.

    Raises
    ------
    ModelError
        When a part of the model has no scripted form, or does not cover a setting.
    """

    # Centres of a chunk: bounds memory, and the data that a cache has to hold.
    centres_cpu: Final[int]
    centres_gpu: Final[int] = 8192
    type_map: list[str]
    sel: list[int]
    bias: Tensor  # (ntypes,) [eV]
    has_table: Final[bool]  # whether `short_range` blends the energy with that of a table
    excluded: Tensor  # negative marks for pairs of types that ignore each other (ntypes, ntypes)
    counted: Tensor  # 1, or 0 for types without energy (ntypes,)
    if TYPE_CHECKING:  # TorchScript finds the types of submodules itself
        descriptor: Any
        fitting_net: Any
        short_range: Any

    def __init__(
        self,
        model: DescriptorModel,
        section: dict[str, Any],
        min_distance: float = UNKNOWN_DISTANCE,
    ) -> None:
        super().__init__()
        atomic_model = model.atomic_model
        check_coverage("model", COVERAGE, model.settings)
        self.descriptor = _scripted_part(
            DESCRIPTORS, model.settings.descriptor, atomic_model.descriptor
        )
        self.centres_cpu = int(getattr(self.descriptor, "centres_cpu", 256))
        net = _scripted_part(FITTING_NETS, model.settings.fitting_net, atomic_model.fitting_net)
        self.fitting_net = net if hasattr(net, "numb_fparam") else _WithoutParameters(net)

        self.excludes = model.excluded is not None
        excluded = torch.zeros(model.ntypes, model.ntypes, dtype=torch.int64)
        if model.excluded is not None:
            excluded = model.excluded.clone()
        self.register_buffer("excluded", excluded)
        counted = torch.ones(model.ntypes, dtype=torch.float64)
        if model.counted is not None:
            counted = model.counted.clone()
        self.register_buffer("counted", counted)
        self.has_table = model.short_range is not None
        self.short_range = (
            copy.deepcopy(model.short_range) if self.has_table else torch.nn.Identity()
        )
        self.type_map = list(model.type_map)
        self.rcut = float(model.rcut)
        self.sel = list(model.sel)
        self.ntypes = len(self.type_map)
        self.section = json.dumps(section)
        self.min_distance = min_distance
        self.register_buffer("bias", atomic_model.out_bias.detach()[0, :, 0].clone())

    @torch.jit.export
    def forward_lower(  # noqa: PLR0913 - the signature that LAMMPS calls
        self,
        extended_coord: Tensor,
        extended_atype: Tensor,
        nlist: Tensor,
        mapping: Tensor | None = None,
        fparam: Tensor | None = None,
        aparam: Tensor | None = None,
        do_atomic_virial: bool = False,
        comm_dict: dict[str, Tensor] | None = None,
        charge_spin: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Evaluate atoms and ghosts with a given neighbour list.

        Parameters
        ----------
        extended_coord
            Positions of local atoms, then ghosts `(nframes, nall, 3)` [Å].
        extended_atype
            Types `(nframes, nall)`, −1 for padding.
        nlist
            Numbers of the atoms near each local atom `(nframes, nloc, n)`, in any order, farther
            than the cut-off or not, −1 for an empty entry.
        mapping
            Local atom that each atom is an image of `(nframes, nall)`; message passing needs it or
            `comm_dict`.
        fparam
            Frame parameters `(nframes, numb_fparam)`.
        aparam
            Parameters of local atoms `(nframes, nloc, numb_aparam)`.
        charge_spin
            Not used.
        do_atomic_virial
            Whether to return the virial of every atom.
        comm_dict
            How ranks exchange ghosts: the arguments of `deepmd::border_op`.

        Returns
        -------
        dict
            `energy (nframes, 1)`, `atom_energy (nframes, nloc, 1)` [eV], `extended_force (nframes,
            nall, 3)` [eV/Å], `virial (nframes, 9)` and, if asked for, `extended_virial (nframes,
            nall, 9)` [eV]; energies float64, the others in the precision of the positions.
        """
        return self._evaluate(
            extended_coord,
            extended_atype,
            nlist,
            mapping=mapping,
            fparam=fparam,
            aparam=aparam,
            do_atomic_virial=do_atomic_virial,
            comm_dict=comm_dict,
        )

    def _evaluate(
        self,
        extended_coord: Tensor,
        extended_atype: Tensor,
        nlist: Tensor,
        mapping: Tensor | None,
        fparam: Tensor | None,
        aparam: Tensor | None,
        do_atomic_virial: bool,
        comm_dict: dict[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Implement `forward_lower`."""
        nframes = extended_atype.shape[0]
        parameters = self._parameter_rows(nlist, fparam, aparam)
        frames = _flatten(extended_coord, extended_atype, nlist)
        sums = _zero_sums(frames, nframes, do_atomic_virial)
        chunk = self.centres_gpu if extended_coord.is_cuda else self.centres_cpu
        # Centres with similar numbers of neighbours share a chunk, if there are several.
        n_listed = torch.zeros_like(frames.centre)
        if frames.centre.shape[0] > chunk:
            n_listed = (frames.listed >= 0).sum(1)
        order = sort_by_type(frames.types[frames.centre], n_listed)

        feature_rows = torch.empty([0], dtype=torch.int64, device=order.device)
        comm: dict[str, Tensor] = {}
        if self.descriptor.message_passing:
            chunk = max(1, order.shape[0])  # all at once: layers read features of other centres
            if comm_dict is not None:
                comm = comm_dict
            else:
                feature_rows = _feature_rows(order, frames, mapping)
        # At least once: a rank without atoms still takes part in exchanges.
        for begin in range(0, max(1, order.shape[0]), chunk):
            rows = order[begin : begin + chunk]
            near = self._near(frames, rows, feature_rows, comm)
            self._add_centres(frames, near, rows, parameters[rows], sums)
        return _outputs(sums, nframes, do_atomic_virial, extended_coord.dtype)

    def _parameter_rows(
        self, nlist: Tensor, fparam: Tensor | None, aparam: Tensor | None
    ) -> Tensor:
        """Return frame and atomic parameters of every local atom `(nframes·nloc, n)`."""
        nframes = nlist.shape[0]
        nloc = nlist.shape[1]
        # Without columns, so that cat also works if there are no parameters.
        columns = [torch.zeros([nframes * nloc, 0], dtype=torch.float64, device=nlist.device)]
        numb_fparam: int = self.fitting_net.numb_fparam
        numb_aparam: int = self.fitting_net.numb_aparam
        if numb_fparam > 0:
            frame_values = fparam if fparam is not None else self.get_default_fparam()
            if frame_values is None:
                raise ValueError("this potential reads frame parameters: give fparam")
            frame_rows = frame_values.to(torch.float64).reshape([-1, numb_fparam])
            frame_rows = frame_rows.expand([nframes, numb_fparam])
            columns.append(frame_rows.repeat_interleave(nloc, dim=0))
        if numb_aparam > 0:
            if aparam is None:
                raise ValueError("this potential reads atomic parameters: give aparam")
            columns.append(aparam.to(torch.float64).reshape([nframes * nloc, numb_aparam]))
        return torch.cat(columns, dim=1)

    def _near(
        self,
        frames: Frames,
        rows: Tensor,
        feature_rows: Tensor,
        comm: dict[str, Tensor],
    ) -> Near:
        """Return the neighbourhoods of some centres, given by their rows in `frames.centre`."""
        centre = frames.centre[rows]
        kind = frames.types[centre]
        counts: list[int] = torch.bincount(kind, minlength=self.ntypes).cpu().tolist()
        neighbor, sections, vectors = neighbors_within(
            frames.coord, frames.types, centre, frames.listed[rows], self.descriptor.request
        )
        if self.excludes:
            neighbor_types = frames.types[neighbor.clamp(min=0)].clamp(min=0)
            # Negative marks replace the neighbours of excluded pairs.
            mark = self.excluded[kind.unsqueeze(1), neighbor_types]
            neighbor = torch.where((mark < 0) & (neighbor >= 0), mark, neighbor)
        first_atom = torch.div(centre, frames.nall, rounding_mode="floor") * frames.nall
        return Near(
            centre=centre,
            kind=kind,
            counts=counts,
            neighbor=neighbor,
            sections=sections,
            vectors=vectors,
            types=frames.types,
            first_type=frames.types[first_atom].clamp(min=0),
            place=feature_rows,
            nlocal=frames.nloc,
            comm=comm,
        )

    def _add_centres(
        self,
        frames: Frames,
        near: Near,
        rows: Tensor,
        parameters: Tensor,
        sums: Sums,
    ) -> None:
        """Add energies, forces and virials of some centres, given by their rows, to the sums."""
        d, tape = self.descriptor.describe(near)
        # E of the net, and dE/dD.
        energy, d_bar = self.fitting_net.energy_and_slope(d, near.counts, parameters)
        counted = self.counted[near.kind]
        frame = torch.div(near.centre, frames.nall, rounding_mode="floor")
        if self.has_table:
            # E = (1 − w)·E_net + w·E_table, with a weight w that depends on distances, too.
            neighbor_types = frames.types[near.neighbor.clamp(min=0)]
            neighbor_types = torch.where(near.neighbor >= 0, neighbor_types, -1)
            blend = self.short_range(near.vectors, near.kind, neighbor_types)
            share = 1.0 - blend.weight
            # `edge_slope` reads E_net: it comes before `energy` is blended.
            slope = counted.view(-1, 1, 1) * edge_slope(blend, energy, near.vectors)
            add_edges(near, slope, frame, sums)
            energy = share * energy + blend.weight * blend.energy
            d_bar = share.unsqueeze(1).to(d_bar.dtype) * d_bar
        # The bias is not blended.
        sums.energy[rows] = (energy + self.bias[near.kind]) * counted
        d_bar = d_bar * counted.unsqueeze(1).to(d_bar.dtype)
        add_edges(near, self.descriptor.pullback(d_bar, tape), frame, sums)

    @torch.jit.export
    def forward_common_lower(
        self,
        extended_coord: Tensor,
        extended_atype: Tensor,
        nlist: Tensor,
        mapping: Tensor | None = None,
        fparam: Tensor | None = None,
        aparam: Tensor | None = None,
        do_atomic_virial: bool = False,
        charge_spin: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the results of `forward_lower` under the names of deepmd-kit's Python code.

        deepmd-kit sums `energy_derv_c` over atoms to get the virial. Without `do_atomic_virial` the
        first atom therefore holds the whole virial.
        """
        results = self._evaluate(
            extended_coord,
            extended_atype,
            nlist,
            mapping=mapping,
            fparam=fparam,
            aparam=aparam,
            do_atomic_virial=do_atomic_virial,
            comm_dict=None,
        )
        virial = results["virial"]
        if do_atomic_virial:
            atom_virial = results["extended_virial"]
        else:
            atom_virial = virial.new_zeros([extended_atype.shape[0], extended_atype.shape[1], 9])
            atom_virial[:, :1] = virial.unsqueeze(1)
        return {
            "energy": results["atom_energy"],
            "energy_redu": results["energy"],
            "energy_derv_r": results["extended_force"].unsqueeze(2),
            "energy_derv_c": atom_virial.unsqueeze(2),
            "energy_derv_c_redu": virial.unsqueeze(1),
            "mask": (extended_atype[:, : nlist.shape[1]] >= 0).to(torch.int32),
        }

    def forward(
        self,
        coord: Tensor,
        atype: Tensor,
        box: Tensor | None = None,
        fparam: Tensor | None = None,
        aparam: Tensor | None = None,
        do_atomic_virial: bool = False,
        charge_spin: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Evaluate frames; the neighbours are found by comparing all pairs.

        Parameters
        ----------
        coord
            Positions `(nframes, natoms, 3)` or `(nframes, 3·natoms)` [Å].
        atype
            Types `(nframes, natoms)`, −1 for padding.
        box
            Cell vectors `(nframes, 9)` or `(nframes, 3, 3)` [Å]; None without periodicity.
        fparam
            Frame parameters `(nframes, numb_fparam)`.
        aparam
            Atomic parameters `(nframes, natoms, numb_aparam)`.
        charge_spin
            Not used.
        do_atomic_virial
            Whether to return the virial of every atom.

        Returns
        -------
        dict
            `energy (nframes, 1)`, `atom_energy (nframes, natoms, 1)`, `force (nframes, natoms, 3)`,
            `virial (nframes, 9)`, `mask (nframes, natoms)`, 0 for padding and else 1, and, if asked
            for, `atom_virial (nframes, natoms, 9)`.
        """
        nframes, natoms = atype.shape
        results: list[dict[str, Tensor]] = []
        for frame in range(nframes):
            cell = None if box is None else box[frame].view(3, 3)
            frame_values = None if fparam is None else fparam.reshape([nframes, -1])[frame]
            atom_values = None if aparam is None else aparam.reshape([nframes, natoms, -1])[frame]
            results.append(
                self._evaluate_frame(
                    coord[frame].view(natoms, 3),
                    atype[frame],
                    box=cell,
                    fparam=frame_values,
                    aparam=atom_values,
                    do_atomic_virial=do_atomic_virial,
                )
            )
        out: dict[str, Tensor] = {}
        for key in results[0]:
            out[key] = torch.cat([result[key] for result in results])
        return out

    def _evaluate_frame(
        self,
        coord: Tensor,
        atype: Tensor,
        box: Tensor | None,
        fparam: Tensor | None,
        aparam: Tensor | None,
        do_atomic_virial: bool,
    ) -> dict[str, Tensor]:
        """Evaluate one frame; arguments as in `forward`, without the axis of frames."""
        natoms = atype.shape[0]
        extended = coord
        types = atype
        owner = torch.arange(natoms, device=coord.device)
        if box is not None:
            extended, types, owner = with_images(coord, atype, box, self.rcut)
        nlist = all_pairs(extended, natoms, self.rcut)[None]
        results = self._evaluate(
            extended[None],
            types[None],
            nlist,
            mapping=owner[None],
            fparam=fparam,
            aparam=aparam,
            do_atomic_virial=do_atomic_virial,
            comm_dict=None,
        )
        force = torch.zeros_like(extended[:natoms])
        out = {
            "energy": results["energy"],
            "atom_energy": results["atom_energy"],
            "virial": results["virial"],
            "force": force.index_add(0, owner, results["extended_force"][0])[None],
        }
        if do_atomic_virial:
            atom_virial = torch.zeros([natoms, 9], dtype=extended.dtype, device=extended.device)
            atom_virial = atom_virial.index_add(0, owner, results["extended_virial"][0])
            out["atom_virial"] = atom_virial[None]
        out["mask"] = (atype[None] >= 0).to(torch.int32)
        return out

    @torch.jit.export
    def get_rcut(self) -> float:
        """Return the cut-off [Å]."""
        return self.rcut

    @torch.jit.export
    def get_ntypes(self) -> int:
        """Return the number of types."""
        return self.ntypes

    @torch.jit.export
    def get_type_map(self) -> list[str]:
        """Return the element symbol of every type."""
        return self.type_map

    @torch.jit.export
    def get_sel(self) -> list[int]:
        """Return the neighbour slots: for each type, or one number for all."""
        return self.sel

    @torch.jit.export
    def get_dim_fparam(self) -> int:
        """Return how many frame parameters there are."""
        number: int = self.fitting_net.numb_fparam
        return number

    @torch.jit.export
    def get_dim_aparam(self) -> int:
        """Return how many atomic parameters there are."""
        number: int = self.fitting_net.numb_aparam
        return number

    @torch.jit.export
    def has_default_fparam(self) -> bool:
        """Return whether frame parameters may be left out."""
        has_default: bool = self.fitting_net.default_fparam.shape[0] > 0
        return has_default

    @torch.jit.export
    def get_default_fparam(self) -> Tensor | None:
        """Return the frame parameters of calls without any `(numb_fparam,)`."""
        default: Tensor = self.fitting_net.default_fparam
        return default if default.shape[0] > 0 else None

    @torch.jit.export
    def is_aparam_nall(self) -> bool:
        """Return whether ghosts have atomic parameters."""
        return False

    @torch.jit.export
    def get_sel_type(self) -> list[int]:
        """Return the types that have an energy; empty for all."""
        counted: list[int] = []
        if float(self.counted.min()) == 0.0:
            for kind in range(self.ntypes):
                if float(self.counted[kind]) > 0.0:
                    counted.append(kind)  # noqa: PERF401 (no comprehension with a condition)
        return counted

    @torch.jit.export
    def has_message_passing(self) -> bool:
        """Return whether features of ghosts have to be exchanged between ranks."""
        needed: bool = self.descriptor.message_passing
        return needed

    @torch.jit.export
    def model_output_type(self) -> list[str]:
        """Return the prediction of the fitting net."""
        return ["energy"]

    @torch.jit.export
    def get_model_def_script(self) -> str:
        """Return the model section as JSON."""
        return self.section

    @torch.jit.export
    def get_min_nbor_dist(self) -> float:
        """Return the smallest distance in the training data [Å], negative when unknown."""
        return self.min_distance

    @torch.jit.export
    def get_observed_type_list(self) -> list[str]:
        """Return names of types in the training data: with a bias above deepmd-kit's bound [eV]."""
        names: list[str] = []
        for kind in range(self.ntypes):
            if abs(float(self.bias[kind])) > 1e-6:
                name = self.type_map[kind]
                names.append(name)
        return names


# ----- steps of an evaluation ----------------------------------------------------------------------


def _flatten(coord: Tensor, types: Tensor, nlist: Tensor) -> Frames:
    """Return the frames from `(nframes, nall, 3)`, `(nframes, nall)` and `(nframes, nloc, n)`."""
    nframes, nall = types.shape
    nloc = nlist.shape[1]
    offset = torch.arange(nframes, device=coord.device) * nall
    local = torch.arange(nloc, device=coord.device)
    listed = torch.where(nlist >= 0, nlist + offset.view(-1, 1, 1), -1)
    return Frames(
        coord=coord.reshape(nframes * nall, 3).to(torch.float64),
        types=types.reshape(-1),
        centre=(offset.unsqueeze(1) + local).view(-1),
        listed=listed.view(nframes * nloc, -1),
        nall=nall,
        nloc=nloc,
    )


def _zero_sums(frames: Frames, nframes: int, do_atomic_virial: bool) -> Sums:
    """Return the sums before the first centre."""
    coord = frames.coord
    return Sums(
        energy=coord.new_zeros([nframes * frames.nloc]),
        force=torch.zeros_like(coord),
        virial=coord.new_zeros([nframes, 9]),
        atom_virial=coord.new_zeros([coord.shape[0] if do_atomic_virial else 0, 9]),
    )


def add_edges(near: Near, slope: Tensor, frame: Tensor, sums: Sums) -> None:
    """Add the contributions of edges to forces and virials; the neighbour gets the virial.

    `slope` is dE/dr_ij `(ncentre, nnei, 3)`, and `frame` the frame of each centre.
    """
    # F_i = Σ_j dE/dr_ij, F_j = −Σ_i dE/dr_ij; the slopes of empty slots are 0.
    sums.force.index_add_(0, near.centre, slope.sum(1))
    atoms = near.neighbor.clamp(min=0).view(-1)
    sums.force.index_add_(0, atoms, slope.reshape(-1, 3), alpha=-1)
    if sums.atom_virial.shape[0] > 0:
        products = slope.unsqueeze(3) * near.vectors.unsqueeze(2)
        sums.atom_virial.index_add_(0, atoms, products.reshape(-1, 9), alpha=-1)
    virials = torch.bmm(slope.transpose(1, 2), near.vectors)
    sums.virial.index_add_(0, frame, virials.reshape(-1, 9), alpha=-1)


def _feature_rows(order: Tensor, frames: Frames, mapping: Tensor | None) -> Tensor:
    """Return the row of every atom's features `(nframes·nall,)`: its place in `order`.

    An image has the row of its local atom.
    """
    if mapping is None:
        raise ValueError(
            "this potential passes messages: it needs mapping (LAMMPS: atom_modify map yes) or "
            "comm_dict"
        )
    # The inverse of the permutation `order`; padding keeps 0.
    inverse = torch.zeros([frames.centre.shape[0]], dtype=torch.int64, device=order.device)
    inverse = inverse.index_copy(0, order, torch.arange(order.shape[0], device=order.device))
    frame = torch.arange(mapping.shape[0], device=order.device).unsqueeze(1)
    return inverse[(mapping.to(torch.int64) + frame * frames.nloc).view(-1)]


def _outputs(
    sums: Sums, nframes: int, do_atomic_virial: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the results of `forward_lower`; forces and virials in `dtype`."""
    per_atom = sums.energy.view(nframes, -1)
    out = {
        "energy": per_atom.sum(1, keepdim=True),
        "atom_energy": per_atom.unsqueeze(2),
        "extended_force": sums.force.view(nframes, -1, 3).to(dtype),
        "virial": sums.virial.to(dtype),
    }
    if do_atomic_virial:
        out["extended_virial"] = sums.atom_virial.view(nframes, -1, 9).to(dtype)
    return out
