"""Two ways in which public files count the layers whose features a draft reads, and one way in between.

Here, as in transformers' ``hidden_states`` and in engines, tap ``i`` is the residual stream after ``i`` layers
(0: the embeddings). Files of block drafts name the layer whose output it is: ``i - 1`` (-1: the embeddings).
"""

from __future__ import annotations

from collections.abc import Iterable


def taps_of_outputs(layers: Iterable[int]) -> tuple[int, ...]:
    """Taps of layers counted by their outputs: output of layer ``j`` is tap ``j + 1``."""
    return tuple(int(layer) + 1 for layer in layers)


def outputs_of_taps(taps: Iterable[int]) -> list[int]:
    """Layers whose outputs the taps are: tap ``i`` is the output of layer ``i - 1``."""
    return [int(tap) - 1 for tap in taps]
