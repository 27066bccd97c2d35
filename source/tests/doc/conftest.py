"""The documentation site, built once."""

import contextlib
import io
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]


@pytest.fixture(scope="session")
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
        # Without the index of words, which takes a quarter of the time and cannot be wrong.
        patch.setattr(StandaloneHTMLBuilder, "search", False)
        # In this process, which has imported what the pages describe. The cache of a build lies beside it.
        status = main(["-q", "-W", "--keep-going", "-c", "doc", ".", str(out)])
    assert status == 0, told.getvalue()
    return out
