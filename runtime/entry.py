"""The opening of a call: one small all-gather in which ranks agree on batch, arguments and counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from spec_compile.batch import CheckedBatch, PackedBatch, check_batch, digest
from spec_compile.errors import BatchError, SpecCompileError
from spec_compile.plan import Plan

from .arguments import checked_arguments
from .layout import num_micro_batches_for
from .micro_batch import make_micro_batch
from .world import World


@dataclass(frozen=True)
class Agreement:
    """What all ranks know once they have met."""

    batches: list[CheckedBatch]
    """This rank's own, as many as it was given."""
    valid_tokens: int
    """Tokens in the policy loss over all dp ranks and batches."""
    draft_count: Tensor | None
    """Rows in the draft loss over all dp ranks and batches, [] or [G] float64; None when not known from ids."""
    num_micro_batches: int


class Entry:
    """Meets the other ranks at the start of every call."""

    def __init__(
        self, world: World, plan: Plan, vocab_size: int, count: GraphModule | None
    ) -> None:
        self._world, self._plan, self._vocab_size, self._count = world, plan, vocab_size, count

    def meet(
        self, call: str, batches: Sequence[PackedBatch], arguments: dict[str, Any]
    ) -> Agreement:
        """Check batches and arguments on every rank at once.

        Raises:
            BatchError: on every rank, when one rank's batch is malformed, or ranks disagree.
            ConfigError: an argument of this rank is not allowed; ranks with allowed ones get a BatchError.
            ChannelError: a peer died, or is later than ``entry_timeout_s``.
        """
        own: BaseException | None = None
        checked: list[CheckedBatch] = []
        payload: dict[str, Any] = {"call": call, "dp": self._world.coordinates.dp, "error": None}
        try:
            checked = [self._to_device(check_batch(batch, self._vocab_size)) for batch in batches]
            payload |= self._describe(checked, checked_arguments(arguments))
        except SpecCompileError as error:
            own = error
            payload["error"] = str(error)
        except (
            Exception
        ) as error:  # arguments and batches come from the user: any error is about them
            own = BatchError(f"the batch cannot be read: {type(error).__name__}: {error}")
            own.__cause__ = error
            payload["error"] = str(own)
        replies = self._world.control.all_gather(payload, deadline_s=self._plan.entry_timeout_s)
        if own is not None:
            raise own
        self._compare(replies)
        firsts = _first_of_each_dp(replies)
        counts = [r["count"] for r in firsts]
        known = self._count is not None and all(c is not None for c in counts)
        return Agreement(
            batches=checked,
            valid_tokens=sum(r["valid"] for r in firsts),
            draft_count=torch.tensor(counts, dtype=torch.float64).sum(0) if known else None,
            num_micro_batches=max(r["micro_batches"] for r in firsts),
        )

    def _to_device(self, checked: CheckedBatch) -> CheckedBatch:
        if checked.tokens.device != self._world.device:
            raise BatchError(
                f"the batch is on {checked.tokens.device}, the model on {self._world.device}; move the batch's tensors"
            )
        return checked

    def _describe(
        self, checked: Sequence[CheckedBatch], arguments: dict[str, Any]
    ) -> dict[str, Any]:
        limit = self._plan.max_tokens_per_micro_batch
        needed = self._plan.micro_batches
        if limit is not None:
            needed = max((num_micro_batches_for(c.lengths, limit) for c in checked), default=1)
        text = json.dumps(arguments, sort_keys=True)
        return {
            "digest": [digest(c) for c in checked],
            "arguments": text,
            "hash": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
            "valid": sum(c.valid_tokens for c in checked),
            "count": self._draft_count(checked),
            "micro_batches": needed,
        }

    def _draft_count(self, checked: Sequence[CheckedBatch]) -> Any:
        """Run the draft's count on whole batches: it does not depend on how they are dealt."""
        if self._count is None:
            return None
        total: Tensor | None = None
        for batch in checked:
            inputs = make_micro_batch(batch, 1).inputs
            one = torch.ones((), device=batch.tokens.device)
            value = self._count(**inputs, temperature=one)[0].double()
            total = value if total is None else total + value
        return None if total is None else total.tolist()

    def _compare(self, replies: Sequence[dict[str, Any]]) -> None:
        for rank, reply in enumerate(replies):
            if reply["error"] is not None:
                raise BatchError(f"rank {rank}: {reply['error']}")
        mine = replies[self._world.rank]
        for rank, reply in enumerate(replies):
            if reply["call"] != mine["call"]:
                raise BatchError(
                    f"rank {rank} called {reply['call']} while rank {self._world.rank} called {mine['call']}"
                )
            if reply["hash"] != mine["hash"]:
                raise BatchError(
                    f"ranks must be given the same arguments; rank {rank} has {reply['arguments']}, "
                    f"rank {self._world.rank} has {mine['arguments']}"
                )
        first: dict[int, tuple[int, Any]] = {}
        for rank, reply in enumerate(replies):
            other, expected = first.setdefault(reply["dp"], (rank, reply["digest"]))
            if reply["digest"] != expected:
                raise BatchError(
                    f"ranks {other} and {rank} share dp index {reply['dp']} and must be given the same batch; theirs "
                    "differ. Give each rank the batch of model.dp_rank"
                )


def _first_of_each_dp(replies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    seen: dict[int, dict[str, Any]] = {}
    for reply in replies:
        seen.setdefault(reply["dp"], reply)
    return [seen[dp] for dp in sorted(seen)]
