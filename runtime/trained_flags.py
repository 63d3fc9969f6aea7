"""Which parameters were trained when a model was bound: whoever freezes or unfreezes one later is heard of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from spec_compile.errors import ConfigError

MOST_NAMES = 5
"""Parameters that an error names one by one."""


@dataclass(frozen=True)
class TrainedFlags:
    """Parameters of one rank's models by ``requires_grad`` as it was at `bind`.

    A parameter frozen later gets no gradient, as on one device. One unfrozen later is in no group of
    an optimizer, and its gradient would not be summed over ranks.
    """

    kept: Mapping[str, nn.Parameter]
    """Not trained, those on other stages too: scripts treat them alike on every rank."""
    trained: Mapping[str, Mapping[str, nn.Parameter]]
    """Trained here, by the ranks that must agree on them: "stage 1", "tied"."""

    @classmethod
    def bind(
        cls,
        modules: Mapping[str, nn.Module | None],
        owners: Mapping[str, Mapping[str, tuple[int, ...]]],
        rank: int,
    ) -> TrainedFlags:
        """Read the flags of "policy" and "draft", bound to pp rank ``rank``."""
        kept: dict[str, nn.Parameter] = {}
        trained: dict[str, dict[str, nn.Parameter]] = {}
        for which, module in modules.items():
            for name, parameter in module.named_parameters() if module is not None else ():
                ranks, title = owners[which][name], f"{which}.{name}"
                if not parameter.requires_grad:
                    kept[title] = parameter
                elif rank in ranks:
                    group = f"stage {rank}" if len(ranks) == 1 else "tied"
                    trained.setdefault(group, {})[title] = parameter
        return cls(kept, trained)

    def refusal(self, call: str) -> ConfigError | None:
        """The error of a call that would train without a parameter unfrozen since; None when there is none."""
        found = [name for name, parameter in self.kept.items() if parameter.requires_grad]
        if not found:
            return None
        return ConfigError(
            f"{call} found {listed(found)} with requires_grad=True, frozen when parallelize was called: no optimizer "
            "group holds them and no rank sums their gradients. Call parallelize again with the new flags, and build "
            "the optimizer from its param_groups(); or set requires_grad_(False)"
        )

    def frozen(self) -> dict[str, list[str]]:
        """Names of parameters frozen since, by the ranks that must agree on them."""
        return {
            group: [name for name, parameter in members.items() if not parameter.requires_grad]
            for group, members in self.trained.items()
        }


def digests(frozen: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Shorten the names for a small message; equal ones stay equal."""
    return {
        group: hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
        for group, names in frozen.items()
    }


def listed(names: Sequence[str]) -> str:
    """The first names, and how many follow."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
