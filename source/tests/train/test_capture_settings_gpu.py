"""With each setting changed, a captured step gives the weights of an eager one, or the run says why it is not captured."""

import logging
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from compared import tensors
from step_changes import inputs_of_branches, inputs_with_changes

from deepmd_muon.train import trainer
from deepmd_muon.train.step.stepper import DeviceStepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DATA = ("training/training_data", "training/validation_data")
GROUPS = ("training", *DATA, "validating", "loss", "learning_rate")
# Steps of other layouts each time are not recorded; the second batch of a layout is.
BATCHES = ("batch_size 1", "batch_size auto", "batch_size mix")
FEW_STEPS = ("numb_steps", "numb_epoch", *BATCHES, "accumulate")


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    """Sums over neighbours have one order with torch's deterministic algorithms."""
    monkeypatch.setenv("DEVICE", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def steppers(monkeypatch):
    """The steppers that runs have made."""
    made = []
    original = trainer.build_stepper

    def build(*args, **options):
        made.append(original(*args, **options))
        return made[-1]

    monkeypatch.setattr(trainer, "build_stepper", build)
    return made


def difference(name, content, train, load, steppers, caplog):
    """Return what is wrong with captured steps of an input; nothing if they are right or refused with a reason."""
    results = []
    for capture in ("off", "auto"):
        content["training"]["capture"] = capture
        steppers.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="deepmd_muon"):
            if train(content) != 0:
                return f"{name}: status of capture {capture}"
        path = f"{content['training'].get('save_ckpt', 'model.ckpt')}.pt"
        results.append(
            {part: tensors(load(path).get(part)) for part in ("model", "ema", "optimizer")}
        )
    assert all(isinstance(stepper, DeviceStepper) for stepper in steppers)
    captured = [stepper._captured for stepper in steppers]
    reasons = [each.eager_reason for each in captured]
    if any(reasons):
        return None if "cannot be captured" in caplog.text else f"{name}: no warning of {reasons}"
    if not any(each.recorded for each in captured) and not any(key in name for key in FEW_STEPS):
        return f"{name}: nothing was captured, and no reason was given"
    for part, values in results[0].items():
        others = results[1][part]
        if values.keys() != others.keys():
            return f"{name}: other tensors in {part}"
        wrong = [path for path, x in values.items() if not torch.equal(x.cpu(), others[path].cpu())]
        if wrong:
            return f"{name}: {part} differs in {wrong[:3]}"
    return None


@pytest.mark.parametrize("group", [*GROUPS, "branches"])
def test_each_setting_is_captured_or_refused(
    small_input, two_branches, train, load, steppers, caplog, tmp_path, group
):
    if group == "branches":
        inputs = inputs_of_branches(two_branches(numb_steps=12))
    else:
        every = inputs_with_changes(small_input(), tmp_path / "data")
        inputs = {name: x for name, x in every.items() if name.partition(": ")[0] == group}
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        inputs = {name: x for name, x in inputs.items() if "tensorboard" not in name}
    assert len(inputs) >= 3
    found = [
        difference(name, content, train, load, steppers, caplog) for name, content in inputs.items()
    ]
    assert list(filter(None, found)) == []
