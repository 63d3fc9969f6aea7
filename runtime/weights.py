"""Weights out of and into a model whose parameters lie on several stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError

from .fabric import Fabric


def export_weights(
    module: nn.Module, owners: Mapping[str, tuple[int, ...]], pp: Fabric, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a module's checkpoint under its public name, the same on every rank.

    The owning stage sends each parameter to the other stages of its pipeline, so every rank must
    exhaust the iterator. Aliases of a tied parameter come under each of their names.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    sent: dict[int, Tensor] = {}
    for name in module.state_dict(keep_vars=True):
        if name not in parameters:
            yield name, _cast(module.state_dict()[name], dtype)
            continue
        parameter = parameters[name]
        if id(parameter) not in sent:
            sent[id(parameter)] = _from_owner(parameter, owners[name], pp)
        yield name, _cast(sent[id(parameter)], dtype)
        if not _has_alias(parameters, name):
            del sent[id(parameter)]


def _has_alias(parameters: Mapping[str, nn.Parameter], name: str) -> bool:
    return any(n != name and p is parameters[name] for n, p in parameters.items())


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    value = value.detach()
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _from_owner(parameter: nn.Parameter, stages: tuple[int, ...], pp: Fabric) -> Tensor:
    source = stages[0]
    if pp.rank == source:
        value = parameter.detach()
        for rank in range(pp.size):
            if rank not in stages:
                pp.send(value.contiguous(), rank)
        pp.flush()
        return value
    if pp.rank in stages:
        return parameter.detach()
    return pp.recv(tuple(parameter.shape), parameter.dtype, source)


def state_dict(
    target: nn.Module,
    draft: nn.Module | None,
    stage: int,
    owners: Mapping[str, tuple[int, ...]],
    draft_owners: Mapping[str, tuple[int, ...]],
    step: int,
    rank: int,
) -> dict[str, Any]:
    """This rank's tensors under global names, plus step and random state; plain tensors only.

    Ranks that hold the same parameter give it the same name, so a distributed checkpoint saves it once.
    """
    state: dict[str, Any] = {}
    for prefix, module, table in (("policy", target, owners), ("draft", draft, draft_owners)):
        if module is None:
            continue
        for name, parameter in module.named_parameters():
            if stage in table[name]:
                state[f"{prefix}.{name}"] = parameter.detach()
    state["step"] = torch.tensor(step)
    state[f"rng.{rank}"] = torch.get_rng_state()
    return state


def load_state_dict(
    state: Mapping[str, Any],
    target: nn.Module,
    draft: nn.Module | None,
    stage: int,
    owners: Mapping[str, tuple[int, ...]],
    draft_owners: Mapping[str, tuple[int, ...]],
    rank: int,
) -> int:
    """Copy a `state_dict` into the owned parameters and the random state; returns the step.

    Raises:
        ConfigError: a tensor of this rank is missing, or has another shape.
    """
    with torch.no_grad():
        for prefix, module, table in (("policy", target, owners), ("draft", draft, draft_owners)):
            if module is None:
                continue
            for name, parameter in module.named_parameters():
                if stage not in table[name]:
                    continue
                key = f"{prefix}.{name}"
                if key not in state:
                    raise ConfigError(f"the checkpoint has no {key!r}, which this rank owns")
                if tuple(state[key].shape) != tuple(parameter.shape):
                    raise ConfigError(
                        f"checkpoint {key!r} has shape {tuple(state[key].shape)}, the model {tuple(parameter.shape)}"
                    )
                parameter.copy_(state[key])
    if f"rng.{rank}" in state:
        torch.set_rng_state(state[f"rng.{rank}"].to("cpu", torch.uint8))
    if "step" not in state:
        raise ConfigError("the checkpoint has no 'step'")
    return int(state["step"])
