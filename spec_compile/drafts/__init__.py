"""Draft models as plain modules that obey the draft contract and read like their papers."""

from .dflash import DFlash
from .dflash_config import DFlashConfig, DSparkConfig
from .dspark import DSpark
from .eagle3 import Eagle3
from .eagle3_config import Eagle3Config
from .mtp import MTP, MTPConfig
from .peagle import PEagle, PEagleConfig

__all__ = [
    "MTP",
    "DFlash",
    "DFlashConfig",
    "DSpark",
    "DSparkConfig",
    "Eagle3",
    "Eagle3Config",
    "MTPConfig",
    "PEagle",
    "PEagleConfig",
]
