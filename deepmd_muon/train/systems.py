"""Systems of a run: opened as the input says, and looked at before the long work begins."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from deepmd_muon.argcheck import Input, TrainingDataSettings
from deepmd_muon.data import Parameters, System, open_systems, with_parameters
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.checks.overlap import shared_frames
from deepmd_muon.data.opening import check_labels, elements_of
from deepmd_muon.model.settings import changed

log = logging.getLogger(__name__)

# Doubts about the data that are named at the usual log level.
_MOST_SUSPICIONS = 20


@dataclasses.dataclass(frozen=True)
class Systems:
    """The systems of one branch."""

    training: list[System]
    validation: list[System]

    @property
    def all(self) -> list[System]:
        """Both."""
        return [*self.training, *self.validation]


def open_section(section: TrainingDataSettings, type_map: Sequence[str] | None) -> list[System]:
    """Open the systems of a section `training_data` or `validation_data`.

    Parameters
    ----------
    section
        The section.
    type_map
        Element names that types shall index; empty or None keeps those of each system.
    """
    return open_systems(
        section.systems,
        type_map or None,
        section.label_keys,
        section.rglob_patterns,
        keep_unconverged=section.keep_unconverged,
    )


def open_training_systems(given: Input) -> tuple[Input, dict[str, Systems]]:
    """Open the systems of training and of validation data of each branch.

    Returns
    -------
    tuple
        The input, with the type map of the training data where it has none; the systems of each branch, types
        translated to the model's.

    Raises
    ------
    DataError
        When a system cannot be read or lacks frame or atomic parameters, or no training system has labels.
    TypeMapError
        When neither the input nor a system has element names.
    """
    opened = {}
    for name, branch in given.branches.items():
        model = branch.model
        train = open_section(branch.data.training_data, model.type_map)
        if not model.type_map:
            names = elements_of(train)
            model = changed(model, {"type_map": names}, branch.model_path)
            given = given.with_models({name: model})
            train = [system.with_types(names) for system in train]
            log.info("model/type_map is left out and becomes %s: the types of the training data", list(names))
        section = branch.data.validation_data
        valid = open_section(section, model.type_map) if section else []
        every = with_parameters([*train, *valid], Parameters.of(model.fitting_net))
        opened[name] = Systems(every[: len(train)], every[len(train) :])
        of_branch = f" of {name}" if given.multi_task else ""
        for kind, systems in (("training", opened[name].training), ("validation", opened[name].validation)):
            if systems:
                _log_systems(f"{kind} data{of_branch}", systems)
                check_labels(systems)
    distinct = {id(system): system for systems in opened.values() for system in systems.all}
    found = suspicions([*distinct.values()])
    for number, suspicion in enumerate(found):
        log.log(logging.WARNING if number < _MOST_SUSPICIONS else logging.DEBUG, "data: %s", suspicion)
    if len(found) > _MOST_SUSPICIONS:
        log.warning("data: %d more suspicions; --log-level DEBUG names them", len(found) - _MOST_SUSPICIONS)
    return given, opened


def _log_systems(kind: str, systems: Sequence[System]) -> None:
    """Log what the data are: thousands of systems must not bury the rest of the log."""
    atoms = sorted({system.natoms for system in systems})
    log.info(
        "%s: %d system%s, %d frames of %s atoms, %d periodic, labels %s",
        kind,
        len(systems),
        "s" * (len(systems) > 1),
        sum(system.nframes for system in systems),
        f"{atoms[0]} to {atoms[-1]}" if len(atoms) > 1 else atoms[0],
        sum(system.pbc for system in systems),
        ", ".join(sorted(frozenset[str]().union(*(system.labels for system in systems)))) or "none",
    )
    for system in systems:
        log.debug("%s: %s", kind, system)


def warn_of_shared_frames(train: Sequence[System], valid: Sequence[System]) -> None:
    """Warn when validation data repeat training data: their errors would say nothing about other structures."""
    shared, looked = shared_frames(train, valid) if valid else (0, 0)
    if shared:
        log.warning(
            "%d of %d validation frames looked at are training frames too: their errors do not show how the model does "
            "on other structures; split by trajectories or blocks of time (dp init does)",
            shared,
            looked,
        )
