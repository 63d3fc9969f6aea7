"""Drafts written a second time: document by document, row by row, from the published descriptions.

Nothing of the package is used. Legend: S tokens of one document, D hidden, H heads, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Keys = Sequence[tuple[Tensor, Tensor]]


@dataclass
class Document:
    """One document of a packed row."""

    tokens: list[int]
    mask: list[bool]
    features: Tensor
    hidden: Tensor
    law: Tensor
    """[S, V]: row t is the target's law of token t + 1."""
    start: int


def documents(inputs: Any) -> Iterator[Document]:
    law = (inputs.teacher.hidden @ inputs.teacher.weight.T).softmax(-1)
    for number in sorted(set(inputs.document.tolist())):
        rows = (inputs.document == number).nonzero()[:, 0]
        yield Document(
            inputs.tokens[rows].tolist(),
            inputs.loss_mask[rows].tolist(),
            inputs.features[rows],
            inputs.teacher.hidden[rows],
            law[rows],
            int(rows[0]),
        )


class Decoder:
    """Pieces of a decoder layer for one row at a time."""

    def __init__(self, weights: Mapping[str, Tensor], options: Any, theta: float = 10000.0) -> None:
        self.w, self.o, self.theta = weights, options, theta

    def norm(self, x: Tensor, name: str) -> Tensor:
        size = (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.o.rms_norm_eps).sqrt()
        y: Tensor = x / size * self.w[f"{name}.weight"]
        return y

    def head(self, u: Tensor, layer: str, which: str, position: int) -> Tensor:
        """[H, d] of one row."""
        name = f"{layer}.self_attn.{which}_proj"
        x = self.w[f"{name}.weight"] @ u
        x = (x + self.w.get(f"{name}.bias", torch.zeros_like(x))).reshape(-1, self.o.head_dim)
        if which == "v":
            return x
        if self.o.qk_norm:
            x = self.norm(x, f"{layer}.self_attn.{which}_norm")
        half = self.o.head_dim // 2
        angles = [position / self.theta ** (2 * i / self.o.head_dim) for i in range(half)]
        turn = torch.polar(torch.ones(half, dtype=x.dtype), torch.tensor(angles, dtype=x.dtype))
        turned = torch.complex(x[:, :half], x[:, half:]) * turn
        return torch.cat((turned.real, turned.imag), 1)

    def pair(self, u: Tensor, layer: str, position: int) -> tuple[Tensor, Tensor]:
        return self.head(u, layer, "k", position), self.head(u, layer, "v", position)

    def attend(self, u: Tensor, layer: str, position: int, keys: Keys) -> Tensor:
        q = self.head(u, layer, "q", position)
        group = self.o.num_attention_heads // self.o.num_key_value_heads
        outputs = []
        for head in range(self.o.num_attention_heads):
            k = torch.stack([key[head // group] for key, _ in keys])
            v = torch.stack([value[head // group] for _, value in keys])
            outputs.append((k @ q[head] / math.sqrt(self.o.head_dim)).softmax(0) @ v)
        mixed = torch.cat(outputs)
        name = f"{layer}.self_attn.o_proj"
        out = self.w[f"{name}.weight"] @ mixed
        return out + self.w.get(f"{name}.bias", torch.zeros_like(out))

    def mlp(self, h: Tensor, layer: str) -> Tensor:
        x = self.norm(h, f"{layer}.post_attention_layernorm")
        gate = self.w[f"{layer}.mlp.gate_proj.weight"] @ x
        up = self.w[f"{layer}.mlp.up_proj.weight"] @ x
        return h + self.w[f"{layer}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)


def mtp(weights: Mapping[str, Tensor], o: Any, inputs: Any) -> tuple[list[Tensor], list[int]]:
    """Loss sums (weighted) and counts of each step."""
    net, embed, head = Decoder(weights, o), inputs.embedding(inputs.tokens), inputs.teacher.weight
    zero = head.new_zeros(())
    losses, counts = [zero] * o.num_steps, [0] * o.num_steps
    share = [o.loss_decay**k / sum(o.loss_decay**i for i in range(o.num_steps)) for k in range(9)]
    for doc in documents(inputs):
        length, hidden = len(doc.tokens), list(doc.hidden)
        layers = [f"mtp.layers.{i}" for i in range(o.num_hidden_layers)]
        trunk: dict[str, list[Any]] = {layer: [] for layer in layers}
        own: dict[tuple[str, int], list[Any]] = {}
        for k in range(o.num_steps):
            live = range(max(length - 1 - k, 0))
            for t in live:
                e = net.norm(embed[doc.start + t + 1 + k], "mtp.pre_fc_norm_embedding")
                h = net.norm(hidden[t], "mtp.pre_fc_norm_hidden")
                hidden[t] = weights["mtp.fc.weight"] @ torch.cat((e, h))
            for layer in layers:
                normed = [net.norm(hidden[t], f"{layer}.input_layernorm") for t in live]
                for t in live:
                    pair = net.pair(normed[t], layer, t + k)
                    (trunk[layer] if k == 0 else own.setdefault((layer, t), [])).append(pair)
                for t in live:
                    keys = [*trunk[layer][: t + 1], *own.get((layer, t), [])]
                    h = hidden[t] + net.attend(normed[t], layer, t + k, keys)
                    hidden[t] = net.mlp(h, layer)
            for t in live:
                hidden[t] = net.norm(hidden[t], "mtp.norm")
                if t + 2 + k < length and doc.mask[t + 2 + k]:
                    logq = (head @ hidden[t]).log_softmax(0)
                    losses[k] = losses[k] - share[k] * logq[doc.tokens[t + 2 + k]]
                    counts[k] += 1
    return losses, counts


def peagle(weights: Mapping[str, Tensor], o: Any, inputs: Any) -> tuple[Tensor, int]:
    """Sum of soft cross-entropies, and the number of supervised elements."""
    net, embed = Decoder(weights, o), inputs.embedding(inputs.tokens)
    mask = inputs.embedding(torch.tensor(o.mask_token_id))
    unknown = weights["fc.weight"] @ weights["mask_hidden"].flatten()
    total, count = embed.new_zeros(()), 0
    for doc in documents(inputs):
        elements = [
            (t, k)
            for t in range(len(doc.tokens))
            for k in range(o.num_depths)
            if t + 1 + k < len(doc.tokens)
            and (k == 0 or o.anchors_per_document is None or t in anchors_of(inputs, doc))
        ]
        state = {
            (t, k): weights["fc.weight"] @ doc.features[t] if k == 0 else unknown
            for t, k in elements
        }
        for number in range(o.num_hidden_layers):
            layer, u = f"layers.{number}", {}
            for t, k in elements:
                u[t, k] = net.norm(
                    state[t, k], f"{layer}.{'input_layernorm' if number else 'hidden_norm'}"
                )
                if number == 0:
                    token = embed[doc.start + t + 1] if k == 0 else mask
                    u[t, k] = torch.cat((net.norm(token, f"{layer}.input_layernorm"), u[t, k]))
            pairs = {(t, k): net.pair(u[t, k], layer, t + k) for t, k in elements}
            for t, k in elements:
                keys = [pairs[s, 0] for s in range(t + 1)] + [pairs[t, i] for i in range(1, k + 1)]
                h = state[t, k] + net.attend(u[t, k], layer, t + k, keys)
                state[t, k] = net.mlp(h, layer)
        for t, k in elements:
            if t + 2 + k < len(doc.tokens) and doc.mask[t + 2 + k]:
                logits = weights["lm_head.weight"] @ net.norm(state[t, k], "norm")
                total = total - (doc.law[t + 1 + k] * logits.log_softmax(0)).sum()
                count += 1
    return total, count


def block(
    weights: Mapping[str, Tensor], o: Any, inputs: Any, doc: Document, anchor: int
) -> list[Tensor]:
    """Normed states of the slots of one block; ``anchor`` counts in its document."""
    net, embed = Decoder(weights, o), inputs.embedding(inputs.tokens)
    mask = inputs.embedding(torch.tensor(o.mask_token_id))
    trunk = [net.norm(weights["fc.weight"] @ doc.features[s], "hidden_norm") for s in range(anchor)]
    slots = range(o.block_size)
    state = [embed[doc.start + anchor] if j == 0 else mask for j in slots]
    for number in range(o.num_hidden_layers):
        layer = f"layers.{number}"
        u = [net.norm(x, f"{layer}.input_layernorm") for x in state]
        sliding = o.layer_types is not None and o.layer_types[number] == "sliding_attention"
        first = max(0, anchor - o.sliding_window) if sliding else 0
        keys = [net.pair(c, layer, s) for s, c in enumerate(trunk) if s >= first]
        keys += [net.pair(x, layer, anchor + j) for j, x in enumerate(u)]
        state = [
            net.mlp(state[j] + net.attend(u[j], layer, anchor + j, keys), layer) for j in slots
        ]
    return [net.norm(x, "norm") for x in state]


def dflash(
    weights: Mapping[str, Tensor], o: Any, inputs: Any, known: list[int] | None = None
) -> tuple[Tensor, float]:
    """Weighted sum of cross-entropies, and the sum of weights; ``known``: ids of a reduced vocabulary."""
    head = weights.get("lm_head.weight", inputs.teacher.weight)
    known = list(range(len(head))) if known is None else known
    total, count = head.new_zeros(()), 0.0
    for doc in documents(inputs):
        for anchor in anchors_of(inputs, doc):
            states = block(weights, o, inputs, doc, anchor)
            first = 0 if o.sample_from_anchor else 1
            for j in range(first, o.block_size):
                label = anchor + j + 1 - first
                if label < len(doc.tokens) and doc.mask[label]:
                    weight = math.exp(-(j - first) / o.loss_decay_gamma)
                    logq = (head @ states[j]).log_softmax(0)
                    count += weight
                    if o.loss_type == "kl":
                        law = doc.law[label - 1]
                        p = law[known] / law[known].sum()
                        if int(law.argmax()) in known or not o.skip_unknown:
                            total = total + weight * (p * (p.log() - logq)).sum()
                    elif doc.tokens[label] in known:
                        total = total - weight * logq[known.index(doc.tokens[label])]
    return total, count


def dspark(
    weights: Mapping[str, Tensor], o: Any, inputs: Any, known: list[int] | None = None
) -> tuple[Tensor, float, float]:
    """Weighted sum of the three losses, the sum of weights, and that of acceptance."""
    head = weights.get("lm_head.weight", inputs.teacher.weight)
    known = list(range(len(head))) if known is None else known
    w1, w2 = (weights[f"markov_head.markov_{n}.weight"] for n in ("w1", "w2"))
    proj, bias = (weights[f"confidence_head.proj.{n}"] for n in ("weight", "bias"))
    total, count, accepted = head.new_zeros(()), 0.0, 0.0
    for doc in documents(inputs):
        for anchor in anchors_of(inputs, doc):
            states = block(weights, o, inputs, doc, anchor)
            first, state = 0 if o.sample_from_anchor else 1, torch.zeros(o.markov_rank).to(head)
            for j in range(first, o.block_size):
                label = anchor + j + 1 - first
                if label >= len(doc.tokens) or not doc.mask[label]:
                    break
                weight = math.exp(-(j - first) / o.loss_decay_gamma)
                previous = w1[doc.tokens[label - 1]]
                latent, state = markov(weights, o.markov_head_type, states[j], previous, state)
                logq = (head @ states[j] + w2 @ latent).log_softmax(0)
                p = doc.law[label - 1][known]
                chance = float(torch.minimum(logq.exp(), p).sum().detach())
                unseen = 0.0 if o.teacher_law == "draft" else 1 - p.sum()
                p = p / p.sum() if o.teacher_law == "draft" else p
                l1 = (logq.exp() - p).abs().sum() + unseen
                wanted = 1 - float(l1.detach()) / 2
                ce = -logq[known.index(label_id)] if (label_id := doc.tokens[label]) in known else 0
                logit = (proj @ torch.cat((states[j], previous)) + bias)[0]
                bce = -wanted * logit.sigmoid().log() - (1 - wanted) * (-logit).sigmoid().log()
                total = total + weight * (0.9 * l1 + 0.1 * ce + bce)
                count, accepted = count + weight, accepted + weight * chance
    return total, count, accepted


def markov(
    weights: Mapping[str, Tensor], kind: str, hidden: Tensor, previous: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Give what w2 reads at one slot, and the recurrent state behind it."""

    def linear(name: str, *parts: Tensor) -> Tensor:
        where = f"markov_head.{name}"
        return weights[f"{where}.weight"] @ torch.cat(parts) + weights[f"{where}.bias"]

    if kind == "gated":
        return linear("gate_proj", hidden, previous).sigmoid() * previous, state
    if kind == "rnn":
        g, c, out = linear("joint_proj", state, previous, hidden).chunk(3)
        return out.tanh(), g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
    return previous, state


def anchors_of(inputs: Any, doc: Document) -> list[int]:
    inside = [a - doc.start for a in inputs.anchors.tolist() if a >= 0]
    return [a for a in inside if 0 <= a < len(doc.tokens)]
