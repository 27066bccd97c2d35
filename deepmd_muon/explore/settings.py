"""The input of `dp explore`; this module imports no numpy and no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from deepmd_muon.section import Rule, Section, section
from deepmd_muon.setting import setting


class ExploreError(ValueError):
    """Rounds cannot begin or go on; the message says what is missing and what to do. Finished work stays."""


def _ordered(low: float, high: float) -> str | None:
    return None if low < high else f"must be below deviation_high; found {low:g} and {high:g}"


@dataclasses.dataclass(frozen=True)
class DynamicsSettings(Section):
    """Langevin dynamics of the potential, from frames of its training data, all structures side by side."""

    temperatures: Sequence[float] = setting(
        (),
        above=0.0,
        doc="Temperatures [K]. An empty list takes 1 and 1.5 times the temperature that the forces of the data tell.",
    )
    pressures: Sequence[float] = setting(
        (), doc="Pressures [GPa] at which cells change their volume. An empty list keeps the cells."
    )
    strains: Sequence[float] = setting(
        (0.0,),
        above=-0.5,
        maximum=1.0,
        nonempty=True,
        doc="Relative changes of all lengths at the start; 0.02 makes cells, and the atoms' distances, 2 % longer.",
    )
    copies: int = setting(
        4, minimum=1, doc="Structures for each combination of temperature, pressure and strain, with own velocities."
    )
    time: float = setting(0.5, above=0.0, doc="Length of the dynamics [ps].")
    time_step: float | None = setting(
        None, above=0.0, doc="Time step [fs]. Left out it is 0.5 where an atom is lighter than 5 u, else 1."
    )
    friction: float = setting(0.01, above=0.0, doc="Friction of the thermostat [1/fs].")
    every: int = setting(5, minimum=1, doc="Steps between looks at the structures; each look yields candidates.")
    seed: int = setting(0, minimum=0, doc="Seed of starts, velocities and noise; a round adds its number.")


@dataclasses.dataclass(frozen=True)
class SelectionSettings(Section):
    """Which structures are labelled.

    A structure is a candidate when it has a distance or an angle that no training frame has, or when models disagree on
    it. Of the candidates those are chosen that are far from the training frames and from each other.
    """

    frames: int = setting(40, minimum=1, doc="Most structures that a round labels.")
    per_copy: int = setting(8, minimum=1, doc="Most structures from one trajectory.")
    closest: float = setting(
        0.7,
        minimum=0.0,
        below=1.0,
        doc="Left out are structures with a distance below this share of the shortest one of its pair in the data.",
    )
    deviation_low: float = setting(
        0.1, above=0.0, doc="With several models: candidates are structures whose forces deviate by more [eV/Å]."
    )
    deviation_high: float = setting(
        2.0, above=0.0, doc="With several models: structures whose forces deviate by more are left out [eV/Å]."
    )

    rules: ClassVar[tuple[Rule, ...]] = (Rule(("deviation_low", "deviation_high"), _ordered),)


@dataclasses.dataclass(frozen=True)
class LabelSettings(Section):
    """An ASE calculator that labels the chosen structures.

    Without this section the command writes them, ends with status 3, and goes on when `labelled.xyz` lies beside them.
    """

    calculator: str = setting(
        pattern=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*",
        forms='"module:Class"',
        doc="Calculator as module:Class, such as 'tblite.ase:TBLite' or 'ase.calculators.emt:EMT'.",
    )
    arguments: Mapping[str, Any] | None = setting(None, doc="Keyword arguments of the calculator.")
    workers: int = setting(1, minimum=1, doc="Processes that label, each with a calculator and one thread.")
    largest_force: float = setting(
        30.0, above=0.0, doc="Labelled frames with a larger force on an atom are left out [eV/Å]."
    )
    stress: bool = setting(True, doc="Ask for stresses of structures with a cell.")
    most_failed: float = setting(
        0.5, minimum=0.0, maximum=1.0, doc="The command stops when a larger share of the structures cannot be labelled."
    )


@dataclasses.dataclass(frozen=True)
class TrainOnSettings(Section):
    """How a round trains on: from the weights of the round before, on all data."""

    start: Literal["finetune", "init-model", "restart"] = setting(
        "finetune",
        choices=("finetune", "init-model", "restart"),
        doc=(
            "Option of `dp train` with which the weights are kept: 'finetune' fits the energy bias anew and begins the "
            "schedule at step 0, 'init-model' keeps the bias, 'restart' keeps step and optimizer state and adds steps."
        ),
    )
    steps: int | None = setting(None, minimum=1, doc="Steps of a round. Left out they are those of the input.")
    share: float | None = setting(
        0.3,
        above=0.0,
        below=1.0,
        doc="Share of the batches that is drawn from new frames; null draws all frames alike.",
    )


@dataclasses.dataclass(frozen=True)
class CheckRoundSettings(Section):
    """`dp check` of the first model, before the rounds and after each; its keys are options of that command."""

    temperature: float | None = setting(
        None, above=0.0, doc="Temperature [K]; left out 1.5 times that which the forces of the data tell."
    )
    time: float = setting(2.0, above=0.0, doc="Length of the dynamics [ps].")
    copies: int | None = setting(None, minimum=1, doc="Structures followed; left out 4 to 16, on a GPU 64.")
    enough: Literal["holds", "doubtful", "never"] = setting(
        "doubtful",
        choices=("holds", "doubtful", "never"),
        doc=(
            "Verdict at which no further round begins: 'doubtful' when no item fails, 'holds' when all hold; 'never' "
            "does all rounds."
        ),
    )


@dataclasses.dataclass(frozen=True)
class ExploreSettings(Section):
    """Everything that `dp explore` does. Paths are relative to the folder of the input file."""

    input: str = setting(doc="Input of `dp train` that trained the models; its training data are the first data.")
    models: Sequence[str] = setting(
        lone=True,
        nonempty=True,
        doc="Checkpoints to begin with. The first drives the dynamics; all are trained on, and compared if several.",
    )
    folder: str = setting("explore", doc="Where the rounds are kept.")
    rounds: int = setting(2, minimum=1, doc="Most rounds.")
    dynamics: DynamicsSettings = section(DynamicsSettings(), doc="Dynamics that draw the candidates.")
    selection: SelectionSettings = section(SelectionSettings(), doc="Which candidates are labelled.")
    labels: LabelSettings | None = section(None, doc="Who labels them; left out, you do.")
    training: TrainOnSettings = section(TrainOnSettings(), doc="How models are trained on.")
    check: CheckRoundSettings = section(CheckRoundSettings(), doc="How models are checked.")
