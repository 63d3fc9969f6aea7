"""The FlashAttention packages by their published parameters; whether an installed one serves, the probe says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.runtime.attention.backends import BACKENDS
from spec_compile.runtime.attention.products import Math

MODULES = {
    "flash_attn_2": "flash_attn.flash_attn_interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute.interface",
}
FORWARD = {
    "flash_attn_2": (
        "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
        "return_softmax"
    ),
    "flash_attn_3": (
        "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
        "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
        "seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left "
        "window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits "
        "pack_gqa sm_margin"
    ),
    "flash_attn_4": (
        "q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k page_table "
        "softmax_scale causal softcap window_size_left window_size_right return_lse out lse"
    ),
}
BACKWARD = {
    "flash_attn_2": (
        "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
        "window_size_right softcap alibi_slopes deterministic rng_state"
    ),
    "flash_attn_3": (
        "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q "
        "max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right softcap "
        "deterministic sm_margin"
    ),
    "flash_attn_4": (
        "q k v out dout lse softmax_scale causal softcap window_size_left window_size_right "
        "deterministic"
    ),
}


class Products:
    """Functions with a package's parameters, tensors [1, rows, heads, dim] and lse [1, heads, rows]."""

    def __init__(self, name: str) -> None:
        self.forward, self.backward = (_signature(names[name]) for names in (FORWARD, BACKWARD))

    def _flash_attn_forward(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        given = self.forward.bind_partial(*args, **options).arguments
        q, k, v = (given[name][0] for name in "qkv")
        out, lse = Math().forward(q, k, v, **_math_options(given))
        return out[None], lse.transpose(0, 1)[None].contiguous(), None, None

    def _flash_attn_backward(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        given = self.backward.bind_partial(*args, **options).arguments
        lse: Tensor = given["softmax_lse"] if "softmax_lse" in given else given["lse"]
        assert lse.is_contiguous()
        grad, q, k, v, out = (given[name][0] for name in ("dout", "q", "k", "v", "out"))
        merged = lse[0].transpose(0, 1)
        grads = Math().backward(grad, q, k, v, out, merged, **_math_options(given))
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            if name in given:
                given[name].copy_(grad[None])
        return tuple(grad[None] for grad in grads)

    _flash_attn_fwd, _flash_attn_bwd = _flash_attn_forward, _flash_attn_backward


def _signature(names: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names.split()])


def _math_options(given: dict[str, Any]) -> dict[str, Any]:
    assert given.get("window_size_left", -1) == given.get("window_size_right", -1) == -1
    assert given.get("softcap", 0.0) == given.get("dropout_p", 0.0) == 0.0
    causal = given["causal"] if "causal" in given else given["is_causal"]
    return {"mask": None, "causal": causal, "scale": given["softmax_scale"]}


@pytest.mark.parametrize("name", MODULES)
def test_a_package_that_is_not_installed_is_named(name: str) -> None:
    backend: Any = BACKENDS[name]
    if backend.installed:
        pytest.skip(f"{name} is installed")
    reason = backend.limit(torch.device("cuda"), torch.bfloat16, 64, 64)
    assert reason == f"the module {MODULES[name]} is not installed"


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("causal", [False, True])
def test_arguments_reach_the_packages_by_name_and_layout(
    name: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(BACKENDS[name]), "_import", lambda self: Products(name))
    q, k, v, grad, out = (torch.randn(9, heads, 16) for heads in (4, 2, 2, 4, 4))
    lse = torch.randn(9, 4) + 3
    options: dict[str, Any] = {"mask": None, "causal": causal, "scale": 0.3}
    got, want = (
        (
            *backend.forward(q, k, v, **options),
            *backend.backward(grad, q, k, v, out, lse, **options),
        )
        for backend in (BACKENDS[name], Math())
    )
    for part, expected in zip(got, want, strict=True):
        torch.testing.assert_close(part, expected)
