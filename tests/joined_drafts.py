"""P-EAGLE with the rows of all its depths joined: one pass of every layer, one attention call, one loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask

import spec_compile as sc
from spec_compile.drafts import PEagle
from spec_compile.drafts.objective import distance

Joined = tuple[Tensor, Tensor]
"""The anchor row and the depth of every element, [R]."""
Join = Callable[[Sequence[Tensor]], Tensor]


def by_cat(inputs: sc.DraftInputs, depths: int) -> Joined:
    every = [torch.full_like(inputs.index, depth) for depth in range(depths)]
    return torch.cat([inputs.index] * depths), torch.cat(every)


def by_repeat(inputs: sc.DraftInputs, depths: int) -> Joined:
    numbers = torch.arange(depths).repeat_interleave(inputs.index.shape[0])
    return inputs.index.repeat(depths), numbers


def by_grid(inputs: sc.DraftInputs, depths: int) -> Joined:
    grid = torch.arange(depths)[:, None].expand(depths, inputs.index.shape[0])
    return (torch.zeros_like(grid) + inputs.index).flatten(), grid.reshape(-1)


JOININGS: dict[str, Callable[[sc.DraftInputs, int], Joined]] = {
    "cat": by_cat,
    "repeat": by_repeat,
    "grid": by_grid,
}


class JoinedPEagle(PEagle):
    """The parameters of `PEagle`; depth-major rows [K * T] everywhere."""

    joining = "cat"
    sums = "all"

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        depths, total = self.config.num_depths, inputs.tokens.shape[0]
        anchor, depth = JOININGS[self.joining](inputs, depths)
        mask = self.visible(inputs, anchor, depth)
        first = inputs.embedding(sc.shift(inputs.tokens, 1, inputs.document))
        blank = inputs.embedding(inputs.tokens.new_full((1,), self.config.mask_token_id))
        embedded = torch.cat([first, blank.expand((depths - 1) * total, -1)])
        unknown = self.fuse(self.mask_hidden[0]).expand((depths - 1) * total, -1)
        states = torch.cat([self.fuse(inputs.features), unknown])
        positions = torch.cat([inputs.positions + k for k in range(depths)])

        layer, *layers = list[Any](self.layers)
        q, k, v, residual = layer.project(embedded, states, positions)
        states = layer.finish(attend(q, k, v, mask), residual)
        for layer in layers:
            q, k, v = layer.project(states, positions)
            states = layer.finish(attend(q, k, v, mask), states)
        return self.loss(inputs, self.norm(states))

    def visible(self, inputs: sc.DraftInputs, anchor: Tensor, depth: Tensor) -> Tensor:
        document = inputs.document

        def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            trunk = (depth[k] == 0) & (anchor[k] <= anchor[q])
            own = (anchor[k] == anchor[q]) & (depth[k] <= depth[q])
            return (document[anchor[q]] == document[anchor[k]]) & (trunk | own)

        rows = anchor.shape[0]
        return create_mask(seen, None, None, rows, rows, anchor.device)

    def loss(self, inputs: sc.DraftInputs, states: Tensor) -> sc.DraftOutput:
        depths = range(self.config.num_depths)
        teacher = [sc.shift(inputs.teacher.hidden, k + 1, inputs.document) for k in depths]
        valid = [sc.shift(inputs.loss_mask, k + 2, inputs.document) for k in depths]
        head = self.lm_head.weight
        if self.sums == "all":
            every = torch.cat(valid)
            loss, _ = distance(
                self.config, states, head, torch.cat(teacher), inputs.teacher, every, self.columns()
            )
            return sc.DraftOutput(loss, every.sum())
        cuts = {
            "split": lambda: states.split(inputs.tokens.shape[0]),
            "view": lambda: states.unflatten(0, (len(depths), -1)).unbind(),
        }
        losses = [
            distance(self.config, x, head, t, inputs.teacher, m, self.columns())[0]
            for x, t, m in zip(cuts[self.sums](), teacher, valid, strict=True)
        ]
        return sc.DraftOutput(torch.stack(losses).sum(), torch.stack(valid).sum())


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One call for all rows, [R, H, head_dim] each."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1)
