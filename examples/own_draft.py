"""A draft of one's own: a plain module that says what it reads, and the library does the rest.

Run ``python examples/own_draft.py``, or ``torchrun --nproc-per-node 2 examples/own_draft.py --cp 2``.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import spec_compile as sc


class TwoAhead(nn.Module):
    """One attention over two tapped layers; row t predicts token t + 2 from x_0 .. x_{t+1}."""

    def __init__(self, dim: int, vocab: int, heads: int = 4) -> None:
        super().__init__()
        self.taps = (1, 3)  # the residual stream after 1 and after 3 layers of the target
        self.heads = heads
        self.fuse = nn.Linear(3 * dim, dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        """Return raw sums; the library divides by the global count."""
        document = inputs.document
        following = inputs.embedding(sc.shift(inputs.tokens, 1, document))
        state = torch.tanh(self.fuse(torch.cat((inputs.features, following), -1)))
        q, k, v = self.qkv(state).unflatten(-1, (3, self.heads, -1)).unbind(1)
        mixed = sc.branch_attention(
            q, k, v, q_limit=inputs.index + 1, q_document=document, k_document=document
        )
        logits = self.head(state + self.out(mixed.flatten(1)))
        label = sc.shift(inputs.tokens, 2, document)
        valid = sc.shift(inputs.loss_mask, 2, document)
        loss = logits.logsumexp(-1) - logits.gather(-1, label[:, None])[:, 0]
        hits = (logits.argmax(-1) == label) & valid
        return sc.DraftOutput((loss * valid).sum(), valid.sum(), {"top1": hits.sum()})


def counting_batch(vocab: int, lengths: tuple[int, ...] = (13, 29, 22)) -> sc.PackedBatch:
    """Documents that count upwards in steps of 1, 2, 3: easy to predict two tokens ahead."""
    rows = [torch.arange(n) * (i + 1) % vocab for i, n in enumerate(lengths)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.cat(rows)
    return sc.PackedBatch(tokens, offsets, torch.ones(len(tokens), dtype=torch.bool))


def main(steps: int = 30, cp: int = 1, pp: int = 1) -> list[float]:
    """Train the draft alone and return its losses; give a policy loss to train both."""
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=32, intermediate_size=64, num_hidden_layers=4, vocab_size=97,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )
    )  # fmt: skip
    draft = TwoAhead(dim=32, vocab=97)
    model = sc.parallelize(target, draft, sc.Plan(cp=cp, pp=pp))
    optimizer = torch.optim.AdamW(model.param_groups(draft={"lr": 1e-2}))
    losses = []
    for _ in range(steps):
        result = model.step(counting_batch(97), policy_loss=None)
        model.clip_grad_norm_(draft=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(result.draft_loss)
    model.close()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    history = main(**vars(parser.parse_args()))
    if os.environ.get("RANK", "0") == "0":
        print(f"draft loss: first {history[0]:.3f}, last {history[-1]:.3f}")
