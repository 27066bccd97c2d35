"""The reference of input.json and its JSON Schema, both generated from the settings dataclasses."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from deepmd_muon.argcheck.json_schema import json_schema
from deepmd_muon.argcheck.legacy import OLDER_SPELLINGS
from deepmd_muon.argcheck.limits import as_json, bounds_of, choices_of, conditions, values_of
from deepmd_muon.argcheck.schema import Key, foreign_of, summary, tree
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.section import thaw
from deepmd_muon.setting import describe

__all__ = ["Format", "json_schema", "reference"]

Format = Literal["rst", "md", "text"]

_INTRODUCTION = (
    "An input is a JSON file, or YAML when its name ends in .yaml or .yml. Keys that start with an underscore are "
    "comments. Every other key must be known; all problems of a file are reported at once. A whole number may be "
    "written as 1e6. Lengths are in Å, energies in eV.",
    "`dp train` writes the input with every default filled in to out.json. Training from out.json is equivalent to "
    "training from the input.",
)


_SEVERAL = (
    "A section `model` with `model_dict` describes several models, one for each branch, that are trained together and "
    "may share parts. A step trains one branch. The other sections and keys are those of an input of one model, but "
    "`loss_dict` replaces `loss`, and `training/data_dict` replaces the data. A branch may have any name without . "
    "and /, except RANDOM and Default.",
    "A branch writes out its `type_map`, `descriptor` and `fitting_net`, or names an entry of `shared_dict`, as "
    '"name" or "name:level". Branches that share a part must have the same type map.',
)


@dataclasses.dataclass(frozen=True)
class _Heading:
    level: int
    text: str


@dataclasses.dataclass(frozen=True)
class _Paragraph:
    text: str


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One key: its name, its type with default and range, and its meaning."""

    name: str
    facts: str
    doc: str


_Block = _Heading | _Paragraph | _Entry


def reference(format: Format = "rst") -> str:
    """Return the reference of every key of an input file.

    Raises
    ------
    ValueError
        When the format is unknown.
    """
    return _written(_document(), format)


def reference_of(section: type, title: str, format: Format = "rst") -> str:
    """Return the reference of another command's input, whose root is the dataclass `section`."""
    blocks = [_Heading(1, title), _Paragraph(summary(section)), *_entries_of(tree(section), (), 1)]
    return _written(blocks, format)


def _written(blocks_of: Iterable[_Block], format: Format) -> str:
    writers: dict[str, Callable[[_Block], str]] = {"rst": _rst, "md": _markdown, "text": _text}
    if format not in writers:
        raise ValueError(f"format must be one of {', '.join(writers)}; found {format!r}")
    blocks = [writers[format](block) for block in blocks_of]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(blocks)).strip("\n") + "\n"


def _document() -> Iterator[_Block]:
    """Yield the whole reference."""
    yield _Heading(1, "Input file")
    yield from map(_Paragraph, _INTRODUCTION)
    yield from _entries_of(tree(Settings), (), 1)
    yield from _several_models()
    yield _Heading(2, "Older spellings")
    yield _Paragraph("The input check translates these and prints a notice with the new spelling.")
    for old, where, new in OLDER_SPELLINGS:
        yield _Entry(old, where, new)


def _several_models() -> Iterator[_Block]:
    """Yield the keys that differ in an input of several models."""
    several = tree(MultiTaskSettings)
    yield _Heading(2, "Several models")
    yield from map(_Paragraph, _SEVERAL)
    branch, data = (
        several.keys["model"].keys["model_dict"],
        several.keys["training"].keys["data_dict"],
    )
    one = tree(Settings).keys
    for path, key, known in (
        ("model", several.keys["model"], ()),
        (
            "model/model_dict/<branch>",
            branch,
            [name for name in one["model"].keys if name != "type_map"],
        ),
        ("loss_dict/<branch>", several.keys["loss_dict"], ()),
        (
            "training",
            several.keys["training"],
            [name for name in one["training"].keys if name != "numb_steps"],
        ),
        ("training/data_dict/<branch>", data, ()),
    ):
        yield _Heading(3, path)
        yield _Paragraph(key.setting.doc)
        if path.startswith("loss_dict"):
            yield _Paragraph("The keys are those of section `loss`.")
        for name, inner in key.keys.items():
            if name in known or inner.named:
                continue
            same = f"as {'/'.join(('training', name))} of an input of one model"
            yield _Entry(
                name, same if inner.is_section else "; ".join(_facts(inner)), inner.setting.doc
            )


def _entries_of(key: Key, path: tuple[str, ...], level: int) -> Iterator[_Block]:
    """Yield the keys of a section of one kind, then its sub-sections."""
    assert key.section is not None
    for name, inner in key.keys.items():
        if not inner.is_section:
            yield _Entry(name, "; ".join(_facts(inner)), inner.setting.doc)
    foreign = foreign_of(key.section)
    if foreign and path:
        names = ", ".join(f"`{name}`" for name in foreign)
        yield _Paragraph(
            "Keys of deepmd-kit or of earlier versions without a counterpart here, "
            f"accepted where they have no effect: {names}."
        )
    for name, inner in key.keys.items():
        if inner.is_section:
            yield from _section(inner, (*path, name), level + 1)


def _section(key: Key, path: tuple[str, ...], level: int) -> Iterator[_Block]:
    """Yield heading, purpose and contents of a sub-section, kind by kind."""
    yield _Heading(level, "/".join(path))
    optional = " The section is required." if key.required else " The section may be left out."
    yield _Paragraph(key.setting.doc + optional)
    if key.variants is None:
        yield from _entries_of(key, path, level)
        return
    default = f", default {as_json(key.variants.default)}" if key.variants.default else ", required"
    yield _Entry(
        "type", choices_of(key.kinds) + default, "Kind of the section; the other keys depend on it."
    )
    for name, kind in key.kinds.items():
        alias = f" (also {', '.join(map(as_json, kind.alias))})" if kind.alias else ""
        yield _Heading(level + 1, f"{'/'.join(path)} with type {as_json(name)}{alias}")
        yield _Paragraph(kind.setting.doc)
        yield from _entries_of(kind, path, level + 1)


def _facts(key: Key) -> Iterator[str]:
    """Yield type, choices, range, default and aliases of a key, and what it needs."""
    setting = key.setting
    one_type = describe(key.annotation) + " or a single one" * setting.lone
    yield values_of(setting) or one_type
    bounds = " and ".join(bounds_of(setting))
    if bounds:
        yield bounds
    if key.required or key.value is None:
        yield "required" if key.required else "may be left out"
    else:
        yield f"default {as_json(thaw(key.value))}"
    if key.alias:
        yield f"also {', '.join(f'`{name}`' for name in key.alias)}"
    yield from conditions(setting)


def _markdown(block: _Block) -> str:
    """Write a block in Markdown."""
    if isinstance(block, _Heading):
        return f"\n{'#' * block.level} {block.text}\n"
    if isinstance(block, _Paragraph):
        # The empty line before it ends a list of entries.
        return f"\n{block.text}\n"
    facts = f" ({block.facts})" if block.facts else ""
    return f"- **`{block.name}`**{facts}  \n  {block.doc}"


def _rst(block: _Block) -> str:
    """Write a block in reStructuredText."""
    if isinstance(block, _Heading):
        underline = "=-~^\"'"[block.level - 1] * len(block.text)
        return f"\n{block.text}\n{underline}\n"
    if isinstance(block, _Paragraph):
        return f"{_literal(block.text)}\n"
    facts = f"    | {_literal(block.facts)}\n\n" if block.facts else ""
    return f"``{block.name}``\n{facts}    {_literal(block.doc)}\n"


def _literal(text: str) -> str:
    """Turn Markdown's code marks into reStructuredText's, and protect its own marks."""
    return text.replace("*", r"\*").replace("|", r"\|").replace("`", "``")


def _text(block: _Block) -> str:
    """Write a block as plain text."""
    if isinstance(block, _Heading):
        return f"\n{block.text}\n{'=-'[block.level > 1] * len(block.text)}\n"
    if isinstance(block, _Paragraph):
        return textwrap.fill(block.text.replace("`", ""), 100) + "\n"
    facts = textwrap.fill(
        f"{block.name}: {block.facts}".replace("`", ""), 100, subsequent_indent="        "
    )
    return f"{facts}\n{textwrap.fill(block.doc, 100, initial_indent='    ', subsequent_indent='    ')}\n"


if __name__ == "__main__":
    print(reference("md"), end="")
