"""What the host does in a step that a GPU replays: it must stay far below the time of the smallest step."""

import sys

import pytest
import torch

from deepmd_muon.train import trainer
from deepmd_muon.train.step.stepper import CapturedStep

#: Steps between two windows of batches.
WINDOW = 1024
BEGIN = 200


class FreeGraphs:
    """In place of `GraphMemory`: recording runs the work once, and a replay costs nothing."""

    def run_aside(self, launch):
        launch()

    def recorded(self, launch):
        launch()
        return self

    def replay(self):
        pass


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_replayed_step_needs_few_calls_on_the_host(on_device, train, small_input, monkeypatch, batch_size):
    """Calls are counted, not seconds: 145 of them take 39 µs on a machine where 310 took 125 µs."""
    on_device()
    build = trainer.build_stepper

    def with_graphs(*arguments):
        arguments[-1].memory = FreeGraphs()
        return build(*arguments)

    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    step = CapturedStep.__call__

    def watched(self, feed, done):
        if done == BEGIN:
            sys.setprofile(count)
        elif done == BEGIN + WINDOW:
            sys.setprofile(None)
        return step(self, feed, done)

    monkeypatch.setattr(trainer, "build_stepper", with_graphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(CapturedStep, "__call__", watched)
    content = small_input()
    content["training"] |= {"numb_steps": BEGIN + WINDOW + 1, "disp_freq": 10**6, "save_freq": 10**6}
    content["training"]["training_data"]["batch_size"] = batch_size
    try:
        assert train(content) == 0
    finally:
        sys.setprofile(None)
    assert calls / WINDOW < 180
