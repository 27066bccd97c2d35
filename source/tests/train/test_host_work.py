"""What the host does before the first step, and in a step that a GPU replays: calls are counted, not seconds."""

import os
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from write_systems import make_arrays, write_npy

from deepmd_muon.data import open_systems
from deepmd_muon.data.neighbors import cache
from deepmd_muon.data.sampling import loader, samples
from deepmd_muon.data.stores import npy_store
from deepmd_muon.train import omitted_settings, start, trainer
from deepmd_muon.train.batches.device_sample import DeviceSample
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
def test_a_replayed_step_needs_few_calls_on_the_host(
    on_device, train, small_input, monkeypatch, batch_size
):
    """The time must stay far below that of the smallest step: 145 calls take 39 µs where 310 took 125 µs."""
    on_device()
    build = trainer.build_stepper

    def with_graphs(**options):
        options["device_parts"].memory = FreeGraphs()
        return build(**options)

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
    content["training"] |= {
        "numb_steps": BEGIN + WINDOW + 1,
        "disp_freq": 10**6,
        "save_freq": 10**6,
    }
    content["training"]["training_data"]["batch_size"] = batch_size
    try:
        assert train(content) == 0
    finally:
        sys.setprofile(None)
    assert calls / WINDOW < 180


@pytest.fixture
def file_calls(monkeypatch):
    """Calls of the system's functions for files, by name, and the places that were opened."""
    calls = Counter()

    def counted(name):
        function = getattr(os, name)

        def count(*arguments, **options):
            calls[name] += 1
            if name == "open":
                calls[str(arguments[0])] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(os, name, count)

    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        counted(name)
    return calls


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("small", [True, False])
def test_a_system_is_opened_and_read_with_few_calls_of_the_system(
    tmp_path, monkeypatch, file_calls, sets, small
):
    if not small:
        monkeypatch.setattr(npy_store, "_FEW_BYTES", 0)
    places = [write_npy(tmp_path / str(k), [0, 1], [make_arrays(3, 2)] * sets) for k in range(8)]
    file_calls.clear()
    opened = open_systems(places)
    # Each folder is listed once: that of the system while it is looked for, and its sets.
    assert (file_calls["scandir"], file_calls["listdir"]) == (8, 8 * sets)
    assert file_calls["stat"] <= 8 * 4
    assert not file_calls["lstat"]
    for place in places:
        assert {count for path, count in file_calls.items() if path.startswith(f"{place}/")} == {1}
    file_calls.clear()
    for system in opened:
        system.frames([0, 2])
    files = 8 * (2 + len(opened[0].labels))
    # Each file is compared with what it was. The values of small ones were read with their headers.
    assert (file_calls["stat"], file_calls["open"]) == (files, 0 if small else files)


def test_the_bounded_sample_is_drawn_once(small_input, train, monkeypatch):
    """Neighbours are counted in the frames of the statistics and in others; descriptors are measured in a third set."""
    draws = []

    def draw(*arguments):
        draws.append(arguments)
        return samples_of(*arguments)

    samples_of = samples.sample_frames
    for module in (samples, loader):
        monkeypatch.setattr(module, "sample_frames", draw)
    content = small_input(training={"numb_steps": 1})
    content["model"]["descriptor"]["sel"] = [60]
    assert train(content) == 0
    assert len(draws) == 3


@pytest.mark.parametrize("most", [1, 1500, 5 << 14])
def test_lists_before_the_first_step_are_those_that_are_read(small_input, train, monkeypatch, most):
    """Statistics and the length of descriptors read lists. Others are counted as far as they are sampled."""
    monkeypatch.setattr(omitted_settings, "_MOST_COUNTED", most)
    given, drawn, lists = [], [], Counter()

    def sampled(*arguments):
        drawn.append(sample_with(*arguments))
        return drawn[-1]

    sample_with = omitted_settings.sample_with
    monkeypatch.setattr(omitted_settings, "sample_with", sampled)

    def listed_there(*arguments, **options):
        given.append(listed(*arguments, **options))
        return given[-1]

    def counted(name):
        function = getattr(cache, name)
        monkeypatch.setattr(
            cache, name, lambda **arguments: lists.update([name]) or function(**arguments)
        )

    listed = omitted_settings.frames_to_list
    monkeypatch.setattr(omitted_settings, "frames_to_list", listed_there)
    counted("build_neighbors")
    counted("frame_statistics")
    content = small_input(training={"numb_steps": 0})
    content["model"] |= {
        "data_stat_nbatch": 2,
        "descriptor": {**content["model"]["descriptor"], "sel": [60]},
    }
    content["training"].pop("validation_data", None)
    assert train(content) == 0
    frames = sum(
        system.nframes for system in open_systems(content["training"]["training_data"]["systems"])
    )
    if given[0] is None:
        assert lists == {"build_neighbors": frames}
        return
    read = [np.unique(numbers) for numbers in given[0]]
    assert lists["build_neighbors"] == sum(map(len, read)) > 0
    others = sum(len(np.setdiff1d(mine, own)) for mine, own in zip(drawn[0], read, strict=True))
    assert lists["frame_statistics"] == others > 0


@pytest.mark.parametrize("sel", ["auto", [60]])
def test_a_device_that_searches_leaves_no_neighbours_to_the_host(
    small_input, train, monkeypatch, sel
):
    content = small_input(training={"numb_steps": 0})
    content["model"]["descriptor"]["sel"] = sel
    content["training"].pop("validation_data", None)
    written = []
    for place in ("host", "device"):
        if place == "device":
            for module in (start, omitted_settings):
                monkeypatch.setattr(
                    module, "sample_on", lambda device, *given: DeviceSample(*given, device)
                )
            for name in ("build_neighbors", "frame_statistics"):
                monkeypatch.setattr(
                    cache, name, lambda **given: pytest.fail("the host looked for neighbours")
                )
        content["training"]["save_ckpt"] = place
        assert train(content) == 0
        written.append(torch.load(f"{place}-0.pt", weights_only=False)["model"])
    weights = [
        {name: x for name, x in one.items() if isinstance(x, torch.Tensor)} for one in written
    ]
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-14)
    assert len(weights[0]) > 8
