"""Rollouts: prompts in, sampled completions and their log-probs out.

In: copies of a target and a draft, prompts, `SamplingParams`. Out: `Rollout`s whose law is the
target's alone: the draft changes how fast they come, never what they are.
"""
