"""A training whose disk fails at any call loses nothing, and goes on as if nothing had happened."""

from __future__ import annotations

import pytest
from faults import KINDS, run_faults

# Kind, calls and fault of a few cases that have failed before, or stand for many.
CASES = [
    ("file", r"replace model\.ckpt\.pt", 3, ("ENOSPC", "EACCES lasting")),
    ("best", r"write (lcurve\.out|log\.jsonl)", 13, ("EIO",)),
    ("file", r"write (lcurve\.out|train\.log)", 13, ("EINTR lasting",)),
    ("best", r"replace (val\.log|best\.ckpt-9.*)", 1, ("ESTALE lasting",)),
]


@pytest.mark.parametrize(("kind", "only", "every", "faults"), CASES)
def test_a_few_faults(tmp_path, kind, only, every, faults):
    count, failures = run_faults(tmp_path, kind, every, faults, only)
    assert failures == []
    assert count == 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_fails(tmp_path, kind):
    count, failures = run_faults(tmp_path, kind)
    assert failures == []
    assert count > 100
