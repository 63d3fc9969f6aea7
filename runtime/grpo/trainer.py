"""GRPO around a parallel model: generate with the draft, score, train both, hand the weights back."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spec_compile.batch import PackedBatch
from spec_compile.errors import ConfigError

from ..model import ParallelModel
from ..results import StepResult
from ..rollout.params import Rollout
from .advantages import group_advantages
from .exchange import Scored, check_kinds, collect, share, update_engine
from .metrics import reward_metrics, rollout_metrics, slowest
from .packing import pack_rollouts
from .scoring import RewardFunction, Scorer
from .settings import Settings


class Trainer:
    """One rank's GRPO loop; every method is collective.

    Args:
        model: of ``spec_compile.parallelize``.
        engine: this rank's rollout engine; it gets the model's weights here and after every step.
        optimizer: over ``model.param_groups()``, all of it that is trained; moved once a step.
        reward_fn: scores completions, with TRL's signature: texts when there is a tokenizer (ids otherwise),
            then the columns, and ``completion_ids``.
        settings: of the step.
        tokenizer: decodes for ``reward_fn``.
        log: rank 0 appends each step's metrics to this file, one JSON object a line.

    Raises:
        ConfigError: an argument is of a wrong kind; on every rank, when one rank's optimizer lacks a parameter
            that is trained, or the log cannot be written.
    """

    def __init__(
        self,
        model: ParallelModel,
        engine: Any,
        optimizer: torch.optim.Optimizer,
        reward_fn: RewardFunction,
        settings: Settings,
        *,
        tokenizer: Any = None,
        log: str | Path | None = None,
    ) -> None:
        check_kinds(model, engine)
        self.model, self.engine, self.optimizer = model, engine, optimizer
        self.settings, self.scorer = settings, Scorer(reward_fn, tokenizer)
        self.log = None if log is None or model._world.rank else Path(log)
        self.steps = 0
        self.seconds: dict[str, float] = defaultdict(float)
        """By phase, of the present step."""
        share(model, "Trainer", {}, self._optimizer_error() or self._log_error())
        update_engine(model, engine, self.steps)

    def step(
        self, prompts: Sequence[Sequence[int]], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> dict[str, float]:
        """Generate, score, train, and update the engine.

        Args:
            prompts: ids of the global batch's prompts, the same on every rank.
            columns: one entry a prompt; passed to ``reward_fn``, repeated for each completion.

        Returns:
            One flat dict of metrics, the same on every rank; ``seconds/*`` are those of the slowest.

        Raises:
            Exception: on every rank what the engine, ``reward_fn`` or the loss raised on one; the next step
                works.
        """
        self.seconds.clear()
        scored = self._rollouts(prompts, columns or {})
        rewards = torch.tensor([one.reward for one in scored], dtype=torch.float64)
        sampling = self.settings.sampling
        batch = pack_rollouts(
            prompts,
            [one.rollout for one in scored],
            group_advantages(rewards, sampling.n),
            mask_truncated=self.settings.mask_truncated,
        )
        result, norms = self._train(batch)
        self.steps += 1
        with self._phase("weights"):
            update_engine(self.model, self.engine, self.steps)
        return self._metrics(scored, result, norms)

    def _train(self, batch: PackedBatch) -> tuple[StepResult, dict[str, float]]:
        """Move the weights ``updates`` times on one batch; gives the last step's numbers."""
        settings = self.settings
        temperature = settings.sampling.temperature or 1.0  # greedy log-probs are those of 1
        if settings.updates > 1:
            with self._phase("old log-probs"):
                old = self.model.logprobs(batch, temperature)
            batch = dataclasses.replace(batch, fields={**batch.fields, "old_logprobs": old})
        for _ in range(settings.updates):
            self.optimizer.zero_grad(set_to_none=True)  # what a step that failed half way left
            with self._phase("train"):
                result = self.model.step(
                    batch,
                    settings.loss,
                    temperature=temperature,
                    train_draft=settings.train_draft and self.model.draft is not None,
                )
            with self._phase("optimizer"):
                limit = settings.max_grad_norm
                norms = self.model.clip_grad_norm_(policy=limit, draft=limit)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        return result, norms

    def state_dict(self) -> dict[str, Any]:
        """This rank's model, optimizer, engine and step; plain tensors and numbers."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "engine": self.engine.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, under the same plan.

        Raises:
            ConfigError: an entry is missing.
        """
        missing = {"model", "optimizer", "engine", "steps"} - set(state)
        if missing:
            raise ConfigError(f"the trainer's state lacks {', '.join(sorted(missing))}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.engine.load_state_dict(state["engine"])
        self.steps = int(state["steps"])
        update_engine(self.model, self.engine, self.steps)

    def _rollouts(
        self, prompts: Sequence[Sequence[int]], columns: Mapping[str, Sequence[Any]]
    ) -> list[Scored]:
        """Generate and score this rank's share; gather those of the dp index."""

        def score(rollouts: list[Rollout]) -> list[float]:
            with self._phase("reward"):
                return self.scorer.score(prompts, columns, rollouts)

        with self._phase("rollout"):
            sampling = self.settings.sampling
            found = collect(self.model, self.engine, prompts, sampling, score)
        self.seconds["rollout"] -= self.seconds["reward"]
        return found

    def _metrics(
        self, scored: Sequence[Scored], result: StepResult, norms: Mapping[str, float]
    ) -> dict[str, float]:
        metrics = {
            "step": float(self.steps),
            "policy_loss": result.policy_loss,
            "draft_loss": result.draft_loss,
            **{f"grad_norm/{name}": norm for name, norm in norms.items()},
            **result.metrics,
            **reward_metrics(self.model, scored, self.settings.sampling.n),
            **rollout_metrics(self.model, self.engine.stats),
            **{f"seconds/{name}": s for name, s in slowest(self.model, self.seconds).items()},
        }
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        return metrics

    def _optimizer_error(self) -> ConfigError | None:
        """Find out before any training whether the optimizer moves what is trained."""
        groups = getattr(self.optimizer, "param_groups", None)
        if groups is None:
            found = type(self.optimizer).__name__
            return ConfigError(f"optimizer must be a torch.optim.Optimizer, found {found}")
        held = {id(parameter) for group in groups for parameter in group["params"]}
        for group in self.model.param_groups():
            trained = [p for p in group["params"] if p.requires_grad]
            missing = sum(id(parameter) not in held for parameter in trained)
            if missing and (group["name"] == "policy" or self.settings.train_draft):
                return ConfigError(
                    f"the optimizer lacks {missing} of the {len(trained)} parameters of the {group['name']} that this "
                    "rank trains, which would never move; build it after parallelize, over model.param_groups() (what "
                    "is to stay as it is: requires_grad_(False) before parallelize)"
                )
        return None

    def _log_error(self) -> ConfigError | None:
        """Find out before any training whether the log can be written."""
        try:
            if self.log is not None:
                self.log.open("a").close()
        except OSError as found:
            return ConfigError(f"the log {self.log} cannot be written: {found}")
        return None

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
