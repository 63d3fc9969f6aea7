"""Lowering: what it returns, refuses, and leaves alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import spec_compile as sc
from spec_compile import Plan, lower
from spec_compile.capture.dropout import active_dropout
from spec_compile.errors import CaptureError, ConfigError, PlanError

from .models import GatedDraft, gated_draft, tiny_llama, tiny_qwen3

SMALL = tiny_llama(layers=2, hidden=8, vocab=13, heads=2)


class OneLayer(nn.Module):
    """Smallest draft: cross-entropy of one linear layer."""

    def __init__(self, taps: Any = (1,)) -> None:
        super().__init__()
        self.taps = taps
        self.mix = nn.Linear(8, 13, dtype=torch.float64)

    def forward(self, inputs: sc.DraftInputs) -> Any:
        loss = nn.functional.cross_entropy(
            self.between(self.mix(inputs.features)), inputs.tokens, reduction="none"
        )
        return sc.DraftOutput((loss * inputs.loss_mask).sum(), inputs.loss_mask.sum())

    def between(self, logits: Tensor) -> Tensor:
        return logits


@pytest.mark.parametrize("pp", [1, 2])
def test_graphs_are_one_a_stage_with_a_record_for_every_pass(pp: int) -> None:
    lowered = lower(SMALL, OneLayer(), Plan(cp=2, pp=pp))
    assert list(lowered.graphs) == [f"stage{i}" for i in range(pp)]
    assert len(lowered.history) > 10
    assert all(record.seconds >= 0 and record.name for record in lowered.history)
    for earlier, later in zip(lowered.history[:-1], lowered.history[1:], strict=True):
        assert earlier.after == later.before
    for name in ("pp" if pp > 1 else "cp", "target layer 0"):
        assert name in lowered.explain()
    losses = "losses over the vocabulary, in chunks of tokens x words: plain tensor code (no GPU)"
    assert losses in lowered.explain()


def test_hash_tells_plans_and_models_apart_and_repeats(tmp_path: Path) -> None:
    first = lower(SMALL, OneLayer(), Plan(cp=2))
    assert first.plan_hash == lower(SMALL, OneLayer(), Plan(cp=2)).plan_hash
    assert first.plan_hash != lower(SMALL, OneLayer(), Plan(cp=3)).plan_hash
    assert first.plan_hash != lower(SMALL, OneLayer((0,)), Plan(cp=2)).plan_hash
    page = first.report(tmp_path / "deep" / "report.html").read_text()
    assert first.plan_hash in page
    assert "ShardContext" in page


def snapshot(module: nn.Module) -> dict[str, Any]:
    return {
        "modes": [m.training for m in module.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()],
        "requires": [p.requires_grad for p in module.parameters()],
        "objects": [id(p) for p in module.parameters()],
        "grads": [p.grad for p in module.parameters()],
        "attention": getattr(getattr(module, "config", None), "_attn_implementation", None),
        "keys": list(module.__dict__),
    }


@pytest.mark.parametrize("training", [True, False])
def test_lower_leaves_the_modules_as_they_were(training: bool) -> None:
    target = tiny_qwen3(layers=2).train(training)
    draft = gated_draft(target, taps=(1,)).train(not training)
    target.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    ids = torch.randint(0, 61, (2, 9))
    before = [snapshot(target), snapshot(draft)]
    values = target(input_ids=ids).logits
    lower(target, draft, Plan(cp=2, pp=2))
    assert [snapshot(target), snapshot(draft)] == before
    assert torch.equal(target(input_ids=ids).logits, values)


def test_lower_needs_no_weights() -> None:
    with torch.device("meta"):
        target = tiny_llama_on_meta()
        draft = GatedDraft(32, 53)
    lowered = lower(target, draft, Plan(cp=4, pp=4, dp=2))
    assert len(lowered.graphs) == 4
    assert "meta" in lowered.explain()


def tiny_llama_on_meta() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=32,
            intermediate_size=40,
            vocab_size=53,
            num_attention_heads=4,
            num_key_value_heads=1,
        )
    )


@pytest.mark.parametrize("taps", [(2,), (-1,), (True,), (1.0,), ("1",), "01", None, 1, (0, 5)])
def test_taps_that_do_not_exist_are_refused(taps: Any) -> None:
    with pytest.raises(PlanError, match="taps"):
        lower(SMALL, OneLayer(taps), Plan())


def test_active_dropout_is_refused_and_inactive_is_not() -> None:
    class Dropping(OneLayer):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.1)

        def between(self, logits: Tensor) -> Tensor:
            dropped: Tensor = self.drop(logits)
            return dropped

    with pytest.raises(ConfigError, match="drop"):
        lower(SMALL, Dropping(), Plan())
    lower(SMALL, Dropping().eval(), Plan(cp=2))


def test_random_numbers_are_refused_with_their_line() -> None:
    class Noisy(OneLayer):
        def between(self, logits: Tensor) -> Tensor:
            return logits + torch.randn_like(logits)

    class Functional(OneLayer):
        def between(self, logits: Tensor) -> Tensor:
            return nn.functional.dropout(logits, 0.2, training=True)

    for draft in (Noisy(), Functional()):
        with pytest.raises(ConfigError, match=r"test_lower\.py:\d+"):
            lower(SMALL, draft, Plan())


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss, count: (loss, count),
        lambda loss, count: loss,
        lambda loss, count: sc.DraftOutput(loss.expand(2), count),
        lambda loss, count: sc.DraftOutput(loss.expand(2, 2), count.expand(2, 2)),
        lambda loss, count: sc.DraftOutput(loss, count, {"x": loss.expand(3)}),
    ],
)
def test_draft_outputs_of_a_wrong_kind_are_refused(returned: Any) -> None:
    class Wrong(OneLayer):
        def forward(self, inputs: sc.DraftInputs) -> Any:
            output = super().forward(inputs)
            return returned(output.loss_sum, output.count)

    with pytest.raises(CaptureError, match="Wrong"):
        lower(SMALL, Wrong(), Plan())


def test_a_branch_on_values_names_its_line() -> None:
    class Branching(OneLayer):
        def between(self, logits: Tensor) -> Tensor:
            return logits * 2 if logits.sum() > 0 else logits

    with pytest.raises(CaptureError, match=r"test_lower\.py:\d+"):
        lower(SMALL, Branching(), Plan())


def test_grad_mode_around_autocast_stops_gradients() -> None:
    class Outside(OneLayer):
        def between(self, logits: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                scale = logits.square().mean(-1, keepdim=True)
            return logits * scale

    graph = lower(SMALL, Outside(), Plan()).graphs["stage0"].graph
    mean = next(n for n in reversed(graph.nodes) if "aten.mean" in str(n.target))
    assert [str(user.target) for user in mean.users] == ["aten.detach.default"]


def test_grad_mode_inside_autocast_and_enabled_autocast_are_refused() -> None:
    class GradMode(OneLayer):
        def between(self, logits: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                return logits * 2

    class Autocast(OneLayer):
        def between(self, logits: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                mixed: Tensor = self.mix(logits[:, :8].float())
            return mixed

    with pytest.raises(CaptureError, match="autocast"):
        lower(SMALL, GradMode(), Plan())
    with pytest.raises(CaptureError, match="autocast"):
        lower(SMALL, Autocast(), Plan())


def test_no_grad_in_a_draft_stops_gradients() -> None:
    class Frozen(OneLayer):
        def between(self, logits: Tensor) -> Tensor:
            with torch.no_grad():
                scale = logits.square().mean(-1, keepdim=True)
            return logits * scale

    lowered = lower(SMALL, Frozen(), Plan())
    assert any("detach" in str(n.target) for n in lowered.graphs["stage0"].graph.nodes)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="pp=3"):
        lower(SMALL, OneLayer(), Plan(pp=3))


def test_a_model_without_a_causal_head_is_refused() -> None:
    with pytest.raises(CaptureError):
        lower(nn.Linear(3, 3), None, Plan())


META = """
import resource, sys, time, torch
import spec_compile as sc
from transformers import Qwen3Config, Qwen3ForCausalLM
layers = int(sys.argv[1])
with torch.device("meta"):
    target = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, hidden_size=4096,
        intermediate_size=12288, vocab_size=151936, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, dtype=torch.bfloat16))
    draft = sc.drafts.Eagle3.from_target(target, ttt_length=4)
start = time.process_time()
lowered = sc.lower(target, draft, sc.Plan(cp=8, pp=4))
assert len(lowered.graphs) == 4
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def lower_on_meta(layers: int) -> tuple[float, float]:
    """CPU seconds and peak memory in GiB of lowering a Qwen3-8B shape in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", META, str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    seconds, gib = done.stdout.split()[-2:]
    return float(seconds), float(gib)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qwen3_8b_lowers_on_a_laptop_and_grows_linearly_with_layers() -> None:
    few, _ = lower_on_meta(12)
    many, memory = lower_on_meta(36)
    assert many < 60
    assert memory < 4
    assert many < 5 * few


def test_dropout_of_a_target_in_training_mode_is_said_to_be_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = tiny_llama(layers=2, hidden=8, vocab=13, heads=2).train()
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.5
    note = lower(target, None, Plan(verify=False)).explain().splitlines()[-1]
    assert "dropout is off in every step" in note
    assert "model.layers.*.self_attn (attention_dropout=0.5)" in note
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum("dropout is off" in line for line in told) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_train_in_a_half_type_are_warned_of_once(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_llama(layers=2, hidden=8, vocab=13, heads=2).to(dtype)
    explained = lower(target, None, Plan(verify=False)).explain()
    told = [r.getMessage() for r in caplog.records if "half type" in r.getMessage()]
    half = dtype == torch.bfloat16
    assert len(told) == half
    assert ("note: parameters of target train in a half type" in explained) == half
    caplog.clear()
    lower(target.requires_grad_(False), None, Plan(verify=False))
    assert "half type" not in caplog.text


def test_every_spelling_of_active_dropout_is_found_and_none_in_eval_mode() -> None:
    config = GPT2Config(
        vocab_size=13, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    target = GPT2LMHeadModel(config).train()
    parts = ("drop", "h.*.attn.attn_dropout", "h.*.attn.resid_dropout", "h.*.mlp.dropout")
    assert active_dropout(target) == [f"transformer.{part} (p=0.1)" for part in parts]
    assert not active_dropout(target.eval())
    read = tiny_llama(layers=2, hidden=8, vocab=13, heads=2).train()
    assert not active_dropout(read)
    read.config.attention_dropout = 0.25
    assert active_dropout(read) == ["config.attention_dropout=0.25"]


@pytest.mark.parametrize("way", ["replace", "vars"])
def test_a_draft_may_copy_its_inputs(way: str) -> None:
    class Copies(OneLayer):
        def forward(self, inputs: sc.DraftInputs) -> Any:
            mask = inputs.loss_mask
            if way == "replace":
                return super().forward(dataclasses.replace(inputs, loss_mask=mask))
            return super().forward(sc.DraftInputs(**{**vars(inputs), "loss_mask": mask}))

    lower(SMALL, Copies(), Plan(cp=2, verify=False))


def test_a_draft_that_reads_anchors_it_did_not_ask_for_is_told_how_to_ask() -> None:
    class Called(OneLayer):
        def between(self, logits: Tensor) -> Tensor:
            return logits + self.inputs.anchors.clamp(0).sum()  # type: ignore[union-attr]

        def forward(self, inputs: sc.DraftInputs) -> Any:
            self.inputs = inputs
            return super().forward(inputs)

    class Indexed(Called):
        def between(self, logits: Tensor) -> Tensor:
            return logits + self.inputs.document[self.inputs.anchors].cumsum(-1).sum()

    class Optional(Called):
        def between(self, logits: Tensor) -> Tensor:
            return logits if self.inputs.anchors is None else logits * 2

    for draft in (Called(), Indexed()):
        with pytest.raises((CaptureError, PlanError)) as caught:
            lower(SMALL, draft, Plan(verify=False))
        said = "\n".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
        assert "asks for anchors by its attributes block_size and anchors_per_document" in said
    lower(SMALL, Optional(), Plan(verify=False))
