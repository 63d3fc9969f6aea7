"""Weights out of and into a model whose parameters lie on several pipeline ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.errors import ChannelError, ConfigError
from spec_compile.ir.public_names import checkpoint_of, public_name

from .fabric import Fabric

STEP, RANDOM = "step", "random_state"
COLLECTIVE = (
    "export_weights is collective: exhaust it on every rank, also where the tensors are not used (call it before "
    "`if rank == 0`, not inside)"
)
MOST_LISTED = 8
"""Names in a message."""


def export_weights(
    module: nn.Module, owners: Mapping[str, tuple[int, ...]], pp: Fabric, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a module's checkpoint under its public name, the same on every rank.

    The owning rank sends each parameter to the other ranks of its pipeline, so every rank must
    exhaust the iterator. Aliases of a tied parameter come under each of their names.

    Raises:
        ChannelError: a rank did not come, or died.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    parameters = {public_name(name): parameter for name, parameter in named.items()}
    owners = {public_name(name): ranks for name, ranks in owners.items()}
    sent: dict[int, Tensor] = {}
    for name, value in checkpoint_of(module).items():
        if name not in parameters:
            yield name, _cast(value, dtype)
            continue
        parameter = parameters[name]
        if id(parameter) not in sent:
            try:
                sent[id(parameter)] = _from_owner(parameter, owners[name], pp)
            except ChannelError as error:
                raise ChannelError(f"{error}; {COLLECTIVE}") from error
        yield name, _cast(sent[id(parameter)], dtype)
        if not _has_alias(parameters, name):
            del sent[id(parameter)]


def _has_alias(parameters: Mapping[str, nn.Parameter], name: str) -> bool:
    return any(n != name and p is parameters[name] for n, p in parameters.items())


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    value = value.detach()
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _from_owner(parameter: nn.Parameter, owners: tuple[int, ...], pp: Fabric) -> Tensor:
    source = owners[0]
    if pp.rank == source:
        value = parameter.detach()
        for rank in range(pp.size):
            if rank not in owners:
                pp.send(value.contiguous(), rank)
        pp.flush()
        return value
    if pp.rank in owners:
        return parameter.detach()
    return pp.recv(tuple(parameter.shape), parameter.dtype, source)


@dataclass(frozen=True)
class Checkpoint:
    """What one rank saves and loads: its parameters under global names, the step, and the random state.

    Ranks that hold the same parameter give it the same name, so a distributed checkpoint saves it once. So does
    the random state: the library draws from seeds and counters alone, and torch's own generator of the host is
    saved for the loop around it. A distributed checkpoint therefore restores one rank's on all ranks, and loads
    on any number of them.
    """

    owned: dict[str, nn.Parameter]
    """This rank's."""
    known: frozenset[str]
    """Names of all ranks' parameters."""

    @classmethod
    def of(
        cls, modules: Mapping[str, tuple[nn.Module, Mapping[str, tuple[int, ...]]]], rank: int
    ) -> Checkpoint:
        """Collect the parameters of one pp rank.

        Args:
            modules: prefix -> (module, owning pp ranks by name).
            rank: this rank's index in its pipeline.
        """
        named = {
            f"{prefix}.{public_name(name)}": (parameter, rank in owners[name])
            for prefix, (module, owners) in modules.items()
            for name, parameter in module.named_parameters()
        }
        owned = {name: parameter for name, (parameter, mine) in named.items() if mine}
        return cls(owned, frozenset(named))

    def state_dict(self, step: int) -> dict[str, Any]:
        """Plain tensors only; parameters are not copied."""
        state: dict[str, Any] = {name: p.detach() for name, p in self.owned.items()}
        return state | {STEP: torch.tensor(step), RANDOM: torch.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Copy a `state_dict` into the parameters and the random state; returns the step.

        Entries of other ranks may be there too. Everything is checked before anything changes.

        Raises:
            ConfigError: an entry of this rank is missing, is unknown, or has another shape.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"load_state_dict needs a mapping, as state_dict() gives, found {type(state).__name__}"
            )
        wanted = {name: tuple(parameter.shape) for name, parameter in self.owned.items()}
        wanted |= {STEP: (), RANDOM: tuple(torch.get_rng_state().shape)}
        problems = _listed("lacks", [name for name in wanted if name not in state])
        problems += _listed(
            "has unknown entries", [str(n) for n in state if n not in self.known | {STEP, RANDOM}]
        )
        for name in wanted.keys() & state.keys():
            value = state[name]
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if shape != wanted[name]:
                problems.append(f"{name!r} is {shape}, expected a tensor of shape {wanted[name]}")
        if problems:
            raise ConfigError(
                f"the checkpoint does not fit this model: {'; '.join(problems)}. Give load_state_dict what "
                "state_dict() of a model of the same target and draft gave"
            )
        with torch.no_grad():
            for name, parameter in self.owned.items():
                parameter.copy_(state[name])
        torch.set_rng_state(state[RANDOM].to("cpu", torch.uint8))
        return int(state[STEP])


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return [f"it {what} {', '.join(repr(name) for name in names[:MOST_LISTED])}{more}"]
