"""The documentation site builds without a warning: links, anchors and docstrings are right, and nothing is fetched."""

from __future__ import annotations

import html
import re

import pytest

from deepmd_muon import optim
from deepmd_muon.optim import sharded

pytestmark = pytest.mark.slow  # every page is read and every docstring imported


def test_every_public_name_of_the_optimizer_is_documented(site):
    text = (site / "doc" / "api.html").read_text()
    names = [f"{module.__name__}.{name}" for module in (optim, sharded) for name in module.__all__]
    described = set(re.findall(r'id="(deepmd_muon[\w.]+)"', text))
    described |= {name.replace("optim.qk_clip.", "optim.") for name in described}
    assert [name for name in names if name not in described] == []


def test_the_top_of_the_site_leads_to_its_first_page(site):
    (target,) = re.findall(r'url=([^"]+)"', (site / "index.html").read_text())
    assert target == "doc/index.html"
    first = (site / target).read_text()
    assert "adam_and_hybrid_muon.png" in first
    assert 'action="../search.html"' in first


def test_readers_fetch_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert {"index.html", "start.html", "api.html", "training.html"} <= {
        page.name for page in pages
    }
    for page in pages:
        loaded = re.findall(r'<(?:script|img)[^>]* src="(https?:[^"]*)"', page.read_text())
        loaded += re.findall(
            r'<link[^>]* rel="(?:stylesheet|preload)"[^>]* href="(https?:[^"]*)"', page.read_text()
        )
        assert loaded == [], page.name


def test_values_can_be_pasted(site):
    for page in ("input-reference", "explore-reference", "training"):
        assert not set("“”‘’") & set((site / "doc" / f"{page}.html").read_text()), page


def test_code_fits_beside_the_bars_or_wraps(site):
    style = (site / "_static" / "site.css").read_text()
    wrapped = set(re.findall(r"\.highlight-(\w+) pre(?=[^{}]*{ white-space: pre-wrap)", style))
    assert wrapped == {"sh", "text"}
    block = re.compile(r'<div class="highlight-(\w+) notranslate">.*?<pre>(.*?)</pre>', re.DOTALL)
    for page in site.rglob("*.html"):
        for language, code in block.findall(page.read_text()):
            lines = html.unescape(re.sub(r"<[^>]*>", "", code)).split("\n")
            longest = max(lines, key=len)
            assert language in wrapped or len(longest) <= 100, (page.name, longest)
