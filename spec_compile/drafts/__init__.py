"""Draft models as plain modules that obey the draft contract and read like their papers."""

from .dflash import DFlash
from .dflash_config import DFlashConfig, DSparkConfig
from .dialects import outputs_of_taps, taps_of_outputs
from .draft_vocabulary import most_frequent
from .dspark import DSpark
from .eagle3 import Eagle3
from .eagle3_config import Eagle3Config
from .formats import load, save
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
    "load",
    "most_frequent",
    "outputs_of_taps",
    "save",
    "taps_of_outputs",
]
