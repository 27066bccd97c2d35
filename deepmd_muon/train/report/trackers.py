"""Metrics for TensorBoard, under deepmd-kit's tags, and for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deepmd_muon.files import writing
from deepmd_muon.train.validation.columns import column


class TensorBoardError(RuntimeError):
    """TensorBoard was asked for and is not installed."""


def require_tensorboard() -> None:
    """Raise `TensorBoardError` when the package `tensorboard` cannot be imported."""
    try:
        import torch.utils.tensorboard  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise TensorBoardError(
            "training.tensorboard is true, but the package tensorboard cannot be imported "
            f"({error}); install tensorboard or set training.tensorboard to false"
        ) from error


class TensorBoardReport:
    """Write metrics and the learning rate as scalars `Default/<name>`, or `<branch>/<name>`.

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
        """Write the metrics of the 1-based `step`, on validation data as `Default/<name>_val`."""
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


class WandbError(RuntimeError):
    """Weights & Biases was asked for and cannot be used."""


def require_wandb() -> None:
    """Raise `WandbError` when the package `wandb` cannot be imported."""
    try:
        import wandb  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise WandbError(
            f"training.wandb is true, but the package wandb cannot be imported ({error}); "
            "install wandb or set training.wandb to false"
        ) from error


class WandbReport:
    """Log the learning rate, and errors as `<name>_trn` and `<name>_val`.

    wandb's variables hold: WANDB_MODE=offline writes to the folder `wandb` and sends nothing,
    WANDB_RUN_ID with WANDB_RESUME=allow continues a run.

    Raises
    ------
    WandbError
        When the package is missing or cannot begin a run.
    """

    validates = True

    def __init__(self, project: str, frequency: int) -> None:
        require_wandb()
        import wandb

        self.frequency = frequency
        try:
            self._run = wandb.init(project=project)
        except Exception as error:  # of wandb, its network or its account
            raise WandbError(
                f"wandb does not begin a run ({type(error).__name__}: {error}); "
                "log in with `wandb login`, set WANDB_MODE=offline, or set training.wandb to false"
            ) from error

    def step(
        self, step: int, lr: float, train: Mapping[str, float], valid: Mapping[str, float]
    ) -> None:
        """Log the metrics of the 1-based `step`."""
        metrics = {column(name, "trn"): value for name, value in train.items()}
        metrics.update({column(name, "val"): value for name, value in valid.items()})
        self._run.log({"lr": lr, **metrics}, step=step)

    def close(self) -> None:
        """Send the remaining rows and end the run."""
        self._run.finish()
