"""Tables of the race: values follow from the results, and the published page and files are those of the raw results."""

from pathlib import Path

import report
from fields import Default
from pictures import Rival, draw
from results import read

TOP = Path(__file__).resolve().parents[3]


def test_the_picture_has_a_panel_for_each_budget(tmp_path):
    rows = [
        Default("water", "dpa3", steps, (0.1, 1.0), (float("nan"), 1.0)) for steps in (3000, 30000)
    ]
    widths = []
    for some in (rows[:1], rows):
        draw(some, [Rival("water", "dpa3", 3000, "SOAP", 0.5)], tmp_path / "a.png")
        content = (tmp_path / "a.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        widths.append(int.from_bytes(content[16:20], "big"))
    assert widths[1] == 2 * widths[0]


def test_the_published_page_and_files_are_those_of_the_published_results():
    raw = TOP / "doc" / "benchmarks" / "raw" / "race"
    results, times = read(raw.glob("*.jsonl"))
    found = report.fields(results.values())
    page = (TOP / "doc" / "benchmarks" / "race.md").read_text()
    assert report.with_table(page, report.default_table(list(report.defaults(found)))) == page
    assert {path.name: path.read_text() for path in raw.glob("*.csv")} == report.tables(
        found, times
    )
