"""The page in doc/ says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from deepmd_muon.optim.polar import SCHEDULES

PAGE = Path(__file__).parents[3] / "doc" / "optimizer.md"


def test_the_first_snippet_prints_the_output_of_the_page(capsys):
    text = PAGE.read_text(encoding="utf-8")
    program, printed = re.search(
        r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", text, re.DOTALL
    ).groups()
    exec(compile(program, "doc/optimizer.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_table_of_schedules_is_right():
    text = PAGE.with_name("polar-factor.md").read_text(encoding="utf-8")
    for name, schedule in SCHEDULES.items():
        row = re.search(rf"\| `{re.escape(name)}`[^|]*\| (\d+) \| (\S+) \| (\S+) – (\S+) \|", text)
        steps, cutoff, low, high = row.groups()
        assert int(steps) == len(schedule.coefficients)
        assert float(cutoff) == schedule.cutoff
        assert (float(low), float(high)) == schedule.band
