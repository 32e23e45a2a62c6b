"""The training text: the standard library's sources and the sources of its documentation, less what is held out."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from scoring import HELD_OUT, standard_library
from torch import Tensor

PACKAGE = "python3.11-doc"
SOURCES = Path("usr/share/doc/python3.11/html/_sources")
# Character tables, a second copy of the documentation, and files that machines have or lack at random.
SKIPPED = {"encodings", "pydoc_data", "site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
BOS, EOS = 257, 258


class MissingData(Exception):
    """The training text is not on this machine."""


def find_documentation(given: Path | None, *, fetch: bool) -> Path:
    folder = given if given is not None else Path("/") / SOURCES
    if folder.is_dir():
        return folder
    if not fetch:
        raise MissingData(
            f"no documentation sources at {folder}: run with --fetch (needs apt-get and dpkg-deb), "
            f"or install {PACKAGE}, or name the folder with --docs"
        )
    return _download()


def _download() -> Path:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise MissingData(f"--fetch needs apt-get and dpkg-deb; elsewhere, unpack {PACKAGE} and use --docs")
    target = Path(tempfile.gettempdir()) / f"{PACKAGE}-sources"
    if not (target / SOURCES).is_dir():
        target.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["apt-get", "download", PACKAGE], cwd=target, check=True)
        except subprocess.CalledProcessError as error:
            raise MissingData(f"apt-get could not fetch {PACKAGE}: run apt-get update, then try again") from error
        archive = next(target.glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=target, check=True)
    return target / SOURCES


def _documents(root: Path, pattern: str, held_out: set[str]) -> list[bytes]:
    documents = []
    for path in sorted(root.rglob(pattern)):
        relative = path.relative_to(root)
        if path.is_file() and not SKIPPED.intersection(relative.parts) and relative.as_posix() not in held_out:
            documents.append(path.read_bytes())
    return documents


def load(documentation: Path, generator: torch.Generator) -> dict[str, Tensor]:
    """One stream of token ids for each source, documents in random order."""
    held_out = json.loads(HELD_OUT.read_text())
    sources = {
        "python": _documents(standard_library(), "*.py", set(held_out["standard_library"])),
        "documentation": _documents(documentation, "*.txt", set(held_out["documentation"])),
    }
    return {name: _stream(documents, generator) for name, documents in sources.items()}


def _stream(documents: list[bytes], generator: torch.Generator) -> Tensor:
    parts = []
    for i in torch.randperm(len(documents), generator=generator).tolist():
        body = torch.frombuffer(bytearray(documents[i] or b"\n"), dtype=torch.uint8).to(torch.int16)
        parts += [torch.tensor([BOS], dtype=torch.int16), body, torch.tensor([EOS], dtype=torch.int16)]
    return torch.cat(parts)


def held_out_documentation(documentation: Path) -> list[bytes]:
    """The first bytes of each held-out document."""
    facts = json.loads(HELD_OUT.read_text())
    return [(documentation / name).read_bytes()[: facts["bytes_per_file"]] for name in facts["documentation"]]
