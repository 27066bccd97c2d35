"""Frozen files of strangers: programs that touch files are refused before they run, and damage is found."""

import json
import zipfile

import numpy as np
import pytest
import torch
from frozen_models import build
from small_models import SE_E2_A

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.frozen_archive import MANIFEST
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.main import main
from deepmd_muon.cli.models import check_compiled
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.ase_calculator import DeepPotCalculator


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    path = tmp_path_factory.mktemp("frozen") / "model.pth"
    freeze(build(SE_E2_A), path)
    return path


def empty():
    """A program without methods; torch shares those of a class between its objects."""
    return torch.jit.script(type("Empty", (torch.nn.Module,), {})())


def script(path, source):
    """Write a program with the methods that a potential has, and another one."""
    scripted = empty()
    scripted.define("def get_rcut(self) -> float:\n  return 4.0\n")
    scripted.define("def get_type_map(self) -> List[str]:\n  return ['O', 'H']\n")
    scripted.define(source)
    torch.jit.save(scripted, str(path))
    return path


def rewritten(path, out, change):
    """Copy an archive with changed members; checksums fit again."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as copy:
        for member in archive.infolist():
            content = change(member.filename, archive.read(member.filename))
            info = zipfile.ZipInfo(member.filename)
            copy.writestr(info, content)
    # zipfile marks members as files of a user, which torch does not; the attribute is the last field before the offset.
    data = bytearray(out.read_bytes())
    place = data.find(b"PK\x01\x02")
    while place >= 0:
        data[place + 38 : place + 42] = bytes(4)
        place = data.find(b"PK\x01\x02", place + 4)
    out.write_bytes(data)
    return out


def test_a_frozen_file_lists_its_parts_and_loads_elsewhere(frozen):
    extra = {MANIFEST: ""}
    torch.jit.load(str(frozen), _extra_files=extra)
    listed = json.loads(extra[MANIFEST])["sha256"]
    assert {"data.pkl", "constants.pkl", "code/__torch__/deepmd_muon/deploy/program.py"} <= set(
        listed
    )
    Predictor(frozen, device="cpu")


def touch(path):
    return (
        "def forward_lower(self, coord: Tensor, atype: Tensor, near: Tensor, mapping: Tensor) -> Dict[str, Tensor]:\n"
        f"  y = torch.from_file({str(path)!r}, True, 4)\n"
        "  y.fill_(1)\n"
        "  return {'energy': y}\n"
    )


def test_a_program_that_writes_files_is_refused_before_it_runs(tmp_path):
    victim = tmp_path / "victim"
    bad = script(tmp_path / "bad.pth", touch(victim))
    for load in (
        lambda: Predictor(bad, device="cpu"),
        lambda: DeepPotCalculator(bad, device="cpu"),
    ):
        with pytest.raises(CheckpointError, match=r"from_file.*--trust"):
            load()
    assert not victim.exists()
    positions = np.zeros((1, 3))
    with pytest.raises(CheckpointError, match="does not compute"):
        Predictor(bad, device="cpu", trust=True).predict(positions, None, np.zeros(1, dtype=int))
    assert victim.exists()


@pytest.mark.parametrize(
    "method",
    [
        "def get_rcut2(self) -> float:\n  torch.save(torch.zeros(1), 'x')\n  return 1.0\n",
        "def get_rcut2(self, x: Tensor) -> float:\n  x.save('x')\n  return 1.0\n",
        "def get_rcut2(self) -> float:\n  print('x')\n  return 1.0\n",
    ],
)
def test_no_method_may_call_other_operators(tmp_path, method):
    try:
        bad = script(tmp_path / "bad.pth", method)
    except RuntimeError:
        pytest.skip("torch does not script this")
    with pytest.raises(CheckpointError, match="--trust"):
        Predictor(bad, device="cpu")


def test_what_runs_while_torch_loads_is_refused(tmp_path):
    class Early(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.path = str(tmp_path / "victim")

        @torch.jit.export
        def __getstate__(self):
            return self.path, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[str, bool]):
            self.path, self.training = (
                state[0],
                bool(torch.from_file(state[0], True, 4).fill_(1).sum() > 5),
            )

        def forward(self):
            return 1

    torch.jit.save(torch.jit.script(Early()), str(tmp_path / "early.pth"))
    with pytest.raises(CheckpointError, match="while it is loaded"):
        Predictor(tmp_path / "early.pth", device="cpu")
    assert not (tmp_path / "victim").exists()
    torch.jit.load(str(tmp_path / "early.pth"))
    assert (tmp_path / "victim").exists()  # the threat is real


def test_computed_defaults_are_refused(frozen, tmp_path):
    def change(name, content):
        if name.endswith("deploy/program.py"):
            return content.replace(
                b"def get_rcut(self: ",
                b"def early(self: Tensor, x: int=int(4)) -> int:\n    return x\n  def get_rcut(self: ",
                1,
            )
        return b"" if name.endswith(MANIFEST) else content

    bad = rewritten(frozen, tmp_path / "bad.pth", change)
    with pytest.raises(CheckpointError):
        Predictor(bad, device="cpu")


def test_changed_parts_with_fitting_checksums_are_found(frozen, tmp_path):
    def change(name, content):
        return content[:-1] + bytes([content[-1] ^ 1]) if name.endswith("/data/0") else content

    with pytest.raises(CheckpointError, match="changed"):
        Predictor(rewritten(frozen, tmp_path / "bad.pth", change), device="cpu")


def test_flipped_bits_are_refused_or_harmless(frozen, tmp_path):
    content = frozen.read_bytes()
    random = np.random.default_rng(1)
    coord, types = random.normal(size=(4, 3)) * 1.5, np.array([0, 1, 1, 0])
    expected = Predictor(frozen, device="cpu").predict(coord, None, types).force
    bad = tmp_path / "bad.pth"
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        damaged[random.integers(len(content))] ^= 1 << random.integers(8)
        bad.write_bytes(damaged)
        try:
            force = Predictor(bad, device="cpu").predict(coord, None, types).force
        except CheckpointError:
            refused += 1
        else:
            np.testing.assert_array_equal(force, expected)
    assert refused > 10


@pytest.mark.parametrize(
    ("rcut", "types"),
    [("float('nan')", "['O']"), ("-1.0", "['O']"), ("1e9", "['O']"), ("float('inf')", "['O']")],
)
def test_odd_programs_are_named(tmp_path, rcut, types):
    scripted = empty()
    scripted.define(f"def get_rcut(self) -> float:\n  return {rcut}\n")
    scripted.define(f"def get_type_map(self) -> List[str]:\n  return {types}\n")
    torch.jit.save(scripted, str(tmp_path / "odd.pth"))
    with pytest.raises(CheckpointError, match="cut-off"):
        Predictor(tmp_path / "odd.pth", device="cpu")


def test_compiled_packages_need_trust(tmp_path, capsys):
    package = tmp_path / "model.pt2"
    with pytest.raises(CommandError, match="there is no file"):
        check_compiled(str(package), trust=False)
    package.write_bytes(b"")
    with pytest.raises(CommandError, match="--trust"):
        check_compiled(str(package), trust=False)
    check_compiled(str(package), trust=True)
    assert main(["test", "-m", str(package), "-s", str(tmp_path)]) == 2
    assert "--trust" in capsys.readouterr().err


def test_show_runs_a_strange_program_with_trust_only(tmp_path, capsys):
    victim = tmp_path / "victim"
    bad = script(
        tmp_path / "bad.pth",
        "def get_model_def_script(self) -> str:\n"
        f"  y = torch.from_file({str(victim)!r}, True, 4)\n"
        "  y.fill_(1)\n"
        "  return '{}' if bool((y > 0).all()) else ''\n",  # a result that nobody uses would drop out
    )
    assert main(["show", str(bad), "type-map"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not victim.exists()
    main(["show", str(bad), "type-map", "--trust"])
    assert "--trust" not in capsys.readouterr().err
    assert victim.exists()


def test_show_needs_trust_for_compiled_packages(tmp_path, capsys):
    (tmp_path / "model.pt2").write_bytes(b"PK")
    assert main(["show", str(tmp_path / "model.pt2"), "type-map"]) == 2
    assert "--trust" in capsys.readouterr().err


def test_show_of_our_frozen_file_needs_no_trust(frozen, caplog):
    for words in ([], ["--trust"]):
        caplog.clear()
        assert main(["show", str(frozen), "type-map", *words]) == 0
        assert any("type_map is" in record.message for record in caplog.records)
