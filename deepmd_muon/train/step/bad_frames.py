"""Find the frames that made the loss or the gradient of a batch not finite.

Only a run that ends asks for them: its weights are those before the bad step, so that each frame can
be evaluated again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from deepmd_muon.data import DataLoader
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.data.sampling.sampler import Plan
from deepmd_muon.train.batches.batch import TrainingBatch, to_device

log = logging.getLogger(__name__)

# A frame stands out if its loss is that many times the median of its batch: forces ten times as
# wrong.
_FAR = 100.0


class FrameLoss(NamedTuple):
    """A frame of a batch, and its loss without the other frames.

    Attributes
    ----------
    system
        Name of the system.
    frame
        Number in the system.
    loss
        Not finite if the gradient is not; None if the frame was not evaluated.
    """

    system: str
    frame: int
    loss: float | None


def without_losses(origin: Origin) -> list[FrameLoss]:
    """Return the frames of a batch, or of several, without evaluating them; each once."""
    frames = [FrameLoss(name, int(n), None) for name, numbers in origin.parts for n in numbers]
    return list(dict.fromkeys(frames))


def evaluate_frames(
    origin: Origin,
    loader: DataLoader,
    ntypes: int,
    device: torch.device,
    differentiate: Callable[[TrainingBatch], float],
) -> list[FrameLoss]:
    """Return the loss of each frame of a batch.

    `differentiate` returns the loss of a batch of one frame, infinite if the gradient is not finite.
    An error here must not replace the message about the step: the frames have no losses then.
    """
    frames = without_losses(origin)
    places = {system.name: k for k, system in enumerate(loader.systems)}
    losses = []
    loader.close()  # its thread reads the next batch
    try:
        for frame in frames:
            plan = Plan(((places[frame.system], np.array([frame.frame])),))
            loss = differentiate(to_device(loader.build(plan), ntypes, device))
            losses.append(frame._replace(loss=loss))
    except Exception as error:
        log.info("the frames of the batch cannot be evaluated one at a time: %s", error)
        return frames
    return losses


def describe_batch(frames: Sequence[FrameLoss]) -> str:
    """Name the frames that are responsible for a bad step; all frames if none stands out."""
    responsible = _responsible(frames)
    if not responsible:
        return _in_words(frames)
    count = "frame is" if len(responsible) == 1 else "frames are"
    return f"{len(frames)} frames; the responsible {count} {_in_words(responsible)}"


def _responsible(frames: Sequence[FrameLoss]) -> list[FrameLoss]:
    """Return the frames with a loss that is not finite, else those far above the others."""
    evaluated = [(frame, frame.loss) for frame in frames if frame.loss is not None]
    bad = [frame for frame, loss in evaluated if not math.isfinite(loss)]
    if bad or not evaluated:
        return bad if len(bad) < len(evaluated) else []
    losses = sorted(loss for _, loss in evaluated)
    limit = _FAR * losses[(len(losses) - 1) // 2]  # of two frames, the smaller loss
    return [frame for frame, loss in evaluated if loss > limit]


def _in_words(frames: Sequence[FrameLoss]) -> str:
    return str(Origin(tuple((frame.system, (frame.frame,)) for frame in frames)))
