"""One colour for each optimizer in all pictures."""

import itertools
from pathlib import Path

import pytest

from deepmd_muon.show.palette import OPTIMIZERS, SERIES, colors_of

TOP = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "labels", [["Adam", "HybridMuon"], ["HybridMuon", "first", "Adam"], ["HYBRIDMUON, lr 1e-3"]]
)
def test_an_optimizer_has_its_color_wherever_it_stands(labels):
    found = dict(zip(labels, colors_of(labels), strict=True))
    assert len({*found.values()}) == len(labels)
    for label, color in found.items():
        for name in ("HybridMuon", "Adam"):
            if label.lower().startswith(name.lower()):
                assert color == OPTIMIZERS[name]


def test_names_that_begin_alike_differ():
    assert colors_of(["AdamW", "Adam"]) == [OPTIMIZERS["AdamW"], OPTIMIZERS["Adam"]]
    assert colors_of(["Adamantane", "deepmd-kit's HybridMuon"]) == [
        SERIES[0],
        OPTIMIZERS["deepmd-kit's HybridMuon"],
    ]


def test_a_second_run_of_an_optimizer_has_another_color():
    labels = ["HybridMuon, seed 1", "HybridMuon, seed 2", "runs/a", *map(str, range(9))]
    found = colors_of(labels)
    assert found[0] == OPTIMIZERS["HybridMuon"]
    assert found[1:3] == [SERIES[0], SERIES[2]]
    assert len({*found}) == len(SERIES)
    assert found[7] == found[1]  # six colours are left beside that of HybridMuon


def lightness(color):
    """CIE L* of an sRGB colour, from 0 for black to 100 for white."""
    channels = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16


def test_a_print_in_grey_tells_colors_apart():
    shades = sorted(map(lightness, SERIES))
    assert min(b - a for a, b in itertools.pairwise([*shades, 100])) > 8


def test_no_other_module_writes_colors_of_series_down():
    palette = TOP / "deepmd_muon" / "show" / "palette.py"
    for folder in ("deepmd_muon", "source/benchmarks", "examples"):
        for path in (TOP / folder).rglob("*.py"):
            text = path.read_text()
            assert path == palette or not [color for color in SERIES if color in text], path
