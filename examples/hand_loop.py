"""A reinforcement loop of one's own: rollouts, optimizer, scheduler, accumulation, checkpoint.

Run ``python examples/hand_loop.py``, or
``torchrun --nproc-per-node 4 examples/hand_loop.py --cp 2 --pp 2``. The library generates and computes
gradients; everything else below is ordinary PyTorch. ``--own-loss`` takes rows and calls backward itself.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import spec_compile as sc

VOCABULARY = 97
PROMPTS = [[start, start + 1] for start in range(5, 85, 10)]
Accumulate = Callable[[sc.ParallelModel, list[sc.PackedBatch]], tuple[float, float]]


def build(plan: sc.Plan) -> tuple[sc.ParallelModel, sc.Engine]:
    """Bind a tiny random Llama and a draft; the same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=1,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    draft = sc.drafts.Eagle3.from_target(target, ttt_length=2)
    engine = sc.Engine(target, draft, max_model_len=32)  # has copies of its own
    return sc.parallelize(target, draft, plan), engine


def sample(model: sc.ParallelModel, engine: sc.Engine, number: int) -> list[sc.PackedBatch]:
    """Generate with the present weights and score: tokens that count upwards are rewarded.

    Seeded, so that every plan and every repetition draws the same completions. Returns two halves.
    """
    sc.grpo.update_engine(model, engine, version=number)
    params = sc.SamplingParams(n=2, max_tokens=12, seed=number)
    rollouts = sc.grpo.generate(model, engine, PROMPTS, params)
    rewards = torch.tensor([_reward(PROMPTS[one.prompt_index], one.tokens) for one in rollouts])
    advantages = rewards - rewards.mean()
    half = len(rollouts) // 2
    return [
        sc.grpo.pack_rollouts(PROMPTS, rollouts[part], advantages[part])
        for part in (slice(half), slice(half, None))
    ]


def _reward(prompt: list[int], tokens: list[int]) -> float:
    row = prompt + tokens
    return sum(b > a for a, b in itertools.pairwise(row)) / len(tokens)


def policy_loss(rows: sc.TokenOutputs) -> Tensor:
    """REINFORCE: a sum over valid tokens."""
    return -torch.where(rows.mask, rows.logprobs * rows.fields["advantages"], 0.0).sum()


def accumulate(model: sc.ParallelModel, halves: list[sc.PackedBatch]) -> tuple[float, float]:
    """Add the gradients of all parts: with common denominators they are those of one batch."""
    tokens, draft_rows = model.counts(halves)
    results = [
        model.step(half, policy_loss, denominator=tokens, draft_denominator=draft_rows)
        for half in halves
    ]
    return sum(r.policy_loss for r in results), sum(r.draft_loss for r in results)


def accumulate_own_loss(
    model: sc.ParallelModel, halves: list[sc.PackedBatch]
) -> tuple[float, float]:
    """Own the loss and call backward (pp = 1): each half's draft loss is its own mean here."""
    tokens, _ = model.counts(halves)
    policy = draft = 0.0
    for half in halves:
        rows = model(half)
        assert rows.draft_loss is not None
        loss = policy_loss(rows) / tokens
        (loss + rows.draft_loss / len(halves)).backward()
        model.finalize_grads()
        policy, draft = policy + loss.item(), draft + rows.draft_loss.item() / len(halves)
    return policy, draft


class Trainer:
    """One rank's loop state: model, engine, optimizer, scheduler."""

    def __init__(self, plan: sc.Plan, accumulate: Accumulate) -> None:
        (self.model, self.engine), self.accumulate = build(plan), accumulate
        # after parallelize: other stages' parameters have gone to the meta device
        groups = self.model.param_groups(policy={"lr": 3e-3}, draft={"lr": 1e-2})
        self.optimizer = torch.optim.AdamW(groups)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 4)
        )

    def train_step(self, number: int) -> tuple[float, float]:
        """Generate, accumulate two batches, clip each group to its own norm, move the weights."""
        losses = self.accumulate(self.model, sample(self.model, self.engine, number))
        self.model.clip_grad_norm_(policy=1.0, draft=1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses

    def save(self, folder: Path) -> None:
        """Write one file a rank; a sharded checkpoint, since each rank holds its stage only."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        torch.save(state, folder / f"rank{_rank()}.pt")

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, under the same plan."""
        state = torch.load(folder / f"rank{_rank()}.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def main(
    folder: Path, steps: int = 6, cp: int = 1, pp: int = 1, own_loss: bool = False
) -> tuple[list[tuple[float, float]], tuple[float, float], tuple[float, float]]:
    """Train, save, go on for a step; then resume in a new model and repeat that step.

    Returns:
        (policy loss, draft loss) of each step, of the step after saving, and of the same resumed.
    """
    plan = sc.Plan(cp=cp, pp=pp)
    way = accumulate_own_loss if own_loss else accumulate
    trainer = Trainer(plan, way)
    losses = [trainer.train_step(number) for number in range(steps)]
    trainer.save(folder)
    following = trainer.train_step(steps)
    trainer.model.close()

    resumed = Trainer(plan, way)
    resumed.load(folder)
    again = resumed.train_step(steps)
    resumed.model.close()
    return losses, following, again


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--own-loss", action="store_true", help="model(batch) and finalize_grads")
    with tempfile.TemporaryDirectory() as name:
        history, following, again = main(Path(name), **vars(parser.parse_args()))
    if _rank() == 0:
        for step, (policy, draft) in enumerate(history, 1):
            print(f"step {step}: policy loss {policy:+.4f}, draft loss {draft:.4f}")
        print(f"step {len(history) + 1}, going on: {following}")
        print(f"step {len(history) + 1}, resumed:  {again}")
