"""The input of `dp explore`; this module imports no numpy and no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from deepmd_muon.section import Rule, Section, section
from deepmd_muon.setting import setting


class ExploreError(ValueError):
    """Rounds cannot begin or continue; the message says what is missing and what to do.

    Finished work stays.
    """


def _ordered(low: float, high: float) -> str | None:
    return None if low < high else f"must be below deviation_high; found {low:g} and {high:g}"


@dataclasses.dataclass(frozen=True)
class DynamicsSettings(Section):
    """Langevin dynamics of the potential, from frames of its training data."""

    temperatures: Sequence[float] = setting(
        (),
        above=0.0,
        doc=(
            "Temperatures [K]. If the list is empty: 1 and 1.5 times the temperature estimated "
            "from the forces in the data, or of 300 K if there is no estimate; required where "
            "these would exceed 2,000 K."
        ),
    )
    pressures: Sequence[float] = setting(
        (),
        doc=(
            "Pressures [GPa]. A barostat scales the cells to reach them; an empty list keeps the "
            "cells constant."
        ),
    )
    strains: Sequence[float] = setting(
        (0.0,),
        above=-0.5,
        maximum=1.0,
        nonempty=True,
        doc=(
            "Relative changes of all lengths at the start: 0.02 makes cells and interatomic "
            "distances 2 % longer."
        ),
    )
    copies: int = setting(
        4,
        minimum=1,
        doc=(
            "Trajectories for each combination of temperature, pressure and strain; velocities "
            "differ."
        ),
    )
    time: float = setting(0.5, above=0.0, doc="Length of each trajectory [ps].")
    time_step: float | None = setting(
        None,
        above=0.0,
        doc="Time step [fs]. Left out: 0.5 if an element is lighter than 5 u, else 1.",
    )
    friction: float = setting(0.01, above=0.0, doc="Friction of the Langevin thermostat [1/fs].")
    every: int = setting(
        5, minimum=1, doc="Steps between two searches of the structures for candidates."
    )
    seed: int = setting(
        0,
        minimum=0,
        doc="Seed of initial frames, velocities and noise. Each round adds its number.",
    )


@dataclasses.dataclass(frozen=True)
class SelectionSettings(Section):
    """Which structures are labelled.

    A structure is a candidate if it has a distance or an angle that no training frame has, or if
    models disagree on it. The chosen candidates are far from the training frames and from each
    other.
    """

    frames: int = setting(40, minimum=1, doc="Maximum number of structures labelled per round.")
    per_copy: int = setting(
        8, minimum=1, doc="Maximum number of labelled structures per trajectory."
    )
    closest: float = setting(
        0.7,
        minimum=0.0,
        below=1.0,
        doc=(
            "Reject structures with a distance below this share of the shortest one in the data "
            "for the same elements."
        ),
    )
    deviation_low: float = setting(
        0.1,
        above=0.0,
        doc=(
            "With several models: a larger deviation of their forces makes a structure a candidate "
            "[eV/Å]."
        ),
    )
    deviation_high: float = setting(
        2.0,
        above=0.0,
        doc="With several models: reject structures for which their forces deviate by more [eV/Å].",
    )

    rules = (Rule(("deviation_low", "deviation_high"), _ordered),)


@dataclasses.dataclass(frozen=True)
class LabelSettings(Section):
    """An ASE calculator that labels the chosen structures.

    Without this section the command writes them and ends with status 3. It continues once
    `labelled.xyz` is next to them.
    """

    calculator: str = setting(
        pattern=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*",
        forms='"module:Class"',
        doc=(
            "ASE calculator as module:Class, such as 'tblite.ase:TBLite' or "
            "'ase.calculators.emt:EMT'. The command imports the module and runs the class, which "
            "may start programs: read such a file before you use it."
        ),
    )
    arguments: Mapping[str, Any] | None = setting(None, doc="Keyword arguments of the calculator.")
    workers: int = setting(
        1, minimum=1, doc="Labelling processes. Each has its own calculator and one thread."
    )
    time_limit: float = setting(
        86_400.0,
        above=0.0,
        maximum=1e8,
        doc=(
            "Stop the calculation of one structure after this time, with all programs it started "
            "[s]."
        ),
    )
    largest_force: float = setting(
        30.0, above=0.0, doc="Discard labelled frames with a larger force on any atom [eV/Å]."
    )
    stress: bool = setting(True, doc="Calculate the stresses of structures with a cell.")
    most_failed: float = setting(
        0.5,
        minimum=0.0,
        maximum=1.0,
        doc="Stop the command if a larger share of the structures cannot be labelled.",
    )


@dataclasses.dataclass(frozen=True)
class TrainOnSettings(Section):
    """How a round trains on: from the weights of the round before, on all data."""

    start: Literal["finetune", "init-model", "restart"] = setting(
        "finetune",
        choices=("finetune", "init-model", "restart"),
        doc=(
            "Option of `dp train` that loads the weights. 'finetune' fits the energy bias again "
            "and starts the schedule at step 0. 'init-model' keeps the bias and starts the "
            "schedule at step 0. 'restart' continues with the saved step and optimizer state, and "
            "adds steps."
        ),
    )
    steps: int | None = setting(
        None, minimum=1, doc="Training steps per round. Left out: the steps of the input."
    )
    share: float | None = setting(
        0.3,
        above=0.0,
        below=1.0,
        doc=(
            "Share of the batches drawn from new frames. null keeps the sampling of the input, "
            "which by default draws all frames alike."
        ),
    )


@dataclasses.dataclass(frozen=True)
class CheckRoundSettings(Section):
    """`dp check` of the first model, before the rounds and after each.

    Its keys are options of that command.
    """

    temperature: float | None = setting(
        None,
        above=0.0,
        doc=(
            "Temperature [K]. Left out: 1.5 times the temperature estimated from the forces in the "
            "data; required where this would exceed 2,000 K."
        ),
    )
    time: float | None = setting(
        None, above=0.0, doc="Length of each trajectory [ps]. Left out: 2, on a GPU 5."
    )
    copies: int | None = setting(
        None,
        minimum=1,
        doc=(
            "Number of trajectories. Left out: 4 to 16, on a GPU 4 to 64; fewer for large "
            "structures."
        ),
    )
    enough: Literal["holds", "doubtful", "never"] = setting(
        "doubtful",
        choices=("holds", "doubtful", "never"),
        doc=(
            "Verdict that ends the rounds. 'doubtful': no item fails. 'holds': every item holds. "
            "'never': all rounds run."
        ),
    )


@dataclasses.dataclass(frozen=True)
class ExploreSettings(Section):
    """Settings of `dp explore`. Paths are relative to the folder of this file."""

    input: str = setting(
        doc=(
            "Input file of `dp train` that the models were trained with. The first round begins "
            "with its data."
        )
    )
    models: Sequence[str] = setting(
        lone=True,
        nonempty=True,
        doc=(
            "First checkpoints. The first model drives the dynamics. Each round trains all models "
            "and, if there are several, compares their forces."
        ),
    )
    folder: str = setting("explore", doc="Folder for the files of all rounds.")
    rounds: int = setting(2, minimum=1, doc="Maximum number of rounds.")
    dynamics: DynamicsSettings = section(
        DynamicsSettings(), doc="Dynamics that produce the candidates."
    )
    selection: SelectionSettings = section(
        SelectionSettings(), doc="Choice of the candidates to label."
    )
    labels: LabelSettings | None = section(
        None,
        doc=(
            "ASE calculator that labels the chosen structures. Without this section you label them."
        ),
    )
    training: TrainOnSettings = section(
        TrainOnSettings(), doc="How a round continues the training of the models."
    )
    check: CheckRoundSettings = section(
        CheckRoundSettings(),
        doc="`dp check` of the first model, before the first round and after each.",
    )
