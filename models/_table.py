"""The table of docs/models.md, made from the families themselves.

    python -m hybridkv_models             prints it
    python -m hybridkv_models FILE.md     writes it into a file, between its two markers

Sizes are those of each family's tiny model, so transformers must be installed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hybridkv.entries import CacheEntry
from hybridkv.errors import ConfigError
from hybridkv_models import Family, family, load_preset, mode, model_types, note, preset_names

BEGIN = "<!-- from here to the end marker: written by `make docs-models` -->"
END = "<!-- end of what `make docs-models` writes -->"

_HEADER = (
    "| model type | its layers | what they keep in the tests | pass | prefix hits | tested on |",
    "|---|---|---|---|---|---|",
)


def table() -> str:
    """The families by model type, one row each, and their notes, each once."""
    served: dict[Family, list[str]] = {}
    for model_type in model_types():
        known = family(model_type)
        if known is not None:
            served.setdefault(known, []).append(model_type)
    rows = [_row(known, names) for known, names in served.items()]
    noted: dict[str, list[str]] = {}
    for names in served.values():
        noted.setdefault(note(names[0]), []).extend(names)
    notes = [f"- {_quoted(names)}: {text}" for text, names in noted.items() if text]
    return "\n".join([*_HEADER, *rows, *([""] if notes else []), *notes])


def replaced(text: str) -> str:
    """A page with the table between its markers made anew.

    Raises:
        ConfigError: the page has not both markers, in order, once.
    """
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ConfigError(f"the page needs the lines {BEGIN!r} and {END!r}, in this order")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def write(path: Path) -> None:
    """Bring the table in a file up to date."""
    path.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")


def _row(known: Family, names: list[str]) -> str:
    config = known.tiny_config()
    decoder: Any = config.get_text_config(decoder=True)
    entries = known.entries(config)
    tested = [f"{decoder.num_hidden_layers} layers of width {decoder.hidden_size}"]
    presets = [name for name in preset_names() if load_preset(name)["model_type"] in names]
    if presets:
        tested.append(f"sizes of {_quoted(presets)}")
    cells = (_quoted(names), _summary(known), _kept(entries), mode(names[0]), "yes", "; ".join(tested))
    return f"| {' | '.join(cells)} |"


def _summary(known: Family) -> str:
    """The first sentence of a family's docstring, without the name in front."""
    sentence = " ".join((known.__doc__ or "").split()).split(". ")[0].rstrip(".")
    _, colon, rest = sentence.partition(": ")
    return rest if colon else sentence


def _kept(entries: tuple[CacheEntry, ...]) -> str:
    counted = Counter((entry.kind, entry.params) for entry in entries)
    found = []
    for (kind, params), count in counted.items():
        sizes = "".join(f", {name} {value}" for name, value in params)
        found.append(f"{count} x `{kind}`{sizes}")
    return "; ".join(found)


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
