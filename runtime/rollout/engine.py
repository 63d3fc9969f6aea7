"""The embedded rollout engine: batched, lossless speculative decoding in plain PyTorch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError
from spec_compile.pairing import check_pair

from ..modes import own_modes
from . import weights
from .arguments import at_least, checked_params, checked_places, checked_prompts
from .decoding import DecodeLoop
from .draft_length import DraftLength
from .drafters import serve
from .drafting import ServedDraft, TargetEnds, check_servable
from .params import Rollout, SamplingParams
from .randomness import sequence_key
from .sequence import Sequence, StopText
from .serving import ServedTarget
from .stats import Stats

log = logging.getLogger(__name__)

UNSEEDED, SEEDED = 1, 2
"""First word of a sequence's key: the engine's own stream never meets a caller's."""


class Engine:
    """Samples completions with its own copies of a target and a draft.

    What comes out has the target's law, with any draft. Results do not depend on what shares the batch,
    up to rounding: matrix products of other sizes may differ in the last bits.
    """

    def __init__(
        self,
        target: nn.Module,
        draft: nn.Module | None = None,
        *,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        num_speculative_tokens: int | None = None,
        min_confidence: float = 0.0,
        tokenizer: Any = None,
        seed: int = 0,
    ) -> None:
        """Copy the models; later changes of the originals come by `update_weights` alone.

        Args:
            target: a transformers causal language model whose attention goes through transformers' attention
                interface. Parameters on the meta device are expected from the first update. Its forward hooks
                are copied with it and fire in the engine: remove those of training before.
            draft: one of the library, or of another that obeys a protocol of `drafting`; or None.
            max_num_seqs: sequences that run at a time.
            max_model_len: tokens of prompt and completion; None: the target's max_position_embeddings.
            num_speculative_tokens: drafted tokens a round; None: 0 to the number that the draft was trained
                for, chosen by cost (all of them in requests with a seed).
            min_confidence: a draft with a confidence head stops in front of the first token whose foretold
                chance of acceptance is below this.
            tokenizer: decodes tokens for stop strings.
            seed: of requests without one, next to the engine's count of calls.

        Raises:
            ConfigError: a model cannot be served, the draft was made for another target, or an argument is no
                model or out of range.
        """
        check_pair(target, draft)
        max_num_seqs = at_least("max_num_seqs", max_num_seqs, 1)
        self._seed, self._tokenizer = at_least("seed", seed, 0), tokenizer
        if draft is not None:
            check_servable(draft)
        self._target = ServedTarget(
            target,
            tuple(getattr(draft, "taps", ())),
            hidden_too=bool(getattr(draft, "reads_hidden", False)),
        )
        self._max_model_len = self._checked_length(max_model_len)
        self._draft: ServedDraft | None = None
        if draft is not None:
            ends = TargetEnds(self._target.embed, self._target.logits, self._target.vocab_size)
            self._draft = serve(draft, ends, last_position=self._max_model_len - 1)
        most = 0 if self._draft is None else self._draft.trained_steps
        self._fixed: int | None = None
        if num_speculative_tokens is not None:
            most = self._fixed = self._checked_number(num_speculative_tokens)
        self._most_drafted = most
        self._stats, self._lengths = Stats(most), DraftLength(most)
        self._loop = DecodeLoop(
            self._target, self._draft, self._lengths, self._stats,
            max_num_seqs=max_num_seqs, max_model_len=self._max_model_len,
            min_confidence=self._checked_confidence(min_confidence),
        )  # fmt: skip
        self._calls = 0
        self._running = False
        self.weight_version = 0
        """Of the policy's weights."""

    def generate(
        self,
        prompts: Items[Items[int]],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        only: Items[int] | None = None,
    ) -> list[Rollout]:
        """Complete every prompt ``n`` times.

        Args:
            prompts: lists of token ids.
            params: of all prompts, or one for each.
            only: distinct places in ``prompts x n`` to complete, ascending, when several engines share one call: each
                draws what one engine alone would have drawn there. None: all.

        Returns:
            Prompts x n, in order; with ``only`` these places of it.

        Raises:
            BatchError: a prompt is empty, too long, or holds an unknown id; nothing ran.
            ConfigError: weights or a tokenizer are missing, or an argument is of the wrong kind; nothing ran.
            SpecCompileError: logits are not finite; names the request.
        """
        self._check_ready()
        sequences = self._sequences(prompts, params)
        places = range(len(sequences)) if only is None else checked_places(only, len(sequences))
        if any(one.params.seed is None for one in sequences):
            self._calls += 1
        sequences = [sequences[place] for place in places]
        started = time.perf_counter()
        seeded = any(one.params.seed is not None for one in sequences)
        num_drafted = self._most_drafted if seeded and self._fixed is None else self._fixed
        self._running = True
        try:
            with own_modes(self._target.device, grad=False), torch.inference_mode():
                self._loop.run(sequences, num_drafted)
        finally:
            self._running = False
            self._target.cache.clear()
            if self._draft is not None:
                self._draft.cache.clear()
            self._stats.seconds += time.perf_counter() - started
        return [
            Rollout(
                one.prompt_index, one.completion, one.logprobs, one.finish_reason or "length",
                self.weight_version,
            )
            for one in sequences
        ]  # fmt: skip

    def update_weights(
        self,
        which: str,
        named_tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
        version: int,
    ) -> None:
        """Take one complete set of weights: all of it, or after an error nothing of it.

        No cache outlives `generate`, so nothing of the old weights is left.

        Args:
            which: "policy" or "draft".
            named_tensors: (name, tensor) of every tensor, as ``model.export_weights(which)`` gives them, or a
                state dict; read to its end, also before an error. Other floating types are cast.
            version: reported by rollouts when ``which`` is "policy".

        Raises:
            ConfigError: a name is unknown, double or missing, a tensor does not fit, or an argument is of the
                wrong kind.
        """
        with weights.read_to_end(named_tensors) as pairs:
            served = self._served(which)
            if self._running:
                raise ConfigError("update_weights came while generate runs; let it return first")
            version = at_least("version", version, 0)
            update = weights.staged(served.model, pairs)
        weights.install(served.model, update)
        served.complete = True
        if which == "policy":
            self.weight_version = version
        log.info("rollout engine: %s weights are version %d", which, version)

    @property
    def serves_draft(self) -> bool:
        """Whether there is a draft, which wants updates of its own."""
        return self._draft is not None

    @property
    def num_speculative_tokens(self) -> int | None:
        """Drafted tokens a round, 0 included; None: chosen by cost. May be set between calls."""
        return self._fixed

    @num_speculative_tokens.setter
    def num_speculative_tokens(self, number: int | None) -> None:
        most = self._most_drafted
        if number is not None:
            number = at_least("num_speculative_tokens", number, 0)
            if number > most:
                raise ConfigError(f"this engine drafts at most {most} tokens, found {number}")
        self._fixed = number

    @property
    def stats(self) -> dict[str, Any]:
        """What happened since this was last read; reading starts anew.

        ``verify_steps``: rounds of the target after the prompt, counted for each sequence; ``drafted``
        and ``accepted``: tokens by position (acceptance length is 1 + sum(accepted) / verify_steps);
        ``tokens``; ``seconds``; ``draft_tokens``: rounds by number of drafted tokens; ``break_even``: the
        acceptance length above which drafting pays, by the times measured last (1.0 until a number was
        chosen by cost).
        """
        return {**self._stats.read(), "break_even": self._lengths.break_even}

    def state_dict(self) -> dict[str, Any]:
        """What makes requests without a seed go on with the random numbers that come next.

        The samples are those of an engine that never stopped where ``num_speculative_tokens`` is fixed;
        a number chosen by measured time may differ, and with it which random numbers a token takes.
        """
        return {"calls": self._calls, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ConfigError: an entry is missing or not a count; nothing was changed.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"expected what state_dict gave, found {type(state).__name__}")
        missing = {"calls", "seed"} - set(state)
        if missing:
            raise ConfigError(f"the engine's state lacks {', '.join(sorted(missing))}")
        calls, seed = (
            at_least(f"the state's {name}", state[name], 0) for name in ("calls", "seed")
        )
        self._calls, self._seed = calls, seed

    def _served(self, which: str) -> ServedTarget | ServedDraft:
        if which == "policy":
            return self._target
        if which == "draft" and self._draft is not None:
            return self._draft
        names = "'policy'" if self._draft is None else "'policy' or 'draft'"
        raise ConfigError(f"update_weights takes {names}, found {which!r}")

    def _checked_length(self, max_model_len: int | None) -> int:
        limit = getattr(self._target.config, "max_position_embeddings", None)
        if max_model_len is None:
            if limit is None:
                raise ConfigError("the target names no max_position_embeddings; pass max_model_len")
            return int(limit)
        length = at_least("max_model_len", max_model_len, 2)
        if limit is not None and length > limit:
            raise ConfigError(
                f"max_model_len={length} is beyond the target's max_position_embeddings={limit}"
            )
        return length

    def _checked_number(self, number: int) -> int:
        most = at_least("num_speculative_tokens", number, 0)
        if most and self._draft is None:
            raise ConfigError(
                f"num_speculative_tokens={most} needs a draft; pass one, or leave it None"
            )
        if self._draft is not None and self._draft.longest and most > self._draft.trained_steps:
            raise ConfigError(
                f"num_speculative_tokens={most} is more than the {self._draft.trained_steps} tokens that a "
                f"block of {type(self._draft.model).__name__} predicts"
            )
        return most

    def _checked_confidence(self, chance: float) -> float:
        if isinstance(chance, bool) or not isinstance(chance, (int, float)) or not 0 <= chance <= 1:
            raise ConfigError(f"min_confidence must be a number from 0 to 1, found {chance!r}")
        if chance and not hasattr(getattr(self._draft, "model", None), "confidence_head"):
            raise ConfigError(f"min_confidence={chance} needs a draft with a confidence head")
        return float(chance)

    def _check_ready(self) -> None:
        if self._running:
            raise ConfigError("generate came while generate runs; one engine serves one thread")
        for which, served in (("policy", self._target), ("draft", self._draft)):
            if served is not None and not served.complete:
                raise ConfigError(
                    f"the engine has no complete {which} weights (parameters were on the meta device); call "
                    f"update_weights({which!r}, ...) first"
                )

    def _sequences(
        self, prompts: Items[Items[int]], params: SamplingParams | Items[SamplingParams] | None
    ) -> list[Sequence]:
        checked = checked_prompts(prompts, self._max_model_len, self._target.num_embeddings)
        sequences = []
        owns = checked_params(params, len(checked))
        for index, (ids, own) in enumerate(zip(checked, owns, strict=True)):
            stops = self._stop_tokens(own)
            if own.stop and self._tokenizer is None:
                raise ConfigError("stop strings need a tokenizer; pass Engine(..., tokenizer=...)")
            room = min(own.max_tokens, self._max_model_len - len(ids))
            for sample in range(own.n):
                text = StopText(self._tokenizer, own.stop) if own.stop else None
                key = self._key(own.seed, index, sample)
                sequences.append(Sequence(index, sample, ids, own, key, stops, text, room))
        return sequences

    def _key(self, seed: int | None, prompt: int, sample: int) -> int:
        if seed is None:
            return sequence_key(UNSEEDED, self._seed, self._calls, prompt, sample)
        return sequence_key(SEEDED, seed, prompt, sample)

    def _stop_tokens(self, params: SamplingParams) -> frozenset[int]:
        if params.stop_token_ids is not None:
            return frozenset(params.stop_token_ids)
        if params.ignore_eos:
            return frozenset()
        source = getattr(self._target.model, "generation_config", None) or self._target.config
        ends = getattr(source, "eos_token_id", None)
        if ends is None:
            return frozenset()
        return frozenset([ends] if isinstance(ends, int) else ends)
