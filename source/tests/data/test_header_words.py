"""Words of headers that differ among frames and that nothing reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepmd_muon.data.checks.header_words import unread_words


def system_of(charges):
    """A system whose frames have these charges in their headers, and no other words."""
    origins = [SimpleNamespace(words={"charge": charge}) for charge in charges]
    return SimpleNamespace(nframes=len(origins), origin=origins.__getitem__)


@pytest.mark.parametrize(("n_values", "cut"), [(5, False), (6, True)])
def test_values_are_cut_only_if_there_are_more(n_values, cut):
    (text,) = unread_words([system_of([*range(n_values), 0])], read=())
    assert "(0 in 2 frames, 1 in 1 frame, " in text
    assert ("…" in text) == cut
    assert "none" not in text


def test_words_that_do_not_differ_are_not_listed():
    assert unread_words([system_of([1, 1])], read=()) == []
    assert unread_words([system_of([1, 2])], read=("charge",)) == []
