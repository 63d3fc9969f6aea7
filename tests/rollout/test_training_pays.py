from __future__ import annotations

from typing import Any

import pytest
import torch

import spec_compile as sc
from spec_compile.batch import PackedBatch
from tests.models import tiny_llama


def stream(first: int, length: int, vocab: int) -> list[int]:
    """Make a sequence in which the last two tokens decide the next."""
    tokens = [first % vocab, (3 * first + 1) % vocab]
    while len(tokens) < length:
        tokens.append((tokens[-1] + 2 * tokens[-2] + 1) % vocab)
    return tokens


def packed(streams: list[list[int]]) -> PackedBatch:
    tokens = torch.tensor([token for one in streams for token in one])
    ends = torch.tensor([0, *[len(one) for one in streams]]).cumsum(0)
    return PackedBatch(tokens, ends, torch.ones_like(tokens, dtype=torch.bool))


def acceptance(engine: sc.Engine, prompts: list[list[int]]) -> float:
    params = sc.SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=())
    _ = engine.stats
    engine.generate(prompts, params)
    stats: dict[str, Any] = engine.stats
    return 1.0 + float(sum(stats["accepted"])) / int(stats["verify_steps"])


@pytest.mark.slow
def test_training_the_draft_alone_lowers_its_loss_and_raises_acceptance() -> None:
    vocab = 17
    target = tiny_llama(vocab=vocab, dtype=torch.float32, kv_heads=2)
    for parameter in target.parameters():
        parameter.data.mul_(0.4 if parameter.ndim > 1 else 1.0)
    streams = [stream(first, 40, vocab) for first in range(vocab)]
    model = sc.parallelize(target, None, sc.Plan())
    optimizer = torch.optim.Adam(model.param_groups(policy={"lr": 3e-3}))
    for _ in range(120):
        model.step(packed(streams), lambda rows: -(rows.logprobs * rows.mask).sum())
        optimizer.step()
        optimizer.zero_grad()
    model.close()

    draft = sc.drafts.Eagle3.from_target(target, ttt_length=3)
    engine = sc.Engine(target, draft, num_speculative_tokens=3)
    prompts = [one[:6] for one in streams]
    before = acceptance(engine, prompts)
    model = sc.parallelize(target, draft, sc.Plan())
    optimizer = torch.optim.Adam(model.param_groups(draft={"lr": 3e-3}))
    losses = []
    for _ in range(60):
        losses.append(model.step(packed(streams), None).draft_loss)
        optimizer.step()
        optimizer.zero_grad()
    engine.update_weights("draft", model.export_weights("draft"), 1)
    model.close()
    after = acceptance(engine, prompts)
    assert losses[-1] < 0.5 * losses[0]
    assert after > before + 1.0, (before, after)
