"""Section `replay`: fine-tuning beside a second branch that keeps what the checkpoint knows."""

from __future__ import annotations

import dataclasses

from deepmd_muon.argcheck.training import ValidationDataSettings
from deepmd_muon.section import Section, section
from deepmd_muon.setting import setting


@dataclasses.dataclass(frozen=True)
class ReplaySettings(Section):
    """Fine-tuning with ``dp train --finetune FILE --replay DATA|pseudo``; other runs ignore it."""

    proportion: float = setting(
        0.5, above=0.0, below=1.0, doc="Share of the steps that train the branch of the replayed data."
    )
    share_fitting_net: bool = setting(
        True,
        doc=(
            "Give both branches one fitting net, with energies of atoms of their own. It keeps the new model right on "
            "the checkpoint's kind of data. False gives the new data a fitting net of their own, for labels of another "
            "level of theory; replayed data then train the descriptor alone."
        ),
    )
    batch_size: int | str | None = setting(
        None,
        minimum=1,
        pattern=r"auto(:[1-9]\d*)?|(max|filter|mixed|mix):[1-9]\d*",
        forms='"auto", "auto:N", "max:N", "filter:N", "mixed:N", "mix:N" or a whole number',
        doc="Frames in a batch of replayed data, see training_data; that of training/training_data when left out.",
    )
    validation_data: ValidationDataSettings | None = section(
        None,
        doc="Data of the checkpoint's kind, whose errors the run shows. 'pseudo' holds some of its structures out.",
    )
    frames: int = setting(
        300, minimum=10, doc="Structures that 'pseudo' draws and labels; a tenth of them are held out for validation."
    )
    temperatures: tuple[float, ...] = setting(
        (300.0, 600.0, 1000.0),
        minimum=0.0,
        nonempty=True,
        doc="Temperatures [K] of the Langevin dynamics that draw structures for 'pseudo', in equal parts.",
    )
    steps: int = setting(
        100,
        minimum=4,
        doc="Length of each of these dynamics in steps of 1 fs (0.5 fs with hydrogen); four structures are taken.",
    )
    strain: float = setting(
        0.02,
        minimum=0.0,
        below=0.2,
        doc="Standard deviation of the random strain of a periodic structure before its dynamics begin.",
    )
