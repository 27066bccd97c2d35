"""The reference of input.json in Markdown, generated from the settings dataclasses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from deepmd_muon.argcheck.legacy import OLDER_SPELLINGS
from deepmd_muon.argcheck.limits import as_json, bounds_of, choices_of, conditions, values_of
from deepmd_muon.argcheck.schema import Key, foreign_of, summary, tree
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.section import thaw
from deepmd_muon.setting import describe

__all__ = ["reference", "reference_of"]

_INTRODUCTION = (
    "An input is a JSON file, or YAML when its name ends in .yaml or .yml. Keys that start with "
    "an underscore are comments. Every other key must be known; all problems of a file are "
    "reported at once. A whole number may be written as 1e6. Lengths are in Å, energies in eV.",
    "`dp train` writes the input with every default filled in to out.json. Training from out.json "
    "is equivalent to training from the input.",
    "For energy models of deepmd-kit that this package does not compute itself, such as DPA-4 and "
    "DPA-2, `model` has the keys of the installed deepmd-kit, which checks them. A table says "
    "[which part computes what](deepmd-kit-models.md#which-part-computes-what). All other sections "
    "are those of this page.",
)
_SEVERAL = (
    "A section `model` with `model_dict` describes several models, one for each branch, that are "
    "trained together and may share parts. A step trains one branch. The other sections and keys "
    "are those of an input of one model, but `loss_dict` replaces `loss`, and "
    "`training/data_dict` replaces the data. A branch may have any name without . and /, except "
    "RANDOM and Default.",
    "A branch writes out its `type_map`, `descriptor` and `fitting_net`, or names an entry of "
    '`shared_dict`, as "name" or "name:level". Branches that share a part must have the same type '
    "map.",
)


def reference() -> str:
    """Return the reference of every key of an input file."""
    return _joined(_blocks())


def reference_of(section: type, title: str) -> str:
    """Return the reference of another command's input, whose root is the dataclass `section`."""
    entries = _Sections().entries_of(tree(section), (), 1, title)
    return _joined([_heading(1, title), _paragraph(summary(section)), *entries])


def _joined(blocks: Iterable[str]) -> str:
    """Join blocks of Markdown, with at most one empty line between them."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(blocks)).strip("\n") + "\n"


def _heading(level: int, text: str) -> str:
    return f"\n{'#' * level} {text}\n"


def _paragraph(text: str) -> str:
    # The empty line before it ends a list of entries.
    return f"\n{text}\n"


def _entry(name: str, facts: str, doc: str) -> str:
    """Write a key, its type with default and range, and its meaning."""
    # Two spaces at the end of a line break it.
    return f"- **`{name}`** ({facts})  \n  {doc}"


def _blocks() -> Iterator[str]:
    """Yield the whole reference."""
    yield _heading(1, "Input file")
    yield from map(_paragraph, _INTRODUCTION)
    yield from _Sections().entries_of(tree(Settings), (), 1, "the input")
    yield from _several_models()
    yield _heading(2, "Older spellings")
    yield _paragraph("The input check translates these and prints a notice with the new spelling.")
    for old, where, new in OLDER_SPELLINGS:
        yield _entry(old, where, new)


def _several_models() -> Iterator[str]:
    """Yield the keys that differ in an input of several models."""
    yield _heading(2, "Several models")
    yield from map(_paragraph, _SEVERAL)
    single = tree(Settings).keys
    several = tree(MultiTaskSettings).keys
    model = several["model"]
    training = several["training"]
    sections = {
        "model": model,
        "model/model_dict/<branch>": model.keys["model_dict"],
        "loss_dict/<branch>": several["loss_dict"],
        "training": training,
        "training/data_dict/<branch>": training.keys["data_dict"],
    }
    # Keys that mean the same in an input of one model, and are explained there.
    explained = {
        "model/model_dict/<branch>": single["model"].keys.keys() - {"type_map"},
        "training": single["training"].keys.keys() - {"numb_steps"},
    }
    for path, section in sections.items():
        yield _heading(3, path)
        yield _paragraph(section.setting.doc)
        if section is several["loss_dict"]:
            yield _paragraph("The keys are those of section `loss`.")
        for name, key in section.keys.items():
            if name in explained.get(path, ()) or key.named:
                continue
            facts = f"as training/{name} of an input of one model"
            if not key.is_section:
                facts = "; ".join(_facts(key))
            yield _entry(name, facts, key.setting.doc)


class _Sections:
    """Writes the sections of an input; an entry that an earlier section has is named only."""

    def __init__(self) -> None:
        self._place_of: dict[str, str] = {}  # of an entry: the section that has it first

    def entries_of(
        self, section: Key, path: tuple[str, ...], level: int, place: str
    ) -> Iterator[str]:
        """Yield the keys of a section of one kind, then its sub-sections."""
        assert section.section is not None
        named: dict[str, list[str]] = {}
        for name, key in section.keys.items():
            if key.is_section:
                continue
            entry = _entry(name, "; ".join(_facts(key)), key.setting.doc)
            first_place = self._place_of.setdefault(entry, place)
            if first_place == place:
                yield entry
            else:
                named.setdefault(first_place, []).append(name)
        for first_place, names in named.items():
            yield _paragraph(f"As in {first_place}: {_listed(names)}.")
        foreign = foreign_of(section.section)
        if foreign and path:
            yield _paragraph(
                "Keys of deepmd-kit or of earlier versions without a counterpart here, accepted "
                f"where they have no effect: {_listed(foreign)}."
            )
        for name, key in section.keys.items():
            if key.is_section:
                yield from self._section(key, (*path, name), level + 1)

    def _section(self, section: Key, path: tuple[str, ...], level: int) -> Iterator[str]:
        """Yield heading, purpose and contents of a sub-section, kind by kind."""
        place = "/".join(path)
        yield _heading(level, place)
        necessity = "is required" if section.required else "may be left out"
        yield _paragraph(f"{section.setting.doc} The section {necessity}.")
        variants = section.variants
        if variants is None:
            yield from self.entries_of(section, path, level, place)
            return
        default = f"default {as_json(variants.default)}" if variants.default else "required"
        yield _entry(
            "type",
            f"{choices_of(section.kinds)}, {default}",
            "Kind of the section; the other keys depend on it.",
        )
        for name, kind in section.kinds.items():
            alias = f" (also {', '.join(map(as_json, kind.alias))})" if kind.alias else ""
            title = f"{place} with type {as_json(name)}"
            yield _heading(level + 1, title + alias)
            yield _paragraph(kind.setting.doc)
            yield from self.entries_of(kind, path, level + 1, title)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _facts(key: Key) -> Iterator[str]:
    """Yield type, choices, range, default and aliases of a key, and what it needs."""
    setting = key.setting
    type_words = describe(key.annotation)
    if setting.lone:
        type_words += " or a single one"
    yield values_of(setting) or type_words
    bounds = " and ".join(bounds_of(setting))
    if bounds:
        yield bounds
    if key.required:
        yield "required"
    elif key.value is None:
        yield "may be left out"
    else:
        yield f"default {as_json(thaw(key.value))}"
    if key.alias:
        yield f"also {', '.join(f'`{name}`' for name in key.alias)}"
    yield from conditions(setting)


if __name__ == "__main__":
    print(reference(), end="")
