"""Draft models as plain modules that obey the draft contract and read like their papers."""

from .eagle3 import Eagle3
from .eagle3_config import Eagle3Config

__all__ = ["Eagle3", "Eagle3Config"]
