"""Metrics for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping

from deepmd_muon.train.report.columns import column


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
    """Log the rows of the learning curve: learning rate, and errors as `<name>_trn` and `<name>_val`.

    wandb's own variables hold here: WANDB_MODE=offline writes to the folder `wandb` and sends nothing, WANDB_RUN_ID
    with WANDB_RESUME=allow continues a run of theirs. Raise WandbError where the package is missing or
    cannot begin a run.
    """

    validates = True

    def __init__(self, project: str, frequency: int) -> None:
        require_wandb()
        import wandb

        self.frequency = frequency
        try:
            self._run = wandb.init(project=project)
        except Exception as error:  # wandb's own, of its network and of its account
            raise WandbError(
                f"wandb does not begin a run ({type(error).__name__}: {error}); log in with `wandb login`, "
                "set WANDB_MODE=offline, or set training.wandb to false"
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
