"""Drafts that attend in PyTorch's own spelling: joined keys, and a mask built from rows and documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

import spec_compile as sc

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
Mask = Callable[[sc.DraftInputs, int], Any]


def same_document(inputs: sc.DraftInputs) -> Tensor:
    return inputs.document[:, None] == inputs.document[None]


def joined_eyes(inputs: sc.DraftInputs, step: int) -> Tensor:
    """[causal and document | eye | eye ...]."""
    total = inputs.tokens.shape[0]
    causal = torch.ones(total, total, dtype=torch.bool).tril() & same_document(inputs)
    return torch.cat([causal, *[torch.eye(total, dtype=torch.bool)] * step], -1)


def arithmetic(inputs: sc.DraftInputs, step: int) -> Tensor:
    """One formula over the indices of all keys."""
    total = inputs.tokens.shape[0]
    q, k = torch.arange(total)[:, None], torch.arange((step + 1) * total)[None]
    first = (k < total) & (k <= q) & (inputs.document[k % total] == inputs.document[:, None])
    return first | ((k >= total) & ((k - q) % total == 0))


def by_positions(inputs: sc.DraftInputs, step: int) -> Tensor:
    """Causal by positions, which restart in each document."""
    earlier = inputs.positions[None] <= inputs.positions[:, None]
    own = torch.eye(inputs.tokens.shape[0], dtype=torch.bool)
    return torch.cat([earlier & same_document(inputs), *[own] * step], 1)[None, None]


def added(inputs: sc.DraftInputs, step: int) -> Tensor:
    """The same mask as a number added to scores."""
    mask = joined_eyes(inputs, step)
    return torch.zeros_like(mask, dtype=torch.float64).masked_fill(~mask, float("-inf"))


def lowest(inputs: sc.DraftInputs, step: int) -> Tensor:
    """As models write it that came before flash attention: the least number of the type, and a product."""
    total = inputs.tokens.shape[0]
    least = torch.finfo(torch.float64).min
    causal = torch.full((total, total), least, dtype=torch.float64).triu(1)
    other = (1.0 - same_document(inputs).double()) * -1e30
    own = (1.0 - torch.eye(total, dtype=torch.float64)) * least
    return torch.cat([torch.minimum(causal, other), *[own] * step], -1)


def mapped(inputs: sc.DraftInputs, step: int) -> Tensor:
    """FlexAttention's `create_mask` of a mask_mod."""
    total, document = inputs.tokens.shape[0], inputs.document

    def causal(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k < total)

    def packed(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return document[q] == document[k % total]

    def own(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k % total == q) & (k >= total)

    mod = or_masks(and_masks(causal, packed), own)
    return create_mask(mod, None, None, total, (step + 1) * total, inputs.tokens.device)


def flex(inputs: sc.DraftInputs, step: int) -> Any:
    """FlexAttention's BlockMask."""
    total, document = inputs.tokens.shape[0], inputs.document

    def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (k - q) % total == 0
        return torch.where(k < total, (k <= q) & (document[k % total] == document[q]), own)

    return create_block_mask(visible, None, None, total, (step + 1) * total, inputs.tokens.device)


def window(size: int) -> Mask:
    def windowed(inputs: sc.DraftInputs, step: int) -> Tensor:
        mask = joined_eyes(inputs, step)
        far = inputs.index[:, None] - inputs.index[None] >= size
        return torch.cat([mask[:, : far.shape[1]] & ~far, mask[:, far.shape[1] :]], 1)

    return windowed


SPELLINGS: dict[str, Mask] = {
    "joined eyes": joined_eyes,
    "arithmetic": arithmetic,
    "by positions": by_positions,
    "added": added,
    "lowest": lowest,
    "mapped": mapped,
    "window": window(5),
    "flex": flex,
}


def repeated(x: Tensor) -> Tensor:
    """Copy [1, Hkv, S, D] for the query heads, as transformers does."""
    _, heads, rows, dim = x.shape
    copies = x[:, :, None].expand(1, heads, HEADS // heads, rows, dim)
    return copies.reshape(1, HEADS, rows, dim)


class SpelledSteps(nn.Module):
    """A recurrence over steps whose keys grow by one run a step."""

    def __init__(
        self,
        target_dim: int,
        vocab: int,
        mask: Mask,
        *,
        steps: int = 3,
        gqa: str = "expand",
        **sdpa: Any,
    ) -> None:
        super().__init__()
        self.taps, self.steps, self.mask, self.gqa, self.sdpa = (2, 0), steps, mask, gqa, sdpa
        width, inner = 2 * target_dim, HEADS * HEAD_DIM
        self.start = nn.Linear(len(self.taps) * target_dim, target_dim)
        self.query = nn.Linear(width, inner)
        self.key = nn.Linear(width, KV_HEADS * HEAD_DIM)
        self.value = nn.Linear(width, KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(inner, target_dim, bias=False)
        self.head = nn.Linear(target_dim, vocab)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        state = torch.tanh(self.start(inputs.features))
        keys = values = torch.tensor([], dtype=state.dtype)
        losses, counts = [], []
        for step in range(self.steps):
            token = sc.shift(inputs.tokens, step + 1, inputs.document)
            x = torch.cat((inputs.embedding(token), state), -1)
            q, k, v = (self.heads(f(x)) for f in (self.query, self.key, self.value))
            keys, values = torch.cat([keys, k], -2), torch.cat([values, v], -2)
            mixed = self.attend(q, keys, values, self.mask(inputs, step))
            state = torch.tanh(state + self.out(mixed[0].transpose(0, 1).flatten(1)))
            label = sc.shift(inputs.tokens, step + 2, inputs.document)
            valid = sc.shift(inputs.loss_mask, step + 2, inputs.document)
            loss = F.cross_entropy(self.head(state), label, reduction="none")
            losses.append((loss * valid).sum())
            counts.append(valid.sum())
        return sc.DraftOutput(torch.stack(losses), torch.stack(counts))

    def heads(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (-1, HEAD_DIM))
        return split.transpose(0, 1)[None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if self.gqa == "expand":
            k, v = repeated(k), repeated(v)
        elif self.gqa == "interleave":
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        else:
            self.sdpa["enable_gqa"] = True
        if mask is not None and not isinstance(mask, Tensor):
            out: Tensor = flex_attention(q, k, v, block_mask=mask, **self.sdpa)
            return out
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.sdpa)


class RowByRow(SpelledSteps):
    """Queries of two depths in one call, both of a row behind one another."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        both = super().attend(q.repeat_interleave(2, 2), k, v, mask.repeat_interleave(2, 0))
        first: Tensor = both.unflatten(2, (-1, 2))[:, :, :, 0]
        return first


class SpelledBlocks(nn.Module):
    """Blocks at anchors; trunk and block rows are joined before they become keys, as DFlash's public code does."""

    def __init__(
        self,
        target_dim: int,
        vocab: int,
        *,
        layers: int = 2,
        used: bool = False,
        causal: bool = False,
        written: bool = False,
    ) -> None:
        super().__init__()
        self.taps, self.block_size, self.anchors_per_document = (1, 2), 3, 4
        self.used, self.causal, self.written = used, causal, written
        self.vocab, inner = vocab, HEADS * HEAD_DIM
        self.trunk = nn.Linear(2 * target_dim, target_dim, bias=False)
        self.query, self.key, self.value, self.out = (
            nn.ModuleList(nn.Linear(a, b) for _ in range(layers))
            for a, b in (
                (target_dim, inner),
                *[(target_dim, KV_HEADS * HEAD_DIM)] * 2,
                (inner, target_dim),
            )
        )
        self.key_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6)
        self.head = nn.Linear(target_dim, vocab)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        assert inputs.anchors is not None
        anchors, total = inputs.anchors.clamp(min=0), inputs.tokens.shape[0]
        slots = anchors[:, None] + torch.arange(self.block_size)
        inside = slots.clamp(max=total - 1)
        trunk = self.trunk(inputs.features)[None]
        first = inputs.embedding(inputs.tokens[inside[:, :1]])
        blank = inputs.embedding(torch.full_like(slots[:, 1:], self.vocab - 1))
        hidden = torch.cat([first, blank], 1).flatten(0, 1)[None]
        places = inputs.positions[anchors][:, None] + torch.arange(self.block_size)
        wave = self.rotary(torch.cat([inputs.positions, places.flatten()])[None])
        mask = self.mask(inputs, anchors)
        for layer in range(len(self.query)):
            hidden = hidden + self.attend(layer, hidden, trunk, wave, mask)
        logits = self.head(hidden[0])
        same = inputs.document[inside] == inputs.document[anchors][:, None]
        valid = inputs.loss_mask[inside] & same & (slots < total) & (inputs.anchors >= 0)[:, None]
        loss = F.cross_entropy(logits, inputs.tokens[inside].flatten(), reduction="none")
        return sc.DraftOutput((loss * valid.flatten()).sum(), valid.sum())

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        inverse = 100.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = (inverse[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat([angles, angles], -1).double()
        return angles.cos()[:, None], angles.sin()[:, None]

    def mask(self, inputs: sc.DraftInputs, anchors: Tensor) -> Tensor:
        size, total = self.block_size, inputs.tokens.shape[0]
        queries = anchors.shape[0] * size
        q = torch.arange(queries).view(1, 1, -1, 1)
        k = torch.arange(total + queries).view(1, 1, 1, -1)
        at = anchors.view(1, 1, -1, 1).repeat_interleave(size, dim=2)
        document = inputs.document[anchors].view(1, 1, -1, 1).repeat_interleave(size, dim=2)
        main = (k < total) & (k < at) & (inputs.document[k % total] == document)
        block = (k >= total) & ((k - total) // size == q // size)
        mask = main | (block & (k - total <= q) if self.causal else block)
        if self.used:
            assert inputs.anchors is not None
            mask = mask & (inputs.anchors >= 0).repeat_interleave(size)[:, None]
        return mask

    def attend(
        self, layer: int, hidden: Tensor, trunk: Tensor, wave: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        rows, keys = hidden.shape[1], trunk.shape[1] + hidden.shape[1]
        q = self.query[layer](hidden).view(1, rows, HEADS, HEAD_DIM).transpose(1, 2)
        k = torch.cat([self.key[layer](trunk), self.key[layer](hidden)], dim=1)
        v = torch.cat([self.value[layer](trunk), self.value[layer](hidden)], dim=1)
        k = self.key_norm(k.view(1, keys, -1, HEAD_DIM)).transpose(1, 2)
        v = v.view(1, keys, -1, HEAD_DIM).transpose(1, 2)
        cos, sin = wave
        q = q * cos[..., -rows:, :] + turned(q) * sin[..., -rows:, :]
        k = k * cos + turned(k) * sin
        if self.written:
            scores = q @ repeated(k).mT * HEAD_DIM**-0.5
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ repeated(v)
        else:
            mixed = F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)
        out: Tensor = self.out[layer](mixed.transpose(1, 2).reshape(1, rows, -1))
        return out


def turned(x: Tensor) -> Tensor:
    return torch.cat([-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1)
