"""The published table of the plan: bytes and work against their lower bounds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sharded_plan.py"


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("sharded_plan", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "ranks", "sent", "work"),
    [
        ("9 matrices", 8, 1.4, 1.6),
        ("DPA-like, 5.5 M", 8, 1.05, 1.004),
        ("Llama-8B", 64, 1.05, 1.06),
    ],
)
def test_owners_are_close_to_the_bound(table, name, ranks, sent, work):
    (case,) = [case for case in table.cases(quick=True) if (case.name, case.ranks) == (name, ranks)]
    plan = table.plan_of(case)
    (domain,) = plan.domains
    least_sent, least_work = table.bound(case)
    assert 1 <= max(domain.bytes_sent(plan.settings).values()) / table.ELEMENT / least_sent <= sent
    assert 1 <= max(domain.work.values()) / least_work <= work


def test_rivals_are_counted_as_published(table):
    """Llama-8B on 64 ranks: the figures of the schemes' own descriptions."""
    (case,) = [
        case for case in table.cases(quick=True) if (case.name, case.ranks) == ("Llama-8B", 64)
    ]
    least_sent, least_work = table.bound(case)
    found = {
        row.scheme: (row.sent / least_sent, row.work / least_work) for row in table.rivals(case)
    }
    assert found["everyone"] == (32, 64)
    assert found["by shape"] == pytest.approx((1.269, 1.264), abs=1e-3)
    assert found["in turn"] == pytest.approx((1.135, 1.264), abs=1e-3)


def test_every_line_of_the_quick_table(table):
    lines = [
        line for case in table.cases(quick=True) if case.ranks < 64 for line in table.rows_of(case)
    ]
    assert sum("**ours**" in line for line in lines) == 4
    assert all(line.count("|") == 11 for line in lines)


def test_the_page_plans_a_cluster(capsys):
    page = (SCRIPT.parents[2] / "doc" / "sharded.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (code,) = (
        block for block in blocks if "mesh=(64,)" in block
    )  # the first block is a script for torchrun
    exec(compile(code, "sharded.md", "exec"), {})
    assert "64 ranks; 2 parameters, 2 matrices on mesh 64: Shard(0)" in capsys.readouterr().out
