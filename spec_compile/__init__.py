"""Compile a plain target model and a plain draft model into one sharded, pipelined training step.

Words: the *policy* is the target being trained; the *draft* proposes tokens; a *tap* is a residual
stream of the target that feeds the draft; a *branch* is what the draft itself produced beyond the
main (trunk) part of its attention; a *stage* is one pipeline part; a *shard* is one context-parallel
rank's rows; a *partial* is attention over some of the keys, joined by a *merge*.
"""

from . import drafts
from .api import Lowered, lower, parallelize
from .batch import PackedBatch
from .contract import DraftInputs, DraftOutput, TokenOutputs
from .errors import (
    BatchError,
    CaptureError,
    ChannelError,
    CodegenError,
    ConfigError,
    InvariantError,
    PassError,
    PlanError,
    SpecCompileError,
)
from .integrations import vllm_engine
from .ir.ops import branch_attention, shift, soft_cross_entropy
from .plan import Plan
from .runtime import grpo
from .runtime.model import ParallelModel
from .runtime.results import Evaluation, StepResult
from .runtime.rollout.engine import Engine
from .runtime.rollout.params import Rollout, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "CaptureError",
    "ChannelError",
    "CodegenError",
    "ConfigError",
    "DraftInputs",
    "DraftOutput",
    "Engine",
    "Evaluation",
    "InvariantError",
    "Lowered",
    "PackedBatch",
    "ParallelModel",
    "PassError",
    "Plan",
    "PlanError",
    "Rollout",
    "SamplingParams",
    "SpecCompileError",
    "StepResult",
    "TokenOutputs",
    "branch_attention",
    "drafts",
    "grpo",
    "lower",
    "parallelize",
    "shift",
    "soft_cross_entropy",
    "vllm_engine",
]
