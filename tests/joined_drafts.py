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
        later = self._later(inputs)
        first = inputs.embedding(sc.shift(inputs.tokens, 1, inputs.document))
        blank = inputs.embedding(inputs.tokens.new_full((1,), self.config.mask_token_id))
        embedded = torch.cat([first, blank.expand((depths - 1) * later.size, -1)])
        unknown = self.fuse(self.mask_hidden[0]).expand((depths - 1) * later.size, -1)
        states = torch.cat([self.fuse(inputs.features), unknown])
        positions = torch.cat([inputs.positions, *[later.positions + k for k in range(1, depths)]])
        mask = self.visible(inputs)

        layer, *layers = list[Any](self.layers)
        q, k, v, residual = layer.project(embedded, states, positions)
        states = layer.finish(attend(q, k, v, mask), residual)
        for layer in layers:
            q, k, v = layer.project(states, positions)
            states = layer.finish(attend(q, k, v, mask), states)
        return self.loss(inputs, self.norm(states), [total, *[later.size] * (depths - 1)])

    def visible(self, inputs: sc.DraftInputs) -> Tensor:
        document = inputs.document
        anchor, depth, used = self.elements(inputs)

        def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            trunk = (depth[k] == 0) & (anchor[k] <= anchor[q])
            own = (anchor[k] == anchor[q]) & (depth[k] <= depth[q])
            same = (document[anchor[q]] == document[anchor[k]]) & used[q] & used[k]
            return same & (trunk | own)

        rows = anchor.shape[0]
        return create_mask(seen, None, None, rows, rows, anchor.device)

    def elements(self, inputs: sc.DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor row and depth of every element, and whether it is used."""
        depths = self.config.num_depths
        if self.config.anchors_per_document is None:
            anchor, depth = JOININGS[self.joining](inputs, depths)
            return anchor, depth, anchor >= 0
        assert inputs.anchors is not None
        at = torch.cat([inputs.index, *[inputs.anchors] * (depths - 1)])
        numbers = [torch.zeros_like(inputs.index)]
        numbers += [torch.full_like(inputs.anchors, k) for k in range(1, depths)]
        return at.clamp_min(0), torch.cat(numbers), at >= 0

    def loss(self, inputs: sc.DraftInputs, states: Tensor, sizes: list[int]) -> sc.DraftOutput:
        targets = [self._target(inputs, k) for k in range(self.config.num_depths)]
        teacher, valid = zip(*targets, strict=True)
        head = self.lm_head.weight
        if self.sums == "all":
            every = torch.cat(valid)
            loss, _ = distance(
                self.config, states, head, torch.cat(teacher), inputs.teacher, every, self.columns()
            )
            return sc.DraftOutput(loss, every.sum())
        parts = (
            states.split(sizes)
            if self.sums == "split"
            else states.unflatten(0, (len(sizes), -1)).unbind()
        )
        losses = [
            distance(self.config, x, head, t, inputs.teacher, m, self.columns())[0]
            for x, t, m in zip(parts, teacher, valid, strict=True)
        ]
        return sc.DraftOutput(torch.stack(losses).sum(), torch.cat(valid).sum())


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One call for all rows, [R, H, head_dim] each."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1)
