"""vLLM's newer model runner on the CPU, its Triton kernels interpreted; a process of its own.

The runner that vLLM takes on GPUs, and the only one with DSpark, needs Triton. vLLM for CPUs takes Triton for absent
where it has no CPU backend; here it is told of one, and Triton's interpreter runs the kernels instead. What they
compute is vLLM's; it takes about a tenth of a second for each request and round.

    TRITON_INTERPRET=1 python -m tests.peers.vllm_interpreted FOLDER

FOLDER holds checkpoints "target" and "draft", and weights "trained.pt" of the draft and "other.pt" of the target; what
was sampled is written to "served.json" there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import spec_compile as sc
from tests.peers.toy_language import documents

SAMPLES = 256
FIRST = sc.SamplingParams(max_tokens=2, stop_token_ids=(), seed=5)
"""A first token from the prompt, then one round: every draft is at the same place."""
LONG = sc.SamplingParams(max_tokens=16, stop_token_ids=(), seed=6)
GREEDY = sc.SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=())


def prompts() -> list[list[int]]:
    """What is asked, the same in every process."""
    found: list[list[int]] = documents(SAMPLES, 8, seed=1000).tolist()
    return found


def interpret() -> None:
    """Make vLLM's kernels run in Triton's interpreter; before vLLM is imported."""
    import triton.backends
    import triton.language as tl
    import triton.runtime.interpreter as interpreter
    from triton.language.extra import libdevice

    backends: Any = triton.backends.backends
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    module: Any = interpreter
    builder = module.InterpreterBuilder
    builder.create_masked_load = with_bool_mask(builder.create_masked_load, 1)
    builder.create_masked_store = with_bool_mask(builder.create_masked_store, 2)
    # faster: no checks for overflow, and the language is patched once instead of in every call of a function
    one = module.interpreter_builder
    one.options = dataclasses.replace(one.options, sanitize_overflow=False)
    module._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    module._patch_lang = lambda function: module._LangPatchScope()
    device: Any = libdevice
    device.log1p = lambda x: tl.log(1.0 + x)  # the interpreter has no functions of libdevice


def with_bool_mask(call: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Give the interpreter's memory operations the bool mask that they ask for, where it made integers of it."""

    def called(self: Any, *arguments: Any) -> Any:
        mask = arguments[place]
        mask = dataclasses.replace(mask, data=mask.data.astype(bool))
        return call(self, *arguments[:place], mask, *arguments[place + 1 :])

    return called


def serve(folder: Path) -> dict[str, Any]:
    """Serve a draft before and after its update, then another policy."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    draft = sc.drafts.load(folder / "draft")
    engine = sc.vllm_engine(
        target, draft, max_num_seqs=64, max_model_len=64, max_num_batched_tokens=1024,
        dtype="float32",
    )  # fmt: skip
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    found: dict[str, Any] = {
        "runner": type(worker.model_runner).__module__,
        "drafter": type(worker.get_draft_model()).__name__,
    }
    asked = prompts()
    engine.generate(asked[:64], FIRST)
    found["untrained"] = engine.stats
    engine.update_weights("draft", torch.load(folder / "trained.pt"), 1)
    found["first"] = as_lists(engine.generate(asked, FIRST))
    found["trained"] = engine.stats
    engine.generate(asked[:40], LONG)
    found["long"] = engine.stats
    found["again"] = as_lists(engine.generate(asked[:8], FIRST, only=[1, 6]))
    found["greedy"] = as_lists(engine.generate(asked[:6], GREEDY))
    engine.update_weights("policy", torch.load(folder / "other.pt"), 7)
    found["other"] = as_lists(engine.generate(asked[:4], GREEDY))
    engine.close()
    return found


def as_lists(rollouts: list[sc.Rollout]) -> list[dict[str, Any]]:
    """Write completions as JSON can."""
    return [{"tokens": one.tokens, "logprobs": one.logprobs} for one in rollouts]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    interpret()
    place = Path(sys.argv[1])
    (place / "served.json").write_text(json.dumps(serve(place)))
