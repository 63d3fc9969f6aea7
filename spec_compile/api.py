"""The two calls: lower for reading, parallelize for training."""

from __future__ import annotations

import hashlib
import logging

import torch
from torch import nn

from .errors import PlanError
from .lowering import Lowered, check_kinds, lower
from .plan import Plan
from .runtime.binding import ownership
from .runtime.control import SocketControl
from .runtime.model import ParallelModel
from .runtime.processes import join, open_world
from .runtime.solo import SoloControl
from .runtime.world import World

log = logging.getLogger(__name__)
SAMPLED = 8
"""Elements at either end of a parameter that ranks compare at the start."""

__all__ = ["Lowered", "lower", "parallelize"]


def parallelize(target: nn.Module, draft: nn.Module | None, plan: Plan) -> ParallelModel:
    """Lower a plain target and draft, and bind them to this rank.

    Run it under torchrun, or in one process when ``plan.world_size == 1``. Parameters of other stages
    move to the meta device, so build optimizers afterwards.

    Args:
        target: transformers causal language model with real weights, the same on every rank.
        draft: module of the draft contract, or None.
        plan: sizes, schedule and numerics, the same on every rank.

    Raises:
        PlanError: models and plan do not fit, the world has another size, or ranks have other plans.
        CaptureError: a model cannot be traced.
        ConfigError: an argument is of a wrong type, the draft has active dropout, or was made for another target.
        ChannelError: a rank died or did not come.
    """
    control = _join(plan)
    try:
        lowered = _agree(target, draft, plan, control)
        model = _bind(lowered, control, target, draft)
    except BaseException:
        control.close()
        raise
    log.info(
        "spec_compile: bound rank %d of %d, plan %s", control.rank, control.size, lowered.plan_hash
    )
    return model


def _join(plan: Plan) -> SoloControl | SocketControl:
    """Meet the other ranks, with the waits of a default plan when this is none: they are to hear of it."""
    known = plan if isinstance(plan, Plan) else Plan()
    return join(known.world_size, timeout_s=known.timeout_s, deadline_s=known.entry_timeout_s)


def _bind(
    lowered: Lowered,
    control: SoloControl | SocketControl,
    target: nn.Module,
    draft: nn.Module | None,
) -> ParallelModel:
    """Connect this rank; one that cannot tells the others, which wait for it."""
    world: World | None = None
    try:
        world = open_world(control, lowered.plan, next(target.parameters()).device)
        return ParallelModel(lowered, world, target, draft)
    except BaseException as error:
        control.fail(error)
        if world is not None:
            world.close()
        raise


def _agree(
    target: nn.Module, draft: nn.Module | None, plan: Plan, control: SoloControl | SocketControl
) -> Lowered:
    """Lower, and compare the outcome with all ranks: a rank that cannot, or differs, ends all of them."""
    lowered: Lowered | None = None
    own: BaseException | None = None
    payload: dict[str, str] = {"plan": "", "hash": "", "weights": "", "error": ""}
    deadline_s = plan.entry_timeout_s if isinstance(plan, Plan) else Plan().entry_timeout_s
    try:
        check_kinds(target, draft, plan)
        payload["plan"] = plan.text()
        if control.size != plan.world_size:
            raise PlanError(
                f"the plan needs dp * cp * pp = {plan.dp} * {plan.cp} * {plan.pp} = {plan.world_size} ranks, "
                f"{control.size} were started; change the plan or start as many processes (torchrun --nproc-per-node)"
            )
        _check_weights(target, draft)
        lowered = lower(target, draft, plan)
        ownership(lowered, target, draft)
        payload["hash"] = lowered.plan_hash
        payload["weights"] = weights_digest(target, draft)
    except Exception as error:
        own = error
        payload["error"] = f"{type(error).__name__}: {error}"
    replies = control.all_gather(payload, deadline_s=deadline_s)
    if own is not None:
        raise own
    assert lowered is not None
    for rank, reply in enumerate(replies):
        if reply["error"]:
            raise PlanError(f"rank {rank} could not be bound: {reply['error']}")
        if reply["plan"] != plan.text():
            raise PlanError(
                f"all ranks need the same plan; rank {rank} has {reply['plan']}, rank {control.rank} {plan.text()}"
            )
        if reply["hash"] != lowered.plan_hash:
            raise PlanError(
                f"ranks {rank} and {control.rank} lowered different graphs from the same plan: their target or draft "
                "differ (class, sizes or configuration)"
            )
        if reply["weights"] != payload["weights"]:
            raise PlanError(
                f"ranks {rank} and {control.rank} start with different weights or requires_grad flags; load, seed and "
                "freeze target and draft alike on every rank"
            )
    return lowered


def weights_digest(*modules: nn.Module | None) -> str:
    """Hash flag and a few elements of every parameter: another seed or checkpoint differs in all of them."""
    hasher = hashlib.blake2b(digest_size=12)
    for module in modules:
        for name, parameter in module.named_parameters() if module is not None else ():
            flat = parameter.detach().reshape(-1)
            sample = torch.cat([flat[:SAMPLED], flat[-SAMPLED:]]).double().cpu()
            hasher.update(f"{name} {parameter.requires_grad}".encode() + sample.numpy().tobytes())
    return hasher.hexdigest()


def _check_weights(target: nn.Module, draft: nn.Module | None) -> None:
    for module in (target, draft):
        for name, parameter in module.named_parameters() if module is not None else ():
            if parameter.device.type == "meta":
                raise PlanError(
                    f"{type(module).__name__}.{name} is on the meta device; parallelize needs real weights "
                    "(lower works without). A model once bound with pp > 1 lost other stages' weights: load it again"
                )
