"""`dp neighbor-stat` counts by element, whichever way a system numbers its elements."""

import numpy as np
import pytest

from deepmd_muon.cli.main import main


def write(folder, elements, symbols):
    """One water molecule in a folder of its own."""
    (folder / "set.000").mkdir(parents=True)
    (folder / "nopbc").touch()
    (folder / "type_map.raw").write_text("\n".join(elements))
    (folder / "type.raw").write_text("\n".join(str(elements.index(symbol)) for symbol in symbols))
    positions = {"O": [[0.0, 0.0, 0.0]], "H": [[0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]]}
    coord = [positions[symbol].pop(0) for symbol in symbols]
    np.save(folder / "set.000" / "coord.npy", np.array(coord).reshape(1, -1))


@pytest.fixture
def water(tmp_path):
    write(tmp_path / "a", ["O", "H"], "OHH")
    write(tmp_path / "b", ["H", "O"], "OHH")
    write(tmp_path / "oxygen", ["O"], "O")
    return tmp_path


def test_systems_that_number_elements_differently_need_a_type_map(water, capsys):
    assert main(["neighbor-stat", "-s", str(water), "-r", "3"]) == 2
    message = capsys.readouterr().err
    assert "has type map ['H', 'O'], others have ['O', 'H']" in message
    assert "-t of neighbor-stat" in message


def test_with_a_type_map_counts_are_by_element(water, capsys):
    assert main(["neighbor-stat", "-s", str(water), "-r", "3", "-t", "O", "H"]) == 0
    assert "max_nbor_size: [1, 2]" in capsys.readouterr().err


def test_without_one_the_longest_of_the_systems_is_taken(water, capsys):
    (water / "b" / "type.raw").unlink()
    (water / "a").rename(water / "z")  # the shorter map comes first
    assert main(["neighbor-stat", "-s", str(water), "-r", "3"]) == 0
    log = capsys.readouterr().err
    assert "type_map: ['O', 'H']" in log
    assert "max_nbor_size: [1, 2]" in log
