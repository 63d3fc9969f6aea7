"""The shape of the code base, read from its sources: import direction, sizes, and what is shipped."""

from __future__ import annotations

import ast
import fnmatch
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ("spec_compile", "passes", "runtime")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
TOP_LEVEL = {
    "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "docs", "examples",
    "passes", "pyproject.toml", "runtime", "spec_compile", "tests",
}  # fmt: skip

FACE = {"__init__", "api", "bench", "cli", "integrations", "lowering", "verification"}
"""May import everything; nothing below may import them."""
BASE = {
    "batch", "batch_checks", "checked_batch", "contract", "errors", "options", "pairing", "plan",
}  # fmt: skip
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "batch_checks": {"errors"},
    "options": {"errors"},
    "batch": {"batch_checks", "errors", "options"},
    "checked_batch": {"batch", "batch_checks", "errors"},
    "contract": {"errors"},
    "pairing": {"errors"},
    "plan": {"errors", "options"},
    "ir": BASE,
    "capture": BASE | {"ir"},
    "drafts": BASE | {"ir"},
    "analysis": BASE | {"ir"},
    "codegen": BASE,
    "observe": BASE | {"ir"},
    "passes": BASE | {"ir", "analysis", "codegen", "observe"},
    "runtime": BASE | {"ir", "capture", "codegen"},
}
"""Which parts of the package each part may import; a new part needs a line here."""


@dataclass(frozen=True)
class Source:
    """One library file, under the name by which it is imported."""

    path: Path
    module: tuple[str, ...]
    text: str

    @property
    def part(self) -> str:
        """First name below spec_compile: a folder, or a module."""
        return self.module[1] if len(self.module) > 1 else "__init__"

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def read_source(root: Path, path: Path) -> Source:
    parts = path.relative_to(root).with_suffix("").parts
    module = parts if parts[0] == "spec_compile" else ("spec_compile", *parts)
    return Source(path.relative_to(root), module, path.read_text(encoding="utf-8"))


def library(root: Path = ROOT) -> list[Source]:
    """Every library file once: rglob follows no links, so passes and runtime come by themselves."""
    links = tuple(root / "spec_compile" / name for name in ("passes", "runtime"))
    paths = [
        path
        for folder in LIBRARY
        for path in sorted((root / folder).rglob("*.py"))
        if not any(path.is_relative_to(link) for link in links)
    ]
    return [read_source(root, path) for path in paths]


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, part) for each import of another module of this package, lazy ones included."""
    package = source.module[:-1]
    for node in ast.walk(source.tree):
        names: list[list[str]] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        for name in names:
            if name[0] == "spec_compile":
                yield getattr(node, "lineno", 0), name[1] if len(name) > 1 else "__init__"
            elif name[0] in ("passes", "runtime"):
                yield getattr(node, "lineno", 0), f"top-level {name[0]}"


def wrong_imports(sources: list[Source]) -> list[str]:
    found = []
    for source in sources:
        if source.part in FACE:
            continue
        if source.part not in ALLOWED:
            found.append(f"{source.path}: part {source.part!r} is not in the table ALLOWED")
            continue
        allowed = ALLOWED[source.part] | {source.part}
        found += [
            f"{source.path}:{line}: {source.part} may not import {part}"
            for line, part in imported(source)
            if part not in allowed
        ]
    return found


def long_files(sources: list[Source]) -> list[str]:
    sizes = [(source.path, len(source.text.splitlines())) for source in sources]
    return [f"{path}: {size} lines" for path, size in sizes if size > MAX_FILE_LINES]


def long_functions(sources: list[Source]) -> list[str]:
    """Functions whose code, docstring aside, is too long; Triton kernels are exempt."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            kernel = any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
            first = node.body[0]
            text = first.end_lineno or 0 if ast.get_docstring(node) else node.lineno - 1
            size = (node.end_lineno or 0) - text
            if size > MAX_FUNCTION_LINES and not kernel:
                found.append(f"{source.path}:{node.lineno}: {node.name} has {size} lines")
    return found


def prints(sources: list[Source]) -> list[str]:
    return [
        f"{source.path}:{node.lineno}: print"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write")
        if source.part != "cli"
    ]


def undocumented(sources: list[Source]) -> list[str]:
    return [f"{one.path}: no docstring" for one in sources if not ast.get_docstring(one.tree)]


RULES = {
    "imports go one way": wrong_imports,
    "no file is over 400 lines": long_files,
    "no function is over 60 lines": long_functions,
    "the library never prints": prints,
    "every module says what it is": undocumented,
}


@pytest.mark.parametrize("rule", RULES)
def test_library_obeys_the_rule(rule: str) -> None:
    sources = library()
    assert len(sources) > 20, "the walk found too few files to mean anything"
    found = RULES[rule](sources)
    assert not found, f"{rule}:\n" + "\n".join(found)


BAD = {
    "imports go one way": (
        "runtime/bad.py",
        "def f():\n    from spec_compile.passes import base\n",
    ),
    "no file is over 400 lines": ("passes/bad.py", "x = 1\n" * 401),
    "no function is over 60 lines": ("passes/bad.py", "def f():\n" + "    x = 1\n" * 61),
    "the library never prints": ("spec_compile/ir/bad.py", "def f():\n    print(1)\n"),
    "every module says what it is": ("runtime/bad.py", "x = 1\n"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_catches_a_file_that_breaks_it(rule: str, tmp_path: Path) -> None:
    name, text = BAD[rule]
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert len(RULES[rule](library(tmp_path))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spec_compile/ir/bad.py", "from ..passes.base import GraphPass\n"),
        ("spec_compile/analysis/deep/bad.py", "from ...runtime import context\n"),
        ("passes/bad.py", "import spec_compile.api\n"),
        ("passes/bad.py", "import spec_compile as sc\n"),
        ("passes/bad.py", "from runtime import context\n"),
        ("spec_compile/newcomer.py", "x = 1\n"),
    ],
)
def test_import_rule_sees_every_spelling(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert len(wrong_imports(library(tmp_path))) == 1


def test_import_rule_leaves_siblings_and_lower_parts_alone(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    good = "import torch\nfrom .fabric import Fabric\nfrom spec_compile.errors import PlanError\n"
    (tmp_path / "runtime" / "good.py").write_text(good)
    assert wrong_imports(library(tmp_path)) == []


def test_import_table_has_no_cycle() -> None:
    order: list[str] = []
    while len(order) < len(ALLOWED):
        ready = [part for part in ALLOWED if part not in order and ALLOWED[part] <= set(order)]
        assert ready, f"parts that import each other: {sorted(set(ALLOWED) - set(order))}"
        order += ready


def test_top_level_holds_only_the_known_entries() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    found = {
        path.name
        for path in ROOT.iterdir()
        if not path.name.startswith(".")
        and not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }
    assert TOP_LEVEL - {"docs"} <= found <= TOP_LEVEL  # git keeps no empty folder


def test_passes_and_runtime_are_relative_links() -> None:
    for name in ("passes", "runtime"):
        assert (ROOT / "spec_compile" / name).readlink() == Path("..") / name


def test_every_example_has_a_main() -> None:
    scripts = [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*/__main__.py")]
    for script in scripts:
        tree = ast.parse(script.read_text())
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert "main" in functions or "import main" in script.read_text(), script


def test_environment_pins_every_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for text in [*project["dependencies"], *extras["demo"], *extras["test"]]:
        name = text.split(";")[0].split("==")[0].split(">=")[0].strip()
        assert name in pins, f"{name} is not pinned in constraints.txt"


def test_wheel_holds_the_whole_package_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in LIBRARY:
        hide = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=hide)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("spec_compile-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"spec_compile"}
    wanted = {"/".join(one.module) + ".py" for one in library()}
    templates = (ROOT / "spec_compile").glob("codegen/templates/*.jinja")
    wanted |= {path.relative_to(ROOT).as_posix() for path in templates}
    wanted |= {"spec_compile/py.typed"}
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
