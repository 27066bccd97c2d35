"""The page of a report: one HTML file that needs no other file and no network."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from deepmd_muon.infer.metrics import Errors, ErrorSum
from deepmd_muon.show.palette import GREEN, ORANGE, RED
from deepmd_muon.show.report.errors import DataErrors, FrameError
from deepmd_muon.show.report.panels import Panel, png_of
from deepmd_muon.stability.check import Check
from deepmd_muon.stability.coverage import Coverage
from deepmd_muon.stability.curves import Verdict
from deepmd_muon.stability.report import text_of

_MAX_SYSTEMS = 30  # rows of the table; the worst are shown
_WORST_FRAMES = 10

_COLORS = {Verdict.holds: GREEN, Verdict.doubtful: ORANGE, Verdict.fails: RED}
_CSS = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1120px; padding: 0 16px 48px; background: #fff; color: #1d232a;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 24px 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 8px; }
p { margin: 6px 0; }
.verdict { border-left: 6px solid; padding: 8px 12px; margin: 16px 0; background: #f5f6f8; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid #dde1e6; vertical-align: top; }
th { font-weight: 600; }
td.text, th.text { text-align: left; overflow-wrap: anywhere; min-width: 7em; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 360px)); gap: 12px; }
.panels img { width: 100%; height: auto; }
pre { background: #f5f6f8; padding: 10px 12px; font-size: 13px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre.wide { white-space: pre; overflow-x: auto; overflow-wrap: normal; }
@media (max-width: 600px) {
  table { font-size: 12px; }
  th, td { padding: 4px 5px; }
  td.text, th.text { min-width: 5em; }
}
@media print { .scroll { overflow: visible; } }
""" + "\n".join(
    f".{verdict.name} {{ border-color: {color}; }}" for verdict, color in _COLORS.items()
)


@dataclass(frozen=True)
class Report:
    """All that a report shows."""

    title: str
    facts: Mapping[str, str]  # of the run: model, data, versions
    data: Mapping[str, DataErrors]  # by series; the tables are of the last one
    panels: Sequence[Panel]
    check: Check | None
    commands: Mapping[str, str]  # by what they do
    notes: Sequence[str] = field(default=())  # what is missing, and why
    input_text: str = ""

    @property
    def headline(self) -> str:
        """The title and the verdict of the check."""
        return (
            self.title
            if self.check is None
            else f"{self.title}; dp check: {self.check.verdict.name}"
        )


def page_of(report: Report) -> str:
    """Return the page as HTML."""
    series, errors = list(report.data.items())[-1]
    blocks = [
        f"<h1>{escape(report.title)}</h1>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        *_verdict(report.check),
        _section("Errors", _summary(report.data)),
        _section("Learning curve", _pictures(report.panels, "curve")),
        _section(f"Predictions and reference ({series} data)", _pictures(report.panels, "parity")),
        _section("Errors of force components by element", _elements(errors)),
        _section("Errors by system", _errors_table("system", errors.by_system)),
        _section("Errors by config_type", _errors_table("config_type", errors.by_config_type())),
        _section("Worst frames", _worst_frames(errors.worst(_WORST_FRAMES))),
        *_check(report),
        _section("Run", _table(["", ""], report.facts.items(), text_columns=2)),
        _section("Commands", _commands(report.commands)),
        _section("Input file", f"<pre class=wide>{escape(report.input_text)}</pre>"),
    ]
    body = "\n".join(block for block in blocks if block)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def _pictures(panels: Sequence[Panel], section: str) -> str:
    images = []
    for panel in panels:
        if panel.section == section:
            data = base64.b64encode(png_of(panel)).decode()
            source = f"data:image/png;base64,{data}"
            images.append(f'<img alt="{escape(panel.text, quote=True)}" src="{source}">')
    return f"<div class=panels>{''.join(images)}</div>" if images else ""


# ----- tables ------------------------------------------------------------------------------------


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """Return a table that scrolls by itself; the first columns hold text, the others numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        written = [
            f"<{tag}{' class=text' if k < text_columns else ''}>{escape(cell)}</{tag}>"
            for k, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(written)}</tr>"

    head = line(titles, "th") if any(titles) else ""
    body = "\n".join(line(cells, "td") for cells in rows)
    return f"<div class=scroll><table>{head}\n{body}</table></div>"


# Units of the tables of errors; an invisible joiner keeps browsers from breaking the line in them.
_PER_ATOM = "[meV/\u2060atom]"
_PER_LENGTH = "[meV/\u2060Å]"
_COLUMNS = {
    "energy_per_atom": f"energy {_PER_ATOM}",
    "force": f"force {_PER_LENGTH}",
    "virial_per_atom": f"virial {_PER_ATOM}",
}


def _summary(data: Mapping[str, DataErrors]) -> str:
    """Return the errors of each series, one quantity a row, which fits a phone."""
    totals = {series: errors.total for series, errors in data.items()}
    names = _quantities_of(totals.values())
    titles = ["quantity"]
    frames = ["frames"]
    for series, errors in data.items():
        titles += [f"{series} RMSE", "MAE"]
        frames += [f"{len(errors.frames)} of {errors.nframes}", ""]
    rows = [frames]
    for name in names:
        cells = [_COLUMNS[name]]
        for total in totals.values():
            error = total.get(name, ErrorSum())
            cells += [_thousandths(error.rmse), _thousandths(error.mae)]
        rows.append(cells)
    return _table(titles, rows)


def _errors_table(kind: str, errors: Mapping[str, Errors]) -> str:
    """Return RMSE by name, the largest force errors first."""
    if not errors:
        return ""
    names = _quantities_of(errors.values())

    def force_error(name: str) -> float:
        rmse = errors[name].get("force", ErrorSum()).rmse
        return rmse if math.isfinite(rmse) else 0.0

    ordered = sorted(errors, key=force_error, reverse=True)
    rows = [
        [row, *(_thousandths(errors[row].get(name, ErrorSum()).rmse) for name in names)]
        for row in ordered[:_MAX_SYSTEMS]
    ]
    note = ""
    if len(ordered) > _MAX_SYSTEMS:
        note = f"<p>and {len(ordered) - _MAX_SYSTEMS} with smaller force errors</p>"
    titles = [kind, *(f"{_COLUMNS[name]} RMSE" for name in names)]
    return _table(titles, rows) + note


def _elements(errors: DataErrors) -> str:
    if not errors.by_element:
        return ""
    rows = [
        [element, _thousandths(total.rmse), _thousandths(total.mae), f"{total.weight / 3:.0f}"]
        for element, total in errors.by_element.items()
    ]
    return _table(["element", f"RMSE {_PER_LENGTH}", f"MAE {_PER_LENGTH}", "atoms"], rows)


def _worst_frames(frames: Sequence[FrameError]) -> str:
    with_kind = any(frame.origin.config_type for frame in frames)
    names = _quantities_of(frame.errors for frame in frames)
    titles = ["file", *(["config_type"] if with_kind else []), "frame", "worst atom"]
    titles += [f"its force error {_PER_LENGTH}", *(f"{_COLUMNS[name]} RMSE" for name in names)]
    rows = []
    for frame in frames:
        kind = [frame.origin.config_type] if with_kind else []
        atom = "-" if frame.atom is None else f"{frame.element} {frame.atom}"
        force = "-" if frame.atom is None else _thousandths(frame.force)
        numbers = [_thousandths(frame.errors.get(name, ErrorSum()).rmse) for name in names]
        rows.append([frame.origin.file, *kind, str(frame.origin.number), atom, force, *numbers])
    note = "<p>Frames and atoms count from 0.</p>"
    return _table(titles, rows, text_columns=2 if with_kind else 1) + note


def _quantities_of(errors: Iterable[Errors]) -> list[str]:
    present = {name for errors_of_kind in errors for name in errors_of_kind}
    return [name for name in _COLUMNS if name in present]


def _thousandths(value: float) -> str:
    return f"{1e3 * value:.3g}" if math.isfinite(value) else "-"


# ----- check and commands ------------------------------------------------------------------------


def _verdict(check: Check | None) -> Iterator[str]:
    if check is None:
        return
    name = check.verdict.name
    reasons = [
        item for item in check.models[0].items if item.verdict == check.verdict and item.verdict
    ]
    lines = [f"<b>dp check: {name}</b>"]
    lines += [f"{escape(item.name)}: {escape(item.reason)}" for item in reasons]
    yield f'<div class="verdict {name}">{"<br>".join(lines)}</div>'


def _check(report: Report) -> Iterator[str]:
    check = report.check
    if check is None:
        return
    (model,) = check.models
    rows = []
    for item in model.items:
        rows.append([f"{item.name}: {item.verdict.name}", item.reason])
        if item.verdict > Verdict.holds and item.advice:
            rows.append(["", f"next: {item.advice}"])
    distances = _pictures(report.panels, "distances")
    yield _section("Distances and coverage", distances + _pairs(check.coverage))
    text = escape("\n".join(text_of(check)))
    yield _section(
        "Check of dynamics",
        _table(["", ""], rows, text_columns=2)
        + _pictures(report.panels, "check")
        + f"<details><summary>All that the check says</summary><pre class=wide>{text}</pre></details>",
    )


def _pairs(coverage: Coverage) -> str:
    rows = []
    for pair in coverage.pairs:
        gaps = ", ".join(f"{low:.2f}–{high:.2f}" for low, high in coverage.gaps(pair)) or "none"
        shortest = f"{coverage.shortest[pair]:.2f}"
        rows.append([coverage.name(pair), shortest, f"{coverage.largest[pair]:.2f}", gaps])
    return _table(["pair", "shortest [Å]", "longest [Å]", "without data [Å]"], rows)


def _commands(commands: Mapping[str, str]) -> str:
    lines = [f"# {purpose}\n{command}" for purpose, command in commands.items()]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"
