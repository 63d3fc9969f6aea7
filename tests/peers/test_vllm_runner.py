"""vLLM's newer model runner serves exported drafts, DSpark too; on the CPU, its kernels interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_compile as sc
from tests.peers.toy_language import VOCAB, new_target, train
from tests.peers.vllm_interpreted import GREEDY, LONG, SAMPLES, prompts
from tests.rollout.cases import predicted

pytestmark = [pytest.mark.slow, pytest.mark.peers("vllm"), pytest.mark.timeout(1200)]
DRAFTS: dict[str, Any] = {
    "dspark": lambda t: sc.drafts.DSpark.from_target(
        t, 3, taps=(1, 3), num_hidden_layers=2, markov_rank=16
    ),
    "dspark reduced": lambda t: sc.drafts.DSpark.from_target(
        t,
        3,
        taps=(1, 3),
        num_hidden_layers=2,
        markov_rank=16,
        draft_vocab=torch.arange(VOCAB)[torch.arange(VOCAB) % 5 != 1],
    ),
    "eagle3": lambda t: sc.drafts.Eagle3.from_target(t, 3, taps=(1, 2, 3)),
    "dflash": lambda t: sc.drafts.DFlash.from_target(t, 4, taps=(1, 3), num_hidden_layers=2),
}
CLASSES = {
    "dspark": "Qwen3DSparkForCausalLM",
    "dspark reduced": "Qwen3DSparkForCausalLM",
    "eagle3": "Eagle3LlamaForCausalLM",
    "dflash": "DFlashQwen3ForCausalLM",
}


@pytest.fixture(scope="module")
def target() -> Any:
    made = new_target()
    train(made, None, 150)
    return made


@pytest.fixture(scope="module", params=DRAFTS)
def served(
    request: pytest.FixtureRequest, target: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, dict[str, Any]]:
    """Train a draft here and serve it in another process; give it and what came back."""
    folder = tmp_path_factory.mktemp(request.param)
    draft = DRAFTS[request.param](target)
    target.save_pretrained(folder / "target")
    sc.drafts.save(draft, folder / "draft")
    torch.save(train(target, draft, 150), folder / "trained.pt")
    torch.save(new_target().state_dict(), folder / "other.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.peers.vllm_interpreted", str(folder)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1000, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return request.param, draft, json.loads((folder / "served.json").read_text())


def test_draft_is_run_by_vllms_own_code_in_the_newer_runner(
    served: tuple[str, Any, dict[str, Any]],
) -> None:
    family, _, found = served
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert found["drafter"] == CLASSES[family]


def test_updated_draft_is_accepted_as_often_as_predicted(
    served: tuple[str, Any, dict[str, Any]], target: Any
) -> None:
    family, draft, found = served
    stats = found["trained"]
    assert stats["verify_steps"] == SAMPLES
    measured = stats["accepted"][0] / SAMPLES
    untrained = found["untrained"]["accepted"][0] / found["untrained"]["verify_steps"]
    asked = zip(prompts(), found["first"], strict=True)
    expected = predicted(target, draft, [ids + one["tokens"] for ids, one in asked])
    print(f"{family}: untrained {untrained:.3f}, predicted {expected:.4f}, measured {measured:.4f}")
    assert abs(measured - expected) < 3 * (expected * (1 - expected) / SAMPLES) ** 0.5
    assert untrained + 0.1 < measured


def test_acceptance_by_position_is_that_of_the_embedded_engine(
    served: tuple[str, Any, dict[str, Any]], target: Any
) -> None:
    family, draft, found = served
    own = sc.Engine(target, draft, num_speculative_tokens=3)
    own.generate(prompts()[:200], LONG)
    both = (found["long"], own.stats)
    rounds = [stats["verify_steps"] for stats in both]
    shares = [
        [a / d for a, d in zip(stats["accepted"], stats["drafted"], strict=True)] for stats in both
    ]
    print(family, "by position", shares, rounds)
    for a, b in zip(*shares, strict=True):
        # rounds of one completion are not independent: twice the variance of independent ones
        error = (2 * b * (1 - b) * (1 / rounds[0] + 1 / rounds[1])) ** 0.5
        assert abs(a - b) < 3 * error + 0.02


def test_greedy_output_is_the_targets_before_and_after_its_update(
    served: tuple[str, Any, dict[str, Any]], target: Any
) -> None:
    _, _, found = served
    for model, ours in ((target, found["greedy"]), (new_target(), found["other"])):
        expected = sc.Engine(model).generate(prompts()[: len(ours)], GREEDY)
        for one, other in zip(ours, expected, strict=True):
            assert one["tokens"] == other.tokens
            assert one["logprobs"] == pytest.approx(other.logprobs, abs=2e-3)


def test_seeded_samples_come_back(served: tuple[str, Any, dict[str, Any]]) -> None:
    _, _, found = served
    again = [one["tokens"] for one in found["again"]]
    assert again == [found["first"][place]["tokens"] for place in (1, 6)]
