"""Section `model`: how positions become energies; torch-free."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from deepmd_muon.model.descriptor.settings import DescriptorSettings
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.fitting.ener.settings import EnerSettings
from deepmd_muon.model.registry import DESCRIPTORS, FITTING_NETS
from deepmd_muon.section import Foreign, Rule, Section, Variants, freeze, section
from deepmd_muon.setting import InvalidSettingError, Setting, setting

#: α of the softmin where `smin_alpha` is left out, and in all of deepmd-kit's PyTorch models, which
#: do not read it [Å].
DEFAULT_ALPHA = 0.1


def _a_sel_for_each_type(
    sel: Any, descriptor: DescriptorSettings, type_map: tuple[str, ...]
) -> str | None:
    if not type_map or descriptor.needs_counts:  # unknown until the data are read
        return None
    request = descriptor.neighbors()
    if not request.by_type or len(request.sel) == len(type_map):
        return None
    return (
        f"must have one number for each of the {len(type_map)} types in type_map; found "
        f"{len(request.sel)}"
    )


def _table_without_exclusions(
    use_srtab: str | None, exclude_types: tuple[tuple[int, int], ...] | None
) -> str | None:
    if use_srtab is not None and exclude_types:
        return (
            "excludes exclude_types of the descriptor; use model/pair_exclude_types, which the "
            "table follows as well"
        )
    return None


def _known_types(
    exclude_types: tuple[tuple[int, int], ...] | None, type_map: tuple[str, ...]
) -> str | None:
    types = {index for pair in exclude_types or () for index in pair}
    unknown = [index for index in types if index >= len(type_map)]
    if unknown and type_map:
        return f"names type {min(unknown)}, but type_map has types 0 to {len(type_map) - 1}"
    return None


def _known_atoms(exclude_types: tuple[int, ...], type_map: tuple[str, ...]) -> str | None:
    return _known_types(tuple((index, index) for index in exclude_types), type_map)


def _an_energy_for_each_type(
    atom_ener: tuple[float | None, ...], type_map: tuple[str, ...]
) -> str | None:
    if type_map and atom_ener and len(atom_ener) != len(type_map):
        return (
            f"must have one energy for each of the {len(type_map)} types in type_map; found "
            f"{len(atom_ener)}"
        )
    return None


def _one_list_for_all_types(use_srtab: str | None, descriptor: DescriptorSettings) -> str | None:
    if use_srtab is not None and not descriptor.one_fitting_net:
        return (
            "needs a descriptor that treats all types alike, dpa1 or dpa3, as in deepmd-kit; "
            f"found {descriptor.type!r}"
        )
    return None


def _whole_switch(
    use_srtab: str | None, sw_rmin: float | None, sw_rmax: float | None, smin_alpha: float | None
) -> str | None:
    if use_srtab is None:
        if sw_rmin is sw_rmax is smin_alpha is None:
            return None
        return "is needed by sw_rmin, sw_rmax and smin_alpha"
    if sw_rmin is None or sw_rmax is None or not sw_rmin < sw_rmax:
        return f"needs sw_rmin below sw_rmax; found {sw_rmin} and {sw_rmax}"
    return None


def _distinct_names(type_map: tuple[str, ...]) -> str | None:
    double = [name for index, name in enumerate(type_map) if name in type_map[:index]]
    return f"names {double[0]!r} twice" if double else None


class ChargeSpinSettings(NamedTuple):
    """What a model reads of the charge and the spin of a frame."""

    embedded: bool = False
    default: tuple[float, ...] | None = None


class SpinSettings(NamedTuple):
    """What a model reads of the spins of atoms."""

    read: bool = False
    may_be_missing: bool = False  # they are 0 then


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """A model maps positions to energy: a descriptor of each atom's neighbourhood and a fitting net."""

    type_map: tuple[str, ...] = setting(
        (),
        doc=(
            "Names of the types of atoms, such as ['O', 'H']. Left out, dp train takes those of "
            "the checkpoint that it "
            "starts from, or else those of the training data (type_map.raw, elements of files that "
            "ASE reads), by "
            "atomic number."
        ),
    )
    descriptor: DescriptorSettings = section(
        doc="Descriptor of the neighbourhood of an atom.",
        variants=Variants(DESCRIPTORS.settings, alias=DESCRIPTORS.aliases),
    )
    fitting_net: Section = section(
        EnerSettings(),
        doc="Net that maps a descriptor to the energy of an atom.",
        variants=Variants(FITTING_NETS.settings, default="ener", alias=FITTING_NETS.aliases),
    )
    type: Literal["standard"] = setting(
        "standard", doc="Kind of model: one descriptor and one fitting net."
    )
    data_stat_nbatch: int = setting(
        10,
        minimum=1,
        doc="Batches of each system from which means and deviations of the descriptor are taken.",
    )
    data_stat_protect: float = setting(
        0.01,
        above=0.0,
        doc=(
            "Smallest deviation that frame and atomic parameters are divided by. That of the "
            "environment is 0.01, as "
            "in deepmd-kit."
        ),
    )
    pair_exclude_types: tuple[tuple[int, int], ...] = setting(
        (),
        minimum=0,
        doc=(
            "Pairs of types, by index, that are not neighbours, such as [[0, 1]]: their slots of "
            "the neighbour list "
            "count as empty."
        ),
    )
    atom_exclude_types: tuple[int, ...] = setting(
        (),
        minimum=0,
        doc=(
            "Types, by index, whose atoms have no energy. They remain neighbours of others, and "
            "forces act on them."
        ),
    )

    use_srtab: str | None = setting(
        None,
        doc=(
            "File of a tabulated pair potential that replaces the network where atoms come close, "
            "such as ZBL (dp "
            "zbl). Each row has a distance [Å] and the energies [eV] of the pairs of types 0-0, "
            "0-1, …, 1-1, …"
        ),
    )
    smin_alpha: float | None = setting(
        None,
        above=0.0,
        doc=(
            "Decay of the softmin of an atom's distances that switches to the table [Å]. Left out "
            "it is "
            f"{DEFAULT_ALPHA}, which deepmd-kit's PyTorch models take whatever the input says; "
            "they cannot read a "
            "model with another value."
        ),
    )
    sw_rmin: float | None = setting(
        None,
        minimum=0.0,
        doc="Softmin of the distances below which an atom has the table's energy [Å].",
    )
    sw_rmax: float | None = setting(
        None,
        above=0.0,
        doc="Softmin of the distances above which an atom has the network's energy [Å].",
    )

    @property
    def charge_spin(self) -> ChargeSpinSettings:
        """What the model reads of the charge and the spin of a frame: nothing."""
        return ChargeSpinSettings()

    @property
    def spins(self) -> SpinSettings:
        """What the model reads of the spins of atoms: nothing."""
        return SpinSettings()

    left_out = frozenset({"use_srtab", "smin_alpha", "sw_rmin", "sw_rmax"})
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("use_srtab", "descriptor"), _one_list_for_all_types),
        Rule(("use_srtab", "descriptor/exclude_types"), _table_without_exclusions),
        Rule(("use_srtab", "sw_rmin", "sw_rmax", "smin_alpha"), _whole_switch),
        Rule(("type_map",), _distinct_names),
        Rule(("descriptor/sel", "descriptor", "type_map"), _a_sel_for_each_type),
        Rule(("descriptor/exclude_types", "type_map"), _known_types),
        Rule(("pair_exclude_types", "type_map"), _known_types),
        Rule(("atom_exclude_types", "type_map"), _known_atoms),
        Rule(("fitting_net/atom_ener", "type_map"), _an_energy_for_each_type),
    )
    foreign: ClassVar[dict[str, Foreign]] = {
        "data_bias_nsample": Foreign(
            "it serves the change of the bias of an existing model", (10,), inert=True
        ),
        "srtab_add_bias": Foreign("it belongs to use_srtab", (True,), inert=True),
        "preset_out_bias": Foreign("a preset bias (see fitting_net/atom_ener)"),
        "type_embedding": Foreign("a type embedding outside the descriptor"),
        "modifier": Foreign("a modifier of the model's output"),
        "compress": Foreign("model compression"),
        "spin": Foreign("atomic spins"),
        "finetune_head": Foreign("a branch to fine-tune from, which --model-branch names"),
        "model_branch_alias": Foreign(
            "other names of a branch, of which this model has none", ([],)
        ),
        "shared_dict": Foreign("parts shared by branches, of which this model has none", ({},)),
        "info": Foreign("metadata are not carried", ({},), inert=True),
        "bridging_method": Foreign("an analytical short-range potential", ("None", "none")),
        "bridging_r_inner": Foreign("it belongs to bridging_method", (0.5,), inert=True),
        "bridging_r_outer": Foreign("it belongs to bridging_method", (0.8,), inert=True),
    }


# ----- models of deepmd-kit ----------------------------------------------------------------------

# Kinds of models and fitting nets that give energies from positions, some also from spins.
_DPA4 = frozenset({"dpa4", "DPA4", "SeZM", "sezm"})
_ENERGY_MODELS = frozenset({"standard", "linear_ener"}) | _DPA4
_ENERGY_FITTING_NETS = frozenset({"ener", "dpa4_ener", "sezm_ener"})
# Keys that ask for other labels, or for files of other programs.
_OTHER_KEYS = ("modifier", "compress", "type_embedding", "hessian_mode")

_TENSORFLOWS_SPIN_KEYS = frozenset({"spin_norm", "virtual_len"})

# Keys of a section that say nothing about the model: branches and statistics.
_NOT_OF_THE_MODEL = ("info", "model_branch_alias", "finetune_head", "shared_dict")


def gives_energies(section: Any) -> bool:
    """Return whether deepmd-kit's model of a section maps positions, and spins, to energies.

    A malformed section does not.
    """
    if not isinstance(section, Mapping):
        return False
    models = section.get("models", ())
    return (
        _is_one_of(section.get("type", "standard"), _ENERGY_MODELS)
        and isinstance(models, list | tuple)
        and all(map(_part_gives_energies, (section, *models)))
        and not (models and any(part.get("spin") for part in (section, *models)))
        and not _is_tensorflows(section.get("spin"))
    )


def _is_tensorflows(spin: Any) -> bool:
    """Return whether a section `spin` is one of deepmd-kit's TensorFlow backend."""
    return isinstance(spin, Mapping) and not _TENSORFLOWS_SPIN_KEYS.isdisjoint(spin)


def _part_gives_energies(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    net = part.get("fitting_net") or {}
    return (
        isinstance(net, Mapping)
        and _is_one_of(net.get("type", "ener"), _ENERGY_FITTING_NETS)
        and not any(part.get(key) for key in _OTHER_KEYS)
    )


def _is_one_of(kind: Any, kinds: frozenset[str]) -> bool:
    return isinstance(kind, str) and kind in kinds


@dataclasses.dataclass(frozen=True)
class HostedDescriptorSettings(DescriptorSettings):
    """The part of a hosted model that describes neighbourhoods, as the trainer sees it.

    The built model knows the neighbour list that it reads (`EnergyModel.neighbors`).
    """

    type: ClassVar[str] = "hosted"
    one_fitting_net: ClassVar[bool] = True  # deepmd-kit judges whether its types may change
    trainable: bool = setting(True, doc="Train its parameters.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostedSettings(ModelSettings):
    """A model that a module of deepmd-kit computes, with the settings that the trainer reads."""

    descriptor: DescriptorSettings = section(
        HostedDescriptorSettings(), doc="See `HostedDescriptorSettings`."
    )
    section: Mapping[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={"setting": Setting("The section, as deepmd-kit normalizes it.")},
    )

    rules = (Rule(("type_map",), _distinct_names),)

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> HostedSettings:
        """Return the settings of a section `model` that deepmd-kit has normalized.

        Raises
        ------
        ModelError
            If a value that the trainer reads is wrong.
        """
        # The terms of a sum of models read the same parameters.
        model = (section.get("models") or [section])[0]
        net = model.get("fitting_net") or {}
        read = ("numb_fparam", "numb_aparam", "default_fparam", "dim_case_embd")
        statistics = ("data_stat_nbatch", "data_stat_protect")
        spin = section.get("spin")
        if spin and spin.get("scheme") != "native" and spin.get("virtual_scale") is None:
            raise ModelError(
                "spin/virtual_scale is missing, the distance of a virtual atom for a spin of length "
                "1 [Å]"
            )
        try:
            return cls(
                type_map=tuple(section.get("type_map") or ()),
                fitting_net=freeze(
                    EnerSettings, {key: net[key] for key in read if net.get(key) is not None}
                ),
                atom_exclude_types=tuple(section.get("atom_exclude_types") or ()),
                section=_builtin(
                    {key: section[key] for key in section if key not in _NOT_OF_THE_MODEL}
                ),
                **{key: section[key] for key in statistics if key in section},
            )
        except InvalidSettingError as error:
            raise ModelError(f"model section: {error}") from error

    @property
    def has_fixed_types(self) -> bool:
        """Whether deepmd-kit cannot change the type map of the model's weights."""
        return self.section.get("type") in _DPA4 or bool(self.section.get("spin"))

    def with_fitting_net_of(self, other: ModelSettings) -> HostedSettings:
        """Return the model with the fitting net of another hosted model."""
        if not isinstance(other, HostedSettings) or "fitting_net" not in self.section:
            raise ModelError("the fitting net of this model cannot be replaced")
        section = {**self.plain_form(), "fitting_net": other.section.get("fitting_net")}
        return HostedSettings.of(section)

    def with_adapters_of(self, other: ModelSettings) -> HostedSettings:
        """Return the model with its low-rank adapters, or with those of another if it has none."""
        if self.section.get("lora") or not isinstance(other, HostedSettings):
            return self
        adapters = {key: other.section[key] for key in ("lora",) if key in other.section}
        return dataclasses.replace(self, section={**self.section, **adapters})

    def with_frame_parameters(self, count: int) -> HostedSettings:
        """Return the model with fitting nets that read so many parameters of each frame."""
        section = copy.deepcopy(dict(self.section))
        for model in (section, *section.get("models", ())):
            if "fitting_net" in model:
                model["fitting_net"]["numb_fparam"] = count
        fitting_net: Any = self.fitting_net
        fitting_net = dataclasses.replace(fitting_net, numb_fparam=count)
        return dataclasses.replace(self, section=section, fitting_net=fitting_net)

    @property
    def charge_spin(self) -> ChargeSpinSettings:
        """What the model reads of the charge and the spin of a frame.

        Parts of a sum of models read their own default alone.
        """
        descriptor = self.section.get("descriptor", {})
        defaults = [
            part.get("default_chg_spin")
            for part in descriptor.get("list", [descriptor])
            if part.get("add_chg_spin_ebd")
        ]
        if not defaults:
            return ChargeSpinSettings()
        # deepmd-kit takes a default only if the parts agree.
        first = defaults[0]
        common = first is not None and all(default == first for default in defaults)
        return ChargeSpinSettings(True, tuple(map(float, first)) if common else None)

    @property
    def spins(self) -> SpinSettings:
        """What the model reads of the spins of atoms."""
        spin = self.section.get("spin")
        if not spin:
            return SpinSettings()
        return SpinSettings(read=True, may_be_missing=bool(spin.get("allow_missing_label")))

    def plain_form(self) -> dict[str, Any]:
        """Return the section in deepmd-kit's form."""
        return {**copy.deepcopy(dict(self.section)), "type_map": list(self.type_map)}


def _builtin(value: Any) -> Any:
    """Return a value with dicts and lists of Python's own classes, which a checkpoint can hold."""
    if isinstance(value, Mapping):
        return {key: _builtin(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_builtin(element) for element in value]
    return value


T = TypeVar("T", bound=Section)


def changed(settings: T, changes: Mapping[str, Any], path: str = "model") -> T:
    """Return settings of a model, or of its part at a path of the input, with other values.

    Raises
    ------
    ModelError
        Naming the path of every setting that breaks a rule.
    """
    declared: Any = settings
    try:
        result: T = dataclasses.replace(declared, **changes)
    except InvalidSettingError as error:
        raise ModelError("; ".join(f"{path}/{problem}" for problem in error.problems)) from error
    return result


def model_settings(plain: Mapping[str, Any]) -> ModelSettings:
    """Return a normalised section `model`, as plain objects, as settings.

    Raises
    ------
    ModelError
        Naming every setting that is wrong.
    """
    try:
        return freeze(ModelSettings, plain)
    except InvalidSettingError as error:
        raise ModelError(f"model section: {error}") from error
