"""The documentation site builds without a warning: links, anchors and docstrings are right, and nothing is fetched."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from deepmd_muon import optim
from deepmd_muon.optim import sharded

pytestmark = pytest.mark.slow  # every page is read and every docstring imported
TOP = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as CONTRIBUTING.md says."""
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason="pip install -c constraints.txt '.[docs]' brings it")
    from sphinx.builders.html import StandaloneHTMLBuilder
    from sphinx.cmd.build import main

    out, told = tmp_path_factory.mktemp("site"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(told):
        patch.chdir(TOP)
        for variable in ("https_proxy", "http_proxy"):  # no proxy answers
            patch.setenv(variable, "http://127.0.0.1:9")
        # Without the index of words and curled quotation marks, which take a quarter of the time and cannot be wrong.
        patch.setattr(StandaloneHTMLBuilder, "search", False)
        # In this process, which has imported what the pages describe. The cache of a build lies beside it.
        status = main(
            ["-q", "-W", "--keep-going", "-D", "smartquotes=0", "-c", "doc", ".", str(out)]
        )
    assert status == 0, told.getvalue()
    return out


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
