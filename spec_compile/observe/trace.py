"""Graph texts as torch trace artifacts: shown by tlparse when TORCH_TRACE is set, free otherwise."""

from __future__ import annotations

from torch._logging._internal import trace_structured


def emit(name: str, text: str) -> None:
    """Attach one graph's text to the trace under ``spec_compile_<name>``."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"spec_compile_{name}", "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )
