"""i-PI with our calculator through ASE's socket: IPI=its program."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from frozen_models import build
from small_models import SE_E2_A

from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import Predictor

EXAMPLE = Path(__file__).parents[3] / "examples" / "water_md"

pytestmark = pytest.mark.skipif("IPI" not in os.environ, reason="needs IPI, the program i-pi")


def test_energies_are_the_checkpoints_and_conserved(tmp_path):
    ase_io = pytest.importorskip("ase.io")
    model, address = build(SE_E2_A), f"deepmd_muon_{os.getpid()}"
    freeze(model, tmp_path / "model.pth")
    subprocess.run([sys.executable, EXAMPLE / "make_structure.py"], cwd=tmp_path, check=True)
    (tmp_path / "ipi.xml").write_text(
        (EXAMPLE / "ipi.xml").read_text().replace("<address>deepmd_muon<", f"<address>{address}<")
    )
    with subprocess.Popen(
        [os.environ["IPI"], "ipi.xml"], cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as server:
        while not Path(f"/tmp/ipi_{address}").exists() and server.poll() is None:
            time.sleep(0.1)
        client = [sys.executable, EXAMPLE / "ipi_client.py", "model.pth", address]
        subprocess.run(client, cwd=tmp_path, check=True)
        assert server.wait() == 0
    step, conserved, potential = np.loadtxt(tmp_path / "water.out").T
    water = ase_io.read(tmp_path / "water.xyz")
    types = np.array(["OH".index(symbol) for symbol in water.symbols])
    expected = (
        Predictor(model, device="cpu")
        .predict(water.positions, np.array(water.cell), types)
        .energy.item()
    )
    assert step[-1] == 20
    assert potential[0] == pytest.approx(expected, rel=1e-7)
    assert np.ptp(potential) > 1e-4
    assert np.ptp(conserved) < 0.02 * np.ptp(potential)
