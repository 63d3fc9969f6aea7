"""Generated files: named by content, whole or absent, replaced when damaged."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from spec_compile.codegen.kernel import render
from spec_compile.codegen.merge import MergeShape, merge_source
from spec_compile.codegen.store import default_directory, load_module, write_source
from spec_compile.errors import CodegenError, ConfigError

SOURCE = "VALUE = 3\n" + "# padding\n" * 20000


def test_the_same_source_is_one_file_and_another_source_a_second(tmp_path: Path) -> None:
    first = write_source("kernel", SOURCE, tmp_path)
    assert write_source("kernel", SOURCE, tmp_path) == first
    assert write_source("kernel", SOURCE + "\n", tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    path = write_source("kernel", SOURCE, tmp_path)
    path.write_text(SOURCE[:100])
    assert write_source("kernel", SOURCE, tmp_path).read_text() == SOURCE


def _write_rounds(directory: str) -> None:
    for i in range(40):
        path = write_source("kernel", SOURCE, Path(directory) / str(i))
        assert path.read_text() == SOURCE


def test_processes_that_write_at_once_never_see_half_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_rounds, args=(str(tmp_path),)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
    assert [len(list(folder.iterdir())) for folder in tmp_path.iterdir()] == [1] * 40


def test_a_module_is_imported_once(tmp_path: Path) -> None:
    path = write_source("kernel", SOURCE, tmp_path)
    assert load_module(path) is load_module(path)
    assert load_module(path).VALUE == 3


def test_a_file_that_does_not_import_is_named(tmp_path: Path) -> None:
    path = write_source("kernel", "1 / 0\n", tmp_path)
    with pytest.raises(CodegenError, match=path.name):
        load_module(path)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CodegenError, match="XDG_CACHE_HOME"):
        write_source("kernel", SOURCE, tmp_path / "file" / "below")


def test_the_default_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "spec_compile" / "kernels"


def test_a_template_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(CodegenError, match="shape_text"):
        render("merge_partials.py.jinja", {})


def test_the_source_says_what_it_was_made_for() -> None:
    shape = MergeShape(
        partial_dtypes=("bfloat16",), num_heads=2, value_dim=48, out_dtype="bfloat16"
    )
    assert repr(shape) in merge_source(shape)


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        MergeShape(partial_dtypes=(), num_heads=2, value_dim=48, out_dtype="float32")
