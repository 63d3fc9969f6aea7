"""GRPO with speculative rollouts: SmolLM2-135M learns small sums while its draft keeps pace.

Run ``python -m examples.grpo``, or ``torchrun --nproc-per-node 4 -m examples.grpo --cp 2 --pp 2``.
"""

from __future__ import annotations

import argparse

import torch

import spec_compile as sc
from examples.demo.data import load_model, make_prompts, reward


def main(steps: int, cp: int, pp: int) -> None:
    target, tokenizer = load_model()
    draft = sc.drafts.Eagle3.from_target(target, ttt_length=3)
    engine = sc.Engine(target, draft, max_num_seqs=32, max_model_len=160)
    model = sc.parallelize(target, draft, sc.Plan(cp=cp, pp=pp))
    groups = model.param_groups(policy={"lr": 2e-6}, draft={"lr": 1e-3})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    sampling = sc.SamplingParams(n=8, temperature=0.7, max_tokens=32)
    settings = sc.grpo.Settings(sampling=sampling)
    trainer = sc.grpo.Trainer(model, engine, optimizer, reward, settings, tokenizer=tokenizer)
    prompts = make_prompts(tokenizer, 2 * steps, seed=0)
    for step in range(steps):
        chosen = prompts[2 * step : 2 * step + 2]
        columns = {"task": [one.task for one in chosen], "answer": [one.answer for one in chosen]}
        metrics = trainer.step([one.ids for one in chosen], columns)
        shown = ("reward/mean", "policy_loss", "draft_loss", "rollout/acceptance_length")
        print({name: round(metrics[name], 3) for name in shown}, flush=True)
    model.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 10), ("cp", 1), ("pp", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
