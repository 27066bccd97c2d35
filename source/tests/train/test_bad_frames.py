"""After a bad step, the message names the frames that are responsible, not the whole batch."""

import math
import re

import pytest
from write_systems import make_arrays, write_npy

from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.train import NonFiniteError
from deepmd_muon.train.step.bad_frames import describe_batch, without_losses

ORIGIN = Origin((("data/a", (3, 7)), ("data/b", (0, 2))))


def describe(*losses):
    frames = without_losses(ORIGIN)
    return describe_batch([frame._replace(loss=x) for frame, x in zip(frames, losses, strict=True)])


def test_frames_that_are_not_finite_are_named():
    assert "4 frames; the responsible frame is data/b (frame 0)" in describe(2, 1, math.inf, 1e9)
    found = describe(2, math.nan, math.inf, 1)
    assert found.endswith("the responsible frames are data/a (frame 7), data/b (frame 0)")


def test_frames_far_above_the_others_are_named():
    assert describe(2, 1, 3, 1e5).endswith("the responsible frame is data/b (frame 2)")
    assert "responsible" not in describe(2, 1, 3, 90)


@pytest.mark.parametrize("losses", [[math.inf] * 4, [None] * 4, [0, 0, 0, 0]])
def test_all_frames_are_named_if_none_stands_out(losses):
    assert describe(*losses) == "data/a (frames 3, 7), data/b (frames 0, 2)"


def write_frames(folder, bad, value):
    """Write frames of eight atoms, of which one has a force of this size."""
    arrays = make_arrays(6, 8)
    arrays["force"][bad, 4] = value
    return write_npy(folder, [0] * 8, [arrays], ["Cu"])


@pytest.fixture
def run_into_frame(small_input, train, tmp_path):
    """A function that trains on data with a bad frame until the run ends, and returns the error."""

    def run(bad, value, **training):
        content = small_input(loss={"start_pref_v": 0.0, "limit_pref_v": 0.0})
        path = write_frames(tmp_path / "data", bad, value)
        content["training"]["training_data"] = {"systems": [path], "batch_size": 6}
        del content["training"]["validation_data"]
        content["training"] |= training
        with pytest.raises(NonFiniteError) as caught:
            train(content)
        return str(caught.value)

    return run


@pytest.mark.parametrize("step", ["host", "device", "streamed"])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_run_names_the_bad_frame(run_into_frame, on_device, step, batches):
    if step != "host":
        on_device(streamed=step == "streamed")
    message = run_into_frame(4, 1e200, accumulate_grad_batches=batches, disp_freq=1)
    assert re.search(r"6 frames; the responsible frame is .*data \(frame 4\)", message)


def test_a_frame_that_cannot_be_read_again_leaves_the_batch(run_into_frame, monkeypatch):
    def fail(*_):
        raise OSError("gone")

    monkeypatch.setattr("deepmd_muon.train.step.bad_frames.to_device", fail)
    message = run_into_frame(4, 1e200)
    assert "responsible" not in message
    numbers = re.search(r"data \(frames ([\d, ]+)\)", message)
    assert sorted(map(int, numbers[1].split(","))) == list(range(6))


def test_weights_of_a_skipped_step_are_not_evaluated(small_input, train, tmp_path, monkeypatch):
    """Under 'skip' the run goes on, and a bad step costs no more than another one."""
    path = write_frames(tmp_path / "data", 4, 1e200)
    content = small_input(optimizer={"on_nonfinite": "skip"}, training={"numb_steps": 2})
    content["training"]["training_data"] = {"systems": [path], "batch_size": 6}
    del content["training"]["validation_data"]
    monkeypatch.setattr("deepmd_muon.train.step.bad_frames.to_device", None)
    assert train(content) == 0
