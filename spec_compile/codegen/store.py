"""Generated source files, named by the hash of their content, and imported from disk.

Triton reads a kernel's source from its file, so generated kernels must be real files; people can also
open, diff and step through them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from spec_compile.errors import CodegenError

_modules: dict[Path, ModuleType] = {}
_lock = threading.Lock()


def default_directory() -> Path:
    """Where generated kernels are kept: under the user's cache directory (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "spec_compile" / "kernels"


def write_source(stem: str, source: str, directory: Path | None = None) -> Path:
    """Put ``source`` into a file named by its content, and return the path.

    Safe with any number of processes: the file appears whole or not at all, and a file of that name
    with other content (cut short, edited) is replaced.

    Args:
        stem: readable first part of the file's name.
        source: Python text.
        directory: None for `default_directory`.

    Raises:
        CodegenError: the directory cannot be written.
    """
    directory = default_directory() if directory is None else directory
    digest = hashlib.blake2b(source.encode(), digest_size=10).hexdigest()
    path = directory / f"{stem}_{digest}.py"
    try:
        if path.is_file() and path.read_bytes() == source.encode():
            return path
        directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{stem}_", suffix=".tmp", dir=directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(source.encode())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise CodegenError(
            f"cannot write the generated kernel {path}: {error}; set XDG_CACHE_HOME to a directory "
            "that can be written"
        ) from error
    return path


def load_module(path: Path) -> ModuleType:
    """Import a generated file, once a process.

    Raises:
        CodegenError: the file cannot be imported; the message names it.
    """
    with _lock:
        if path in _modules:
            return _modules[path]
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise CodegenError(f"cannot import the generated kernel {path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise CodegenError(f"cannot import the generated kernel {path}: {error}") from error
        _modules[path] = module
        return module
