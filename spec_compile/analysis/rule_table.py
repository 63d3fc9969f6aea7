"""Which rule serves which operator; what is in no table and not pointwise is refused."""

from __future__ import annotations

import torch
from torch.fx import Node

from spec_compile.ir.meta import info

from .declared_rules import (
    attention_rule,
    expert_rule,
    first_rows_rule,
    refuse_linear_attention,
    refuse_sdpa,
    shift_rule,
)
from .product_rules import (
    einsum_rule,
    linear_rule,
    matmul_rule,
)
from .repeat_rules import (
    broadcast_rule,
    outer_rule,
    pad_rule,
    repeat_interleave_rule,
    repeat_rule,
)
from .row_rules import (
    Rule,
    create_rule,
    embedding_rule,
    gather_rule,
    has_rows,
    index_rule,
    loss_rule,
    new_rule,
    norm_rule,
    one_hot_rule,
    pointwise_rule,
    reduce_rule,
    same_rule,
    scan_rule,
    similarity_rule,
    sum_rule,
)
from .shape_rules import (
    cat_rule,
    expand_rule,
    split_rule,
    squeeze_rule,
    stack_rule,
    transpose_rule,
    unsqueeze_rule,
    view_rule,
)


def _table() -> dict[str, Rule]:
    table: dict[str, Rule] = {}
    groups: list[tuple[Rule, str]] = [
        (pointwise_rule, "where square clip float_power true_divide divide multiply subtract floor_divide relu6 selu "
                         "log_sigmoid softsign hardswish rsub __and__ __or__ __xor__ logical_and logical_or "
                         "logical_not logical_xor isclose max.other min.other maximum minimum negative absolute "
                         "greater less not_equal bitwise_and bitwise_or bitwise_not"),
        (same_rule, "to _to_copy detach clone contiguous alias lift_fresh_copy type_as zeros_like ones_like "
                    "empty_like full_like zero fill"),
        (sum_rule, "sum count_nonzero"),
        (reduce_rule, "mean amax amin max min prod logsumexp norm linalg_vector_norm var std any all argmax argmin "
                      "median var_mean std_mean"),
        (scan_rule, "softmax log_softmax _softmax _log_softmax cumsum cumprod flip roll sort argsort topk logcumsumexp "
                    "cummax cummin diff glu"),
        (norm_rule, "layer_norm rms_norm native_layer_norm"),
        (linear_rule, "linear"),
        (matmul_rule, "matmul mm bmm addmm baddbmm mv dot"),
        (view_rule, "view reshape _unsafe_view flatten unflatten view_as"),
        (transpose_rule, "transpose permute t numpy_T mT movedim"),
        (unsqueeze_rule, "unsqueeze"),
        (squeeze_rule, "squeeze"),
        (expand_rule, "expand expand_as broadcast_to"),
        (repeat_rule, "repeat tile"),
        (repeat_interleave_rule, "repeat_interleave.self_int"),
        (broadcast_rule, "broadcast_tensors"),
        (outer_rule, "outer"),
        (pad_rule, "pad constant_pad_nd"),
        (one_hot_rule, "one_hot"),
        (similarity_rule, "cosine_similarity"),
        (cat_rule, "cat"),
        (stack_rule, "stack"),
        (split_rule, "chunk split split_with_sizes slice narrow select unbind"),
        (embedding_rule, "embedding"),
        (gather_rule, "gather take_along_dim"),
        (index_rule, "index"),
        (loss_rule, "cross_entropy_loss nll_loss nll_loss_nd kl_div mse_loss l1_loss smooth_l1_loss huber_loss "
                    "binary_cross_entropy binary_cross_entropy_with_logits"),
        (create_rule, "arange zeros ones full empty scalar_tensor eye linspace"),
        (new_rule, "new_zeros new_ones new_full new_empty"),
        (refuse_sdpa, "scaled_dot_product_attention"),
    ]  # fmt: skip
    for rule, names in groups:
        for name in names.split():
            table[f"aten::{name}"] = rule
    table["aten::einsum"] = einsum_rule
    table["spec_compile::branch_attention"] = attention_rule
    table["spec_compile::shift"] = shift_rule
    table["spec_compile::row_shift"] = shift_rule
    table["spec_compile::token_logprobs"] = first_rows_rule
    table["spec_compile::soft_cross_entropy"] = first_rows_rule
    table["spec_compile::label_losses"] = first_rows_rule
    table["spec_compile::expert_linear"] = expert_rule
    table["spec_compile::gated_delta_rule"] = refuse_linear_attention
    table["spec_compile::law_losses"] = first_rows_rule
    table["spec_compile::boundary"] = same_rule
    return table


RULES = _table()


def is_loss(node: Node) -> bool:
    """Whether a node is a loss of two values with rows, which it adds up if told so."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and RULES.get(target._schema.name) is loss_rule


def sums_over_rows(node: Node) -> bool:
    """Whether a placed node is a plain sum that runs over rows."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    rule, placement = RULES.get(target._schema.name), info(node).placement
    if rule not in (sum_rule, einsum_rule, loss_rule) or placement is None:
        return False
    sources = [info(a).placement for a in node.all_input_nodes]
    return not has_rows(placement) and any(p is not None and has_rows(p) for p in sources)


LINEAR_ON_SUMS = {
    "aten::add": "all", "aten::sub": "all", "aten::stack": "all", "aten::cat": "all",
    "aten::mul": "product", "aten::div": "scale", "aten::neg": "all", "aten::sum": "all",
    "aten::to": "all", "aten::_to_copy": "all", "aten::detach": "all", "aten::clone": "all",
    "aten::view": "all", "aten::reshape": "all", "aten::unsqueeze": "all", "aten::squeeze": "all",
    "aten::select": "all", "aten::slice": "all",
}  # fmt: skip
