"""Metrics for TensorBoard, under deepmd-kit's tags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deepmd_muon.files import writing


class TensorBoardError(RuntimeError):
    """TensorBoard was asked for and is not installed."""


def require_tensorboard() -> None:
    """Raise `TensorBoardError` when the package `tensorboard` cannot be imported."""
    try:
        import torch.utils.tensorboard  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise TensorBoardError(
            f"training.tensorboard is true, but the package tensorboard cannot be imported ({error}); "
            "install tensorboard or set training.tensorboard to false"
        ) from error


class TensorBoardReport:
    """Write training metrics and the learning rate as scalars `Default/<name>`, of several branches `<branch>/<name>`.

    Points beyond `start_step` in an existing directory are hidden.
    """

    validates = False

    def __init__(self, log_dir: str, frequency: int, *, start_step: int = 0) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self.frequency = frequency
        self._place = Path(log_dir)
        with writing(self._place):
            self._writer = SummaryWriter(log_dir, purge_step=start_step + 1 if start_step else None)

    def step(
        self, step: int, lr: float, train: Mapping[str, float], valid: Mapping[str, float]
    ) -> None:
        """Write the metrics of the 1-based `step`; those of validation data as `Default/<name>_val`."""
        with writing(self._place):  # its thread's errors come with the next value
            self._writer.add_scalar("Default/lr", lr, step)
            for name, value in train.items():
                self._writer.add_scalar(_tag(name), value, step)
            for name, value in valid.items():
                self._writer.add_scalar(f"{_tag(name)}_val", value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        with writing(self._place):
            self._writer.close()


def _tag(name: str) -> str:
    """Return deepmd-kit's tag of a metric: branch/metric."""
    metric, _, branch = name.partition("/")
    return f"{branch or 'Default'}/{metric}"
