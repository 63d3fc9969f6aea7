"""A small GRPO runtime: advantages, loss, packing, and a trainer of one screen."""

from .advantages import group_advantages
from .exchange import Scored, generate, update_engine
from .loss import DapoLoss
from .packing import pack_rollouts
from .scoring import RewardFunction, Scorer
from .settings import Settings
from .trainer import Trainer

__all__ = [
    "DapoLoss",
    "RewardFunction",
    "Scored",
    "Scorer",
    "Settings",
    "Trainer",
    "generate",
    "group_advantages",
    "pack_rollouts",
    "update_engine",
]
