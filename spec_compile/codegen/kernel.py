"""From a template and a shape to a kernel that can be launched, or compiled ahead of time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch

from spec_compile.errors import CodegenError

from .store import load_module, write_source
from .triton_mode import is_interpreted

TRITON_TYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}

BLOCK_ELEMENTS = 2048
"""Of a tile that a program holds in registers."""

# the interpreter swaps triton's own functions while it runs, so only one thread may be inside
_interpreter_lock = threading.RLock()


@dataclass(frozen=True)
class Kernel:
    """One generated kernel."""

    path: Path
    """The file that holds it."""
    function: Any
    """Triton's JIT function."""
    num_warps: int = 4
    num_stages: int | None = None
    """Depth of software pipelining; None for Triton's default."""

    def launch(self, num_programs: int, *args: object) -> None:
        """Start ``num_programs`` programs; none when that is 0.

        Raises:
            CodegenError: the kernel does not compile or start; names the generated file.
        """
        if num_programs == 0:
            return
        options = {"num_warps": self.num_warps}
        if self.num_stages is not None:
            options["num_stages"] = self.num_stages
        try:
            if is_interpreted():
                with _interpreter_lock:
                    self.function[(num_programs,)](*args)
            else:
                self.function[(num_programs,)](*args, **options)
        except Exception as error:
            raise CodegenError(f"the generated kernel {self.path} failed: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, as shapes of kernels and `TRITON_TYPES` have it."""
    return str(dtype).removeprefix("torch.")


def render(template: str, values: Mapping[str, object]) -> str:
    """Fill a template of this package; every name that it uses must be given.

    Raises:
        CodegenError: the template is missing, malformed, or uses a name that was not given.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("spec_compile.codegen"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    try:
        return environment.get_template(template).render(values)
    except jinja2.TemplateError as error:
        raise CodegenError(f"cannot render the template {template}: {error!r}") from error


def load_kernel(name: str, source: str, directory: Path | None = None) -> Kernel:
    """Write ``source`` to the store and import the function ``name`` from it."""
    path = write_source(name, source, directory)
    return Kernel(path, getattr(load_module(path), name))


def compile_ahead(
    kernel: Kernel, signature: Mapping[str, str], capability: int, num_warps: int = 4
) -> dict[str, Any]:
    """Compile for a CUDA compute capability without a GPU; return Triton's products by kind.

    Args:
        kernel: loaded in a process that does not interpret.
        signature: Triton type of every argument, such as "*bf16".
        capability: 80, 90, 100, ...
        num_warps: warps a program.

    Raises:
        CodegenError: it does not compile; names the generated file.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    types = {name: signature[name] for name in names}
    try:
        source = ASTSource(fn=kernel.function, signature=types, constexprs={}, attrs=aligned)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    except Exception as error:
        raise CodegenError(
            f"the generated kernel {kernel.path} does not compile for sm_{capability}: {error}"
        ) from error
    return dict(compiled.asm)


@functools.cache
def block_rows(dim: int, elements: int = BLOCK_ELEMENTS) -> int:
    """Rows of one program, a power of two, so that a tile of ``dim`` columns fits in registers."""
    rows = 1
    while rows * 2 * padded(dim) <= elements and rows < 64:
        rows *= 2
    return rows


def padded(dim: int) -> int:
    """The next power of two; Triton's ranges need one."""
    return 1 << max(dim - 1, 0).bit_length()
