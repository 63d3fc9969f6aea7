from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spec_compile.contract import DraftInputs
from spec_compile.drafts import Eagle3, Eagle3Config
from spec_compile.drafts.rope import rotate
from spec_compile.errors import ConfigError
from tests.drafts.eagle3_by_document import eagle3_by_document
from tests.models import packed_batch, randomise, tiny_llama, tiny_qwen3
from tests.oracle import draft_inputs, gradients, run_target

LENGTHS = (7, 12, 1, 15, 0, 3, 2)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "taps": (3, 0, 3)},
    {"norm_output": True},
    {"layer_types": ("sliding_attention",), "sliding_window": 4},
    {"attention_bias": True, "qk_norm": True},
    {"num_key_value_heads": 4, "head_dim": 6, "taps": (1,), "ttt_length": 1},
    {"num_hidden_layers": 3, "norm_before_residual": True},
    {
        "num_hidden_layers": 2,
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 4,
    },
    {"head_norm": False},
]


def make_inputs(
    target: Any, taps: tuple[int, ...], lengths: tuple[int, ...] = LENGTHS
) -> DraftInputs:
    vocab = target.get_output_embeddings().weight.shape[0]
    batch = packed_batch(lengths, vocab=vocab, draft_mask=True)
    return draft_inputs(target, batch, run_target(target, batch, taps, grad=False))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "defaults")
def test_sums_and_gradients_equal_a_second_implementation(options: dict[str, Any]) -> None:
    target = tiny_qwen3()
    draft = randomise(Eagle3.from_target(target, **{"ttt_length": 3, **options}), seed=2)
    inputs = make_inputs(target, draft.taps)
    output = draft(inputs)
    weights = dict(draft.named_parameters())
    loss, count, accepted = eagle3_by_document(weights, draft.config, inputs, theta=10000.0)
    torch.testing.assert_close(output.loss_sum, loss, rtol=1e-9, atol=1e-9)
    assert output.count.tolist() == count.tolist()
    torch.testing.assert_close(output.stats["acceptance"], accepted, rtol=1e-9, atol=1e-9)

    slope = torch.linspace(1.0, 2.0, draft.ttt_length, dtype=torch.float64)
    ours = gradients((output.loss_sum * slope).sum(), draft)
    theirs = gradients((loss * slope).sum(), draft)
    for name, grad in ours.items():
        used = draft.config.head_norm or name != "norm.weight"
        assert bool(grad.any()) == used, name
        torch.testing.assert_close(grad, theirs[name], rtol=1e-9, atol=1e-9, msg=name)


def normed_states(draft: Eagle3, inputs: DraftInputs) -> list[Tensor]:
    """What each step feeds to the head."""
    seen: list[Tensor] = []
    handle = draft.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    with torch.no_grad():
        draft(inputs)
    handle.remove()
    return seen


@pytest.mark.parametrize("norm_output", [False, True])
def test_training_logits_equal_a_cached_chain_decode_at_every_row_and_step(
    norm_output: bool,
) -> None:
    target, steps = tiny_llama(), 4
    draft = randomise(Eagle3.from_target(target, steps, norm_output=norm_output), seed=3)
    inputs = make_inputs(target, draft.taps, (11,))
    head = draft.lm_head.weight
    trained = [F.linear(state, head) for state in normed_states(draft, inputs)]
    tokens, length = inputs.tokens, 11
    layer = draft.midlayer

    def decode(token: Tensor, hidden: Tensor, position: int, cache: list[Any]) -> Tensor:
        """One row through the draft, appending to the cache and attending to all of it."""
        where = torch.tensor([position])
        q, k, v, residual = layer.project(inputs.embedding(token[None]), hidden, where)
        cache.append((k, v))
        keys, values = (torch.cat(part).transpose(0, 1) for part in zip(*cache, strict=True))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, enable_gqa=True)
        return layer.finish(out.transpose(0, 1), residual)

    checked = 0
    with torch.no_grad():
        trunk: list[Any] = []
        for t in range(length - 1):
            state = decode(tokens[t + 1], draft.fuse(inputs.features[t : t + 1]), t, trunk)
            cache = list(trunk)
            for k in range(steps):
                if k:
                    if t + 1 + k >= length:
                        break
                    state = decode(tokens[t + 1 + k], state, t + k, cache)
                normed = draft.norm(state)
                logits = F.linear(normed, head)[0]
                torch.testing.assert_close(logits, trained[k][t], rtol=1e-11, atol=1e-11)
                state = normed if norm_output else state
                checked += 1
    assert checked == 10 + 9 + 8 + 7


def test_documents_do_not_see_each_other() -> None:
    target = tiny_qwen3()
    draft = randomise(Eagle3.from_target(target, 3), seed=2)
    together = draft(make_inputs(target, draft.taps, (6, 9)))
    batch = packed_batch((6, 9), vocab=61, draft_mask=True)
    sums = torch.zeros(3, dtype=torch.float64)
    for start, end in ((0, 6), (6, 15)):
        part = packed_batch((end - start,), vocab=61)
        part.tokens, part.draft_mask = batch.tokens[start:end], batch.draft_mask[start:end]  # type: ignore[index]
        row = run_target(target, part, draft.taps, grad=False)
        sums += draft(draft_inputs(target, part, row)).loss_sum.detach()
    torch.testing.assert_close(together.loss_sum, sums)


def test_masked_rows_are_left_out_even_when_their_values_are_not_finite() -> None:
    target = tiny_qwen3()
    draft = randomise(Eagle3.from_target(target, 2), seed=2)
    inputs = make_inputs(target, draft.taps, (9,))
    inputs.loss_mask = torch.arange(9) < 5
    clean = draft(inputs)
    # the law p_t teaches token t + 1; tokens from 5 on are masked
    inputs.teacher.hidden[4:] = float("nan")
    dirty = draft(inputs)
    assert torch.equal(clean.loss_sum, dirty.loss_sum)
    assert torch.equal(clean.stats["acceptance"], dirty.stats["acceptance"])


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (1, 1, 2)])
def test_row_without_a_target_gives_zero_loss_and_count(lengths: tuple[int, ...]) -> None:
    target = tiny_qwen3()
    draft = randomise(Eagle3.from_target(target, 3), seed=2)
    output = draft(make_inputs(target, draft.taps, lengths))
    output.loss_sum.sum().backward()
    assert output.loss_sum.tolist() == [0.0, 0.0, 0.0]
    assert output.count.tolist() == [0, 0, 0]
    for parameter in draft.parameters():
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_types_stay_near_the_fp64_loss(dtype: torch.dtype) -> None:
    target = tiny_qwen3()
    draft = randomise(Eagle3.from_target(target, 3), seed=2)
    exact = draft(make_inputs(target, draft.taps)).loss_sum
    near = copy.deepcopy(draft).to(dtype)(make_inputs(copy.deepcopy(target).to(dtype), draft.taps))
    assert near.loss_sum.dtype == torch.float32
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(near.loss_sum.double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize(("layers", "taps"), [(2, (1, 1, 0)), (3, (2, 1, 0)), (8, (2, 4, 5))])
def test_default_taps_fit_any_depth(layers: int, taps: tuple[int, ...]) -> None:
    assert Eagle3.from_target(tiny_qwen3(layers=layers)).taps == taps


def test_target_gives_sizes_rope_and_head() -> None:
    target = tiny_llama(tied=True)
    draft = Eagle3.from_target(target, 5)
    config = draft.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 8)
    assert (draft.ttt_length, config.rope_theta) == (5, 500.0)
    assert config.rope_scaling is not None
    assert config.rope_scaling["rope_type"] == "llama3"
    head = target.get_output_embeddings().weight
    assert torch.equal(draft.lm_head.weight, head)
    assert draft.lm_head.weight.data_ptr() != head.data_ptr()


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotation_equals_that_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 500.0}
    if kind != "default":
        scaling |= {"factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, rope_parameters=dict(scaling)
    )
    x = torch.randn(9, 4, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 30, 63, 64, 100, 200, 255])
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    theta, given = 500.0, Eagle3Config.from_target(config, vocab_size=8).rope_scaling
    assert (given is None) == (kind == "default")
    torch.testing.assert_close(
        rotate(x, positions, theta, given).transpose(0, 1), expected[0], rtol=1e-4, atol=1e-4
    )


def test_meta_target_gives_a_meta_draft_with_the_same_names() -> None:
    real = Eagle3.from_target(tiny_qwen3())
    meta = Eagle3.from_target(tiny_qwen3().to("meta"))
    assert all(p.is_meta for p in meta.parameters())
    shapes = {name: tuple(p.shape) for name, p in real.named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in meta.named_parameters()}


def test_tensor_names_are_the_public_ones() -> None:
    attention = {f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"}
    mlp = {f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    norms = {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
    expected = attention | mlp | {f"midlayer.{n}.weight" for n in norms}
    expected |= {"fc.weight", "norm.weight", "lm_head.weight"}
    assert set(Eagle3.from_target(tiny_qwen3()).state_dict()) == expected


def test_seed_alone_decides_the_weights() -> None:
    target = tiny_qwen3()
    state = torch.get_rng_state()
    one, same, other = (Eagle3.from_target(target, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.fc.weight, same.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_draft_can_be_copied_without_its_target() -> None:
    target = tiny_qwen3()
    draft = Eagle3.from_target(target)
    twin = copy.deepcopy(draft)
    inputs = make_inputs(target, draft.taps)
    assert torch.equal(twin(inputs).loss_sum, draft(inputs).loss_sum)
    theirs = {id(p) for p in target.parameters()}
    assert not theirs & {id(p) for p in draft.parameters()}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"draft_vocab_size": 20}, "needs its map"),
        ({"hidden_size": 16}, "must equal the target's"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"head_dim": 7}, "even head_dim"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_act": "snake"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"taps": ()}, "taps"),
        ({"norm_outptu": True}, "did you mean 'norm_output'"),
        ({"ttt_length": 0}, "ttt_length"),
    ],
)
def test_option_that_cannot_work_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3.from_target(tiny_qwen3(layers=2), **overrides)


def test_target_of_one_layer_or_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 or more layers, found 1"):
        Eagle3.from_target(tiny_qwen3(layers=1))
    with pytest.raises(ConfigError, match="no output head"):
        Eagle3.from_target(tiny_qwen3().model)
