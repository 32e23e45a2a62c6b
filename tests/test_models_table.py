"""The table of docs/models.md says what the families say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridkv.errors import ConfigError
from hybridkv_models import mode, model_types, note
from hybridkv_models._table import BEGIN, END, replaced, table, write

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def test_the_committed_table_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert replaced(text) == text, "run `make docs-models`"


def test_every_model_type_has_a_row() -> None:
    rows = table()
    assert all(f"`{model_type}`" in rows for model_type in model_types())


def test_a_row_names_kinds_windows_sizes_and_presets() -> None:
    (row,) = [line for line in table().splitlines() if line.startswith("| `gemma3`")]
    assert "4 x `sliding_attention`, window 28; 2 x `full_attention` | packed | yes" in row
    assert "6 layers of width 64; sizes of `gemma-3-12b`, `gemma-3-270m`" in row


def test_a_family_may_name_its_mode_and_leave_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (mode("llama"), note("llama")) == ("packed", "")
    assert (mode("no_such_type"), note("no_such_type")) == ("packed", "")
    family: Any = sys.modules["hybridkv_models.llama"]
    monkeypatch.setattr(family, "MODE", "single", raising=False)
    monkeypatch.setattr(family, "NOTE", "Mind the gap.", raising=False)
    rows = table().splitlines()
    assert any(row.startswith("| `llama`") and "| single | yes |" in row for row in rows)
    assert "- `llama`: Mind the gap." in rows


def test_what_holds_for_several_families_is_noted_once() -> None:
    notes = [line.partition(": ")[2] for line in table().splitlines() if line.startswith("- ")]
    assert notes
    assert len(notes) == len(set(notes))


def test_writing_touches_nothing_but_what_lies_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\noutdated\n{END}\nafter\n", encoding="utf-8")
    write(page)
    before, new = page.read_text(encoding="utf-8").split(BEGIN)
    assert (before, new.split(END)[1]) == ("before\n", "\nafter\n")
    assert "outdated" not in new


@pytest.mark.parametrize("text", ["nothing", f"only {BEGIN}", f"{END} the wrong way round {BEGIN}"])
def test_a_page_without_markers_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="needs the lines"):
        replaced(text)


def test_the_command_prints_the_table() -> None:
    done = subprocess.run([sys.executable, "-m", "hybridkv_models"], capture_output=True, text=True, check=True)
    assert done.stdout == table() + "\n"
