"""Section `replay`: fine-tuning with a second branch that keeps the checkpoint's accuracy."""

from __future__ import annotations

import dataclasses

from deepmd_muon.argcheck.training import ValidationDataSettings
from deepmd_muon.section import Section, section
from deepmd_muon.setting import setting


@dataclasses.dataclass(frozen=True)
class ReplaySettings(Section):
    """Fine-tuning with ``dp train --finetune FILE --replay DATA|pseudo``; other runs ignore it."""

    proportion: float = setting(
        0.5,
        above=0.0,
        below=1.0,
        doc="Share of the steps that train the branch of the replayed data.",
    )
    share_fitting_net: bool = setting(
        True,
        doc=(
            "Share the fitting net between both branches; each keeps its own atomic energy biases. "
            "The new model then stays accurate on the checkpoint's kind of data. False gives the "
            "new data their own fitting net, for labels of another level of theory; replayed data "
            "then train only the descriptor of the new model."
        ),
    )
    batch_size: int | str | None = setting(
        None,
        minimum=1,
        pattern=r"auto(:[1-9]\d*)?|(max|filter|mixed|mix):[1-9]\d*",
        forms='"auto", "auto:N", "max:N", "filter:N", "mixed:N", "mix:N" or a whole number',
        doc=(
            "Frames in a batch of replayed data, as in training_data; by default as in "
            "training/training_data."
        ),
    )
    validation_data: ValidationDataSettings | None = section(
        None,
        doc=(
            "Validation data of the replay branch. By default 'pseudo' holds out some of its "
            "structures for this."
        ),
    )
    frames: int = setting(
        300,
        minimum=10,
        doc=(
            "Structures that 'pseudo' draws and labels; a tenth of them are held out for "
            "validation."
        ),
    )
    temperatures: tuple[float, ...] = setting(
        (300.0, 600.0, 1000.0),
        minimum=0.0,
        nonempty=True,
        doc=(
            "Temperatures [K] of the Langevin dynamics that draw structures for 'pseudo', in equal "
            "parts."
        ),
    )
    steps: int = setting(
        100,
        minimum=4,
        doc=(
            "Length of each of these dynamics in steps of 1 fs (0.5 fs with hydrogen); each gives "
            "four structures."
        ),
    )
    strain: float = setting(
        0.02,
        minimum=0.0,
        below=0.2,
        doc=(
            "Standard deviation of the random strain of a periodic structure before its dynamics "
            "begin."
        ),
    )
