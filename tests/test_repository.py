"""What holds for the repository as a whole: versions agree, public names are documented, the core stays light."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import hybridkv
from hybridkv import errors

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(code: str) -> str:
    """The output of a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


# Versions and packaging.


def test_one_version_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    version = PROJECT["project"]["version"]
    assert released[0] == version
    assert hybridkv.__version__ == version
    assert metadata.version("hybridkv") == version, "run make again: the installed package is an older one"


def test_every_package_is_installed() -> None:
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "hybridkv").rglob("__init__.py")}
    found |= {
        ".".join(("hybridkv_models", *path.parent.relative_to(ROOT / "models").parts))
        for path in (ROOT / "models").rglob("__init__.py")
    }
    assert sorted(found) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_every_dependency_is_pinned_to_a_version_its_floor_allows() -> None:
    pins = dict(
        re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for line in wanted:
        name, operator, floor = re.match(r"([\w-]+)(>=|==)([\w.]+)", line).groups()  # type: ignore[union-attr]
        if operator == ">=":
            assert pins[name].startswith(floor), f"{line} is tested with {pins[name]}"
    assert pins["torch"] == "2.13.0"


@pytest.mark.parametrize("package", ["hybridkv", "hybridkv_models"])
def test_the_packages_are_marked_as_typed(package: str) -> None:
    origin = importlib.import_module(package).__file__
    assert origin is not None
    assert (Path(origin).parent / "py.typed").is_file()


# Public names.


def documented(thing: object) -> bool:
    return bool((getattr(thing, "__doc__", None) or "").strip())


@pytest.mark.parametrize("name", hybridkv.__all__)
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    thing = getattr(hybridkv, name)
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return
    assert documented(thing), f"hybridkv.{name} has no docstring"
    if inspect.isclass(thing):
        methods = {k: v for k, v in vars(thing).items() if inspect.isfunction(v) and not k.startswith("_")}
        bare = [f"{name}.{method}" for method, function in methods.items() if not documented(function)]
        assert not bare, f"without a docstring: {', '.join(bare)}"


def test_public_names_are_sorted_once_and_complete() -> None:
    assert len(hybridkv.__all__) == len(set(hybridkv.__all__))
    assert set(hybridkv.__all__) <= set(dir(hybridkv))


def test_every_way_to_ask_offers_the_same_options() -> None:
    def options(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters) - {"self", "prompt", "prompts", "progress"}

    asked = options(hybridkv.Engine.generate)
    assert asked >= {"params", "breakpoints", "salt", "cache", "priority", "adapter"}
    for other in (hybridkv.Engine.stream, hybridkv.Engine.prepare, hybridkv.AsyncEngine.generate):
        assert options(other) == asked, other.__qualname__
    guide = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    bullets = guide.partition("## What goes in")[2].partition("\n## ")[0]
    assert all(f"- **{name}**" in bullets for name in asked - {"params"})


def test_every_sampling_parameter_is_in_the_guide_once() -> None:
    guide = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", guide.partition("| parameter |")[2].partition("\n\n")[0], re.MULTILINE)
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(hybridkv.SamplingParams))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hybridkv.no_such_name  # type: ignore[attr-defined]


def test_every_error_is_in_the_tree_and_derives_from_the_base() -> None:
    tree = errors.__doc__ or ""
    for name, thing in vars(errors).items():
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            assert issubclass(thing, errors.HybridKVError)
            assert re.search(rf"\b{name}\b", tree), f"{name} is missing from the tree on top of errors.py"
            assert documented(thing)


# The core.


def test_the_core_runs_without_torch() -> None:
    code = """
import sys
import hybridkv
groups = hybridkv.layer_groups("gemma-3-12b")
manager = hybridkv.GroupManager(groups, pool_bytes="1GiB")
seq = manager.open(range(40))
manager.reserve(seq, 40)
manager.commit(seq, 40)
manager.close(seq)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    assert run_python(code) == "[]"


# Files.


def repository_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_place_on_one_machine() -> None:
    # Built from pieces so that this file does not find itself.
    places = "|".join(("work", "root", "tmp", "home", "opt", "Users"))
    pattern = re.compile(rf"(?<![\w.~)}}\]/:>-])/({places})/[\w.]")
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert not found


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in repository_files():
        if page.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
