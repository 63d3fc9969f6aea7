"""Draft training inside a Megatron-core run: taps leave its layers, its schedule stays as it is.

In: the model chunks of a rank and a plain draft. Out: a handle whose `step` goes around the call of
Megatron's own forward-backward function. Needs megatron-core 0.19 and its default order of ranks.
"""

from .attach import MegatronDraft, attach
from .chunks import describe
from .result import DraftResult

__all__ = ["DraftResult", "MegatronDraft", "attach", "describe"]
