"""`dp neighbor-stat` counts by element, whichever way a system numbers its elements."""

import ast

import numpy as np
import pytest
from commands import run_dp
from write_systems import write_npy


def write(folder, elements, symbols):
    """One water molecule in a folder of its own."""
    positions = {"O": [[0.0, 0.0, 0.0]], "H": [[0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]]}
    coord = np.array([positions[symbol].pop(0) for symbol in symbols]).reshape(1, -1)
    write_npy(folder, map(elements.index, symbols), [{"coord": coord}], elements, nopbc=True)


@pytest.fixture
def water(tmp_path):
    write(tmp_path / "a", ["O", "H"], "OHH")
    write(tmp_path / "b", ["H", "O"], "OHH")
    write(tmp_path / "oxygen", ["O"], "O")
    return tmp_path


def test_systems_that_number_elements_differently_are_counted_by_element(water, capsys):
    assert run_dp(f"neighbor-stat -s {water} -r 3") == 0
    shown = capsys.readouterr().err
    # They differ: by atomic number, as in `dp train`, whichever element appears first.
    assert "type_map: ['H', 'O']" in shown
    assert "max_nbor_size: [2, 1]" in shown
    assert "by element: H 2, O 1" in shown
    assert run_dp(f"neighbor-stat -s {water} -r 3 -t O H") == 0
    shown = capsys.readouterr().err
    assert "max_nbor_size: [1, 2]" in shown
    assert "by element: O 1, H 2" in shown


def test_distances_that_are_mistakes_are_named(water, capsys):
    assert run_dp(f"neighbor-stat -s {water} -r 0.9") == 0
    assert "no atom has a neighbour within the cut-off of 0.9 Å" in capsys.readouterr().err
    coord = np.array([[0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 3.0, 0.0, 0.0]])
    write_npy(water / "close", [0, 1, 1], [{"coord": coord}], ["O", "H"], nopbc=True)
    assert run_dp(f"neighbor-stat -s {water} -r 3") == 0
    assert "close: frame 0: atoms 0 and 1 are 0.01 Å apart" in capsys.readouterr().err


def test_a_system_without_names_among_such_needs_a_type_map(water, capsys):
    (water / "oxygen" / "type_map.raw").unlink()
    assert run_dp(f"neighbor-stat -s {water} -r 3") == 2
    assert "-t of neighbor-stat" in capsys.readouterr().err


@pytest.fixture
def forms(tmp_path):
    """Water, carbon dioxide and ammonia in one file of each form: three sets of elements in three orders."""
    ase = pytest.importorskip("ase")
    pytest.importorskip("lmdb")
    from ase.build import molecule
    from ase.io import write as write_file

    frames = [molecule(name, cell=[9.0] * 3, pbc=True) for name in ("H2O", "CO2", "NH3")]
    assert isinstance(frames[0], ase.Atoms)
    write_file(tmp_path / "train.xyz", frames)
    for form in ("data.hdf5", "data.lmdb", "npy"):
        assert run_dp(f"convert-data --unlabelled {tmp_path}/train.xyz {tmp_path}/{form}") == 0
    names = ["N", "H", "O", "C"]
    types = [[names.index(symbol) for symbol in atoms.get_chemical_symbols()] for atoms in frames]
    coords = [atoms.positions.ravel() for atoms in frames]
    padded = max(map(len, types))
    arrays = {
        "real_atom_types": [row + [-1] * (padded - len(row)) for row in types],
        "coord": [np.pad(row, (0, 3 * padded - len(row))) for row in coords],
        "box": np.tile(9.0 * np.eye(3).ravel(), (3, 1)),
    }
    write_npy(tmp_path / "mixed", [0] * padded, [arrays], names)
    return tmp_path


@pytest.mark.parametrize("form", ["train.xyz", "data.hdf5", "data.lmdb", "npy", "mixed"])
def test_every_form_is_counted_with_and_without_a_type_map(form, forms, capsys):
    """By hand: C sees two O, O of CO2 one O, N sees three H, H of ammonia one N and two H."""
    most = {"H": 3, "C": 1, "N": 1, "O": 2}
    count = f"neighbor-stat -s {forms / form} -r 2.6"
    capsys.readouterr()
    for given in ("", "-t H C N O", "-t Si O N C H"):
        assert run_dp(f"{count} {given}") == 0
        shown = capsys.readouterr().err
        if not given:
            names = ast.literal_eval(shown.partition("type_map: ")[2].partition("\n")[0])
            assert sorted(names) == ["C", "H", "N", "O"]
        sizes = ast.literal_eval(shown.partition("max_nbor_size: ")[2].partition("\n")[0])
        silicon = {"Si": 0} if "Si" in given else {}
        assert dict(zip(given.split()[1:] or names, sizes, strict=True)) == {**most, **silicon}
        assert "min_nbor_dist: 0.968" in shown  # O-H
        assert run_dp(f"{count} --mixed-type {given}") == 0
        assert "max_nbor_size: [3]" in capsys.readouterr().err
    assert run_dp(f"{count} -t H O") == 2
    assert "-t of neighbor-stat" in capsys.readouterr().err


def test_the_order_that_all_systems_have_is_taken(water, capsys):
    (water / "b" / "type.raw").unlink()
    (water / "oxygen" / "type_map.raw").write_text("O H")
    assert run_dp(f"neighbor-stat -s {water} -r 3") == 0
    shown = capsys.readouterr().err
    assert "type_map: ['O', 'H']" in shown
    assert "by element: O 1, H 2" in shown
