"""Pages and a report in a real browser, as wide as a phone, a tablet and screens: nothing scrolls sideways.

Code and wide tables may scroll in their own frame on a phone. Commands never do.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepmd_muon.data import Parameters, open_systems
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.show.report.errors import compare
from deepmd_muon.show.report.page import Report, page_of

pytestmark = pytest.mark.browser

PAGES = (
    "doc/index.html",
    "doc/start.html",
    "doc/tutorials/own-data.html",
    "doc/input-reference.html",
    "doc/molecules.html",
    "doc/mace-nequip.html",
    "doc/stability.html",
    "doc/benchmarks/race.html",
)
TOP = Path(__file__).resolve().parents[3]
WIDTHS = (390, 820, 1024, 1400)
# It opens each page in frames of each width and lists everything that is wider than its place.
HARNESS = """<!doctype html><pre id="found"></pre><script>
const jobs = %s, found = [];
async function look([page, width]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  const loaded = new Promise(done => frame.onload = done);
  document.body.append(frame);
  await loaded;
  const root = frame.contentDocument.documentElement;
  const wide = [...root.querySelectorAll("h1, h2, p, li, img, pre")].filter(
    node => node.clientWidth && node.scrollWidth > node.clientWidth + 1);
  found.push({page, width, root: root.scrollWidth,
    wide: wide.map(node => [node.tagName, node.parentElement.parentElement.className,
                            node.textContent.slice(0, 60)])});
  frame.remove();
}
(async () => {
  for (const job of jobs) await look(job);
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""


@pytest.fixture(scope="module")
def measured(site):
    """What the browser measures: for each page and width, the page's width and what exceeds its place."""
    program = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    assert program, "these tests need Chromium: apt-get install chromium, or set CHROMIUM"
    (site / "report.html").write_text(report_page())
    jobs = [(f"/{page}", width) for page in (*PAGES, "report.html") for width in WIDTHS]
    (site / "harness.html").write_text(HARNESS % json.dumps(jobs))
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = subprocess.run(
            [
                *(program, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--virtual-time-budget=60000", "--dump-dom"),
                f"http://127.0.0.1:{server.server_port}/harness.html",
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        server.shutdown()
    found = re.search(r'<pre id="found">(.+?)</pre>', shown, re.DOTALL)
    assert found, shown[-2000:]
    rows = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert len(rows) == len(jobs)
    return rows


def report_page():
    """Return the page of `dp report` about a potential of the copper-gold data that predicts zeros."""
    predictor = SimpleNamespace(
        parameters=Parameters(),
        model=None,
        type_map=("Cu", "Au"),
        evaluate=lambda frames: Prediction.zeros(frames.nframes, frames.natoms),
    )
    systems = open_systems(str(TOP / "examples" / "cu_au_emt" / "all.xyz"), predictor.type_map)
    content = Report(
        title="model.ckpt-1000000.pt, trained with a_long_name_of_an_input_file.json",
        facts={"training data": ", ".join(system.name for system in systems)},
        data={name: compare(predictor, systems, 50, name) for name in ("training", "validation")},
        panels=[],
        check=None,
        commands={"write this report again": "dp --pt report input.json -m model.ckpt-1000000.pt"},
    )
    return page_of(content)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_no_page_scrolls_sideways(measured):
    assert [(row["page"], row["width"]) for row in measured if row["root"] > row["width"]] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_exceeds_its_place(measured, width):
    wide = [
        (row["page"], text)
        for row in measured
        for tag, kind, text in row["wide"]
        if row["width"] == width
        # Code and output may scroll in their frame where 100 columns do not fit.
        and not (width < 1400 and tag == "PRE" and "highlight-sh" not in kind)
    ]
    assert wide == []
