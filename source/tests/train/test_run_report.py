"""`dp report` of a finished run: the page needs nothing else, and its command writes it again."""

import html
import re
import shlex
from pathlib import Path

import pytest
from matplotlib.image import imread

from deepmd_muon.cli.main import build_parser, main

FAST = ["-n", "4", "--temperature", "300", "--time", "0.002", "--copies", "1"]


def test_report_of_a_run(finished, capsys):
    assert main(["--pt", "report", "input.json", *FAST]) == 0
    page = Path("report.html").read_text()
    for title in ("Learning curve", "Predictions and reference", "Worst frames", "Check of dyn"):
        assert f"<h2>{title}" in page
    assert "Errors by config_type" not in page  # the data name none
    sources = re.findall(r'(?:src|href)="([^"]*)', page)
    assert {source.partition(",")[0] for source in sources} == {"data:image/png;base64"}
    assert "url(" not in page
    assert page.count("<img ") == 3 + 3 + 1 + 4  # curve, parity, distances, check
    assert imread("report.png").std() > 0.01

    again = re.search(r"# write this report again\n(.*?)\n?</pre>", page, re.DOTALL)
    words = shlex.split(html.unescape(again[1]))
    parse = build_parser().parse_args
    first = vars(parse(["--pt", "report", "input.json", *FAST]))
    assert vars(parse(words[1:])) == {**first, "model": "model.ckpt.pt", "lcurve": "lcurve.out"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-o", "report.pdf"], ".html"),
        (["-n", "0"], "-n"),
        (["-o", "input.html", "-m", "absent.pt"], "absent.pt"),
    ],
)
def test_rejects_wrong_options(finished, capsys, words, named):
    assert main(["--pt", "report", "input.json", *words]) == 2
    assert named in capsys.readouterr().err


def test_a_report_without_learning_curve_says_so(finished):
    Path("lcurve.out").rename("moved.out")
    assert main(["--pt", "report", "input.json", "-n", "2", "--no-check"]) == 0
    page = Path("report.html").read_text()
    assert "no learning curve lcurve.out" in page
    assert "Check of dynamics" not in page
