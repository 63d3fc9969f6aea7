from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import spec_compile as sc
from spec_compile.drafts import DFlash, DSpark, Eagle3, PEagle, most_frequent
from spec_compile.errors import ConfigError
from tests.models import packed_batch, randomise, tiny_llama
from tests.oracle import dense_step, draft_inputs, run_target
from tests.parallel import run_models
from tests.rollout.cases import near_bigram

VOCAB = 53
CHOSEN = torch.tensor([0, 2, 3, 5, 8, 13, 21, 34, 40, 47, 51, 52])


def build(family: Any, target: Any, **options: Any) -> Any:
    return randomise(family.from_target(target, 3, draft_vocab=CHOSEN, **options), seed=3)


def test_most_frequent_tokens_are_chosen_in_ascending_order() -> None:
    counts = torch.tensor([3, 0, 7, 3, 9, 3])
    assert most_frequent(counts, 4).tolist() == [0, 2, 3, 4]
    with pytest.raises(ConfigError, match="vocabulary of 7 of 6"):
        most_frequent(counts, 7)


@pytest.mark.parametrize("family", [Eagle3, PEagle, DFlash, DSpark])
@pytest.mark.parametrize("form", ["raw", "speculators"])
def test_a60_maps_are_written_and_come_back(tmp_path: Path, family: Any, form: Any) -> None:
    draft = build(family, tiny_llama())
    sc.drafts.save(draft, tmp_path, form=form, verifier="target")
    tensors = load_file(tmp_path / "model.safetensors")
    assert (tensors["d2t"] + torch.arange(12)).tolist() == CHOSEN.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == CHOSEN.tolist()
    assert tensors["lm_head.weight"].shape == (12, 32)
    back: Any = sc.drafts.load(tmp_path)
    assert back.config == draft.config
    assert back.columns().tolist() == CHOSEN.tolist()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


@pytest.mark.parametrize("family", [DFlash, DSpark])
def test_block_draft_has_a_head_for_its_part_of_the_vocabulary_alone(family: Any) -> None:
    target = tiny_llama()
    reduced = family.from_target(target, 3, draft_vocab=CHOSEN)
    assert torch.equal(reduced.lm_head.weight, target.lm_head.weight[CHOSEN])
    whole = family.from_target(target, 3)
    assert not {"lm_head.weight", "d2t", "t2d"} & whole.state_dict().keys()
    assert whole.logits is None


def test_a60_a61_whole_vocabulary_has_no_map_and_reduced_one_needs_it(tmp_path: Path) -> None:
    whole = Eagle3.from_target(tiny_llama())
    assert not {"d2t", "t2d"} & whole.state_dict().keys()
    sc.drafts.save(build(Eagle3, tiny_llama()), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n not in ("d2t", "t2d")}, file)
    with pytest.raises(ConfigError, match="12 of the target's 53 tokens needs its map"):
        sc.drafts.load(tmp_path)
    with pytest.raises(ConfigError, match="12 distinct ids below 53"):
        Eagle3(build(Eagle3, tiny_llama()).config, draft_vocab=torch.arange(12) * 5)


def test_a61_ramp_in_place_of_offsets_is_refused(tmp_path: Path) -> None:
    sc.drafts.save(build(Eagle3, tiny_llama()), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "d2t": torch.arange(12) * 5}, file)
    with pytest.raises(ConfigError, match="12 distinct ids below 53"):
        sc.drafts.load(tmp_path)


def dense_row_loss(kind: str, logits: Tensor, target: Tensor) -> Tensor:
    """Spell the losses out over whole laws; rows [R]."""
    q, p = logits.log_softmax(-1), target.softmax(-1)
    part = target[:, CHOSEN].log_softmax(-1)
    ce = -(part.exp() * q).sum(-1)
    kl = (part.exp() * (part - q)).sum(-1)
    alpha = torch.minimum(p[:, CHOSEN], q.exp()).sum(-1)
    weight = 0.7 * torch.exp(-2.0 * alpha.detach())
    mixed = weight * kl + (1 - weight) * (1 - alpha)
    return {"ce": ce, "kl": kl, "tv": 1 - alpha, "lk": -alpha.log(), "lk_hybrid": mixed}[kind]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk", "lk_hybrid"])
def test_losses_equal_their_definitions(kind: str, skip: bool) -> None:
    target = tiny_llama()
    draft = build(Eagle3, target, loss=kind, lk_scale=0.7, lk_decay=2.0, skip_unknown=skip)
    batch = packed_batch((11, 6), draft_mask=True)
    row = run_target(target, batch, draft.taps, grad=False)
    inputs = draft_inputs(target, batch, row)
    outputs: list[Tensor] = []
    handle = draft.norm.register_forward_hook(lambda _m, _i, out: outputs.append(out))
    made = draft(inputs)
    handle.remove()
    known = torch.isin(row.logits.argmax(-1), CHOSEN)
    for step, output in enumerate(outputs):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for first, length in ((0, 11), (11, 6)):
            for t in range(first, first + length - 2 - step):
                if not inputs.loss_mask[t + 2 + step]:
                    continue
                count += 1
                if skip and not known[t + 1 + step]:
                    continue
                logits = F.linear(output[t : t + 1], draft.lm_head.weight)
                total = total + dense_row_loss(kind, logits, row.logits[t + 1 + step][None])[0]
        torch.testing.assert_close(made.loss_sum[step], 0.8**step * total, rtol=1e-10, atol=1e-10)
        assert int(made.count[step]) == count


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ce", "lk_hybrid"])
def test_compiled_step_equals_one_device(kind: str) -> None:
    target = tiny_llama()
    draft = build(Eagle3, target, loss=kind)
    batch = packed_batch((9, 14, 1), draft_mask=True)
    wanted = dense_step(target, draft, batch, None)

    def body(model: Any, rank: int) -> None:
        found = model.step(batch, None)
        assert abs(found.draft_loss - wanted.draft_loss) < 1e-9
        for name, parameter in model.draft.named_parameters():
            torch.testing.assert_close(
                parameter.grad, wanted.draft_grads[name], rtol=1e-8, atol=1e-10
            )
        exported = dict(model.export_weights("draft"))
        assert (exported["d2t"] + torch.arange(12)).tolist() == CHOSEN.tolist()

    run_models(sc.Plan(cp=2), target, draft, body)


def test_engine_samples_the_targets_law_with_a_reduced_draft() -> None:
    target = near_bigram(23)
    kept = torch.tensor([0, 1, 2, 4, 8, 9, 16, 22])
    draft = randomise(Eagle3.from_target(target, 2, draft_vocab=kept), seed=3)
    engine = sc.Engine(target, draft, num_speculative_tokens=2)
    params = sc.SamplingParams(temperature=0.0, max_tokens=25, stop_token_ids=())
    prompts = [[1, 2], [5], [20, 3, 8]]
    found = [one.tokens for one in engine.generate(prompts, params)]
    plain = [one.tokens for one in sc.Engine(target).generate(prompts, params)]
    assert found == plain
    sampled = sc.SamplingParams(n=40, max_tokens=8, stop_token_ids=(), seed=4)
    engine.generate(prompts, sampled)
    stats = engine.stats
    assert 0 < sum(stats["accepted"]) < sum(stats["drafted"])
