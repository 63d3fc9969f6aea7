"""A training loop of one's own around ``parallelize``: optimizer, scheduler, accumulation, checkpoint.

Run ``python examples/hand_loop.py``, or
``torchrun --nproc-per-node 4 examples/hand_loop.py --cp 2 --pp 2``. The library computes gradients;
everything else below is ordinary PyTorch. ``--own-loss`` takes rows and calls backward itself.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import spec_compile as sc

VOCABULARY = 97
Accumulate = Callable[[sc.ParallelModel, list[sc.PackedBatch]], tuple[float, float]]


def build(plan: sc.Plan) -> sc.ParallelModel:
    """Bind a tiny random Llama and a draft; the same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    return sc.parallelize(target, sc.drafts.Eagle3.from_target(target, ttt_length=2), plan)


def make_batch(seed: int) -> sc.PackedBatch:
    """Draw documents that count upwards, half of them rewarded; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 25, (6,), generator=generator)
    starts = torch.randint(0, VOCABULARY, (6,), generator=generator)
    rows = [
        (start + torch.arange(int(n))) % VOCABULARY
        for start, n in zip(starts, lengths, strict=True)
    ]
    tokens = torch.cat(rows)
    advantages = torch.tensor([1.0, -0.2] * 3).repeat_interleave(lengths)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    mask = torch.ones(len(tokens), dtype=torch.bool)
    return sc.PackedBatch(tokens, cu_seqlens, mask, {"advantages": advantages})


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
    """One rank's loop state: model, optimizer, scheduler."""

    def __init__(self, plan: sc.Plan, accumulate: Accumulate) -> None:
        self.model, self.accumulate = build(plan), accumulate
        # after parallelize: other stages' parameters have gone to the meta device
        groups = self.model.param_groups(policy={"lr": 3e-3}, draft={"lr": 1e-2})
        self.optimizer = torch.optim.AdamW(groups)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 4)
        )

    def train_step(self, number: int) -> tuple[float, float]:
        """Accumulate two batches, clip each group to its own norm, and move the weights."""
        losses = self.accumulate(self.model, [make_batch(2 * number), make_batch(2 * number + 1)])
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
