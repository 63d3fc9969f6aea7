"""EAGLE-3 written a second time: document by document, row by row, from the published table.

Nothing of the package is used. Legend: S tokens of one document, D hidden, H heads, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def eagle3_by_document(
    weights: Mapping[str, Tensor], options: Any, inputs: Any, theta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum loss, count and acceptance, [K] each, over the documents of a packed row.

    Args:
        weights: parameters by public name.
        options: the draft's configuration.
        inputs: the draft's inputs on the packed row.
        theta: base of plain RoPE.
    """
    total: list[Tensor] | None = None
    embedded = inputs.embedding(inputs.tokens)
    teacher = (inputs.teacher.hidden @ inputs.teacher.weight.T).softmax(-1)
    for number in sorted(set(inputs.document.tolist())):
        rows = (inputs.document == number).nonzero()[:, 0]
        one = _Document(weights, options, theta)
        sums = one.run(inputs.features[rows], embedded[rows], inputs.loss_mask[rows], teacher[rows])
        total = sums if total is None else [a + b for a, b in zip(total, sums, strict=True)]
    assert total is not None
    return total[0], total[1], total[2]


class _Document:
    def __init__(self, weights: Mapping[str, Tensor], options: Any, theta: float) -> None:
        self.w, self.o, self.theta = weights, options, theta

    def run(self, f: Tensor, emb: Tensor, mask: Tensor, law: Tensor) -> list[Tensor]:
        length, steps = len(f), self.o.ttt_length
        hidden = self.fuse(f)
        layers = ["midlayer", *(f"layers.{i}" for i in range(1, self.o.num_hidden_layers))]
        trunk: dict[str, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
        own: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        loss, count, accepted = ([law.new_zeros(()) for _ in range(steps)] for _ in range(3))
        for k in range(steps):
            # at step k row t embeds token t+1+k, so it exists while that token does
            live = max(length - 1 - k, 0)
            for number, layer in enumerate(layers):
                queries = []
                for t in range(live):
                    if number == 0:
                        e = self.norm(emb[t + 1 + k], "midlayer.input_layernorm")
                        u = torch.cat((e, self.norm(hidden[t], "midlayer.hidden_norm")))
                    else:
                        u = self.norm(hidden[t], f"{layer}.input_layernorm")
                    queries.append(self.rotate(self.heads(u, layer, "q"), t + k))
                    pair = self.rotate(self.heads(u, layer, "k"), t + k), self.heads(u, layer, "v")
                    (trunk[layer] if k == 0 else own.setdefault((layer, t), [])).append(pair)
                kinds = self.o.layer_types or ["full_attention"] * len(layers)
                window = self.o.sliding_window if kinds[number] == "sliding_attention" else length
                for t in range(live):
                    keys = [*trunk[layer][max(0, t + 1 - window) : t + 1], *own.get((layer, t), [])]
                    hidden[t] = self.finish(hidden[t], layer, self.attend(queries[t], keys))
            for t in range(live):
                normed = self.norm(hidden[t], "norm")
                read = normed if self.o.head_norm else hidden[t]
                hidden[t] = normed if self.o.norm_output else hidden[t]
                if t + 2 + k >= length or not mask[t + 2 + k]:
                    continue
                logq = (self.w["lm_head.weight"] @ read).log_softmax(0)
                p = law[t + 1 + k]
                loss[k] = loss[k] - 0.8**k * (p * logq).sum()
                count[k] = count[k] + 1
                accepted[k] = accepted[k] + torch.minimum(p, logq.exp()).sum()
        return [torch.stack(loss), torch.stack(count), torch.stack(accepted)]

    def fuse(self, f: Tensor) -> list[Tensor]:
        if self.o.norm_before_fc:
            f = torch.stack([self.norm(row, "input_norm") for row in f])
        if self.o.fc_norm:
            parts = f.split(f.shape[1] // len(self.o.taps), 1)
            f = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], 1)
        return list(f @ self.w["fc.weight"].T)

    def norm(self, x: Tensor, name: str) -> Tensor:
        size = (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.o.rms_norm_eps).sqrt()
        y: Tensor = x / size * self.w[f"{name}.weight"]
        return y

    def heads(self, u: Tensor, layer: str, which: str) -> Tensor:
        """[H, d] of one row."""
        name = f"{layer}.self_attn.{which}_proj"
        x = self.w[f"{name}.weight"] @ u
        x = x + self.w.get(f"{name}.bias", torch.zeros_like(x))
        x = x.reshape(-1, self.o.head_dim)
        if self.o.qk_norm and which != "v":
            x = self.norm(x, f"{layer}.self_attn.{which}_norm")
        return x

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.o.head_dim // 2
        angles = [position / self.theta ** (2 * i / self.o.head_dim) for i in range(half)]
        turn = torch.polar(torch.ones(half, dtype=x.dtype), torch.tensor(angles, dtype=x.dtype))
        turned = torch.complex(x[:, :half], x[:, half:]) * turn
        return torch.cat((turned.real, turned.imag), 1)

    def attend(self, q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        group = self.o.num_attention_heads // self.o.num_key_value_heads
        outputs = []
        for head in range(self.o.num_attention_heads):
            k = torch.stack([key[head // group] for key, _ in keys])
            v = torch.stack([value[head // group] for _, value in keys])
            outputs.append((k @ q[head] / math.sqrt(self.o.head_dim)).softmax(0) @ v)
        return torch.cat(outputs)

    def finish(self, hidden: Tensor, layer: str, mixed: Tensor) -> Tensor:
        w = self.w
        residual = hidden
        if self.o.norm_before_residual and layer == "midlayer":
            residual = self.norm(hidden, "midlayer.hidden_norm")
        out = w[f"{layer}.self_attn.o_proj.weight"] @ mixed
        h = residual + out + w.get(f"{layer}.self_attn.o_proj.bias", torch.zeros_like(out))
        x = self.norm(h, f"{layer}.post_attention_layernorm")
        gate = w[f"{layer}.mlp.gate_proj.weight"] @ x
        up = w[f"{layer}.mlp.up_proj.weight"] @ x
        return h + w[f"{layer}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
