"""A killed `dp freeze` or `dp compress` leaves the old file or the new one."""

import os
import signal
from pathlib import Path

import pytest
import torch
from frozen_models import build

from deepmd_muon.deploy.compress import compress
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.files import _NamedFile
from deepmd_muon.infer import Predictor

OUTPUT = Path("model.pth")
OLD = b"the file of an earlier command"
SMALL = {
    "type": "se_e2_a",
    "sel": [6, 12],
    "rcut": 3.0,
    "rcut_smth": 1.0,
    "neuron": [4],
    "axis_neuron": 2,
    "seed": 1,
}


def compress_with_wide_steps(model, output):
    compress(model, output, min_distance=0.8, step=0.05)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before(original):
    return lambda *args, **options: die()


def dies_after(original):
    def call(*args, **options):
        original(*args, **options)
        die()

    return call


def dies_half_way(write):
    def call(file, data):
        write(file, data[: len(data) // 2])
        die()

    return call


def in_killed_process(work):
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(1)  # not reached if the process was killed
    assert os.waitpid(process, 0)[1] == signal.SIGKILL


MOMENTS = [
    (_NamedFile, "write", dies_half_way),
    (torch.jit, "load", dies_before),  # to compare
    (os, "replace", dies_before),
]


@pytest.mark.parametrize(
    "command", [freeze, pytest.param(compress_with_wide_steps, marks=pytest.mark.slow)]
)
def test_a_killed_command_leaves_the_old_file(command, tmp_path, monkeypatch, as_alone):
    monkeypatch.chdir(tmp_path)
    OUTPUT.write_bytes(OLD)
    model = build(SMALL)

    def kill_in(owner, name, replacement):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, replacement(getattr(owner, name)))
            in_killed_process(lambda: command(model, OUTPUT))

    for moment in MOMENTS:
        kill_in(*moment)
        assert OUTPUT.read_bytes() == OLD
        (leftover,) = set(Path().iterdir()) - {OUTPUT}
        assert leftover.name.startswith(".model.")
        leftover.unlink()
    kill_in(os, "replace", dies_after)
    assert set(Path().iterdir()) == {OUTPUT}
    assert Predictor(OUTPUT, device="cpu").type_map == ("O", "H")
