"""The opening of a call: one small all-gather in which ranks agree on batch, arguments and counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from spec_compile.batch import PackedBatch
from spec_compile.checked_batch import CheckedBatch, check_batch, digest
from spec_compile.errors import BatchError, ConfigError, SpecCompileError
from spec_compile.plan import Plan

from .anchors import AnchorRule
from .arguments import checked_arguments
from .failure import SharedFailure
from .layout import num_micro_batches_for
from .micro_batch import count_inputs
from .trained_flags import TrainedFlags, digests, listed
from .world import World


@dataclass(frozen=True)
class Agreement:
    """What all ranks know once they have met."""

    batches: list[CheckedBatch]
    """This rank's own, as many as it was given."""
    arguments: dict[str, Any]
    """Checked, numbers as floats."""
    valid_tokens: int
    """Tokens in the policy loss over all dp ranks and batches."""
    draft_count: Tensor | None
    """Rows in the draft loss over all dp ranks and batches, [] or [G] float64; None when not known from ids."""
    num_micro_batches: int

    def policy_divisor(self) -> float:
        """What the policy's sums are divided by; 0 only where there is nothing to divide.

        Raises:
            SharedFailure: on every rank, when the ``denominator`` is 0 and the batch has valid tokens.
        """
        given = self.arguments["denominator"]
        if given is None:
            return float(self.valid_tokens)
        if given == 0 and self.valid_tokens and self.arguments["policy_loss"]:
            raise SharedFailure(_division("denominator", f"{self.valid_tokens} valid tokens"))
        return float(given)

    def draft_divisor(self) -> Tensor | None:
        """What the draft's sums are divided by, [] or [G] float64; None: counts that the step finds out.

        Raises:
            SharedFailure: on every rank, when a ``draft_denominator`` is 0 and its count is not.
        """
        given = self.arguments["draft_denominator"]
        if given is None:
            return self.draft_count
        divisor = torch.tensor(given, dtype=torch.float64)
        unknown = self.draft_count is None
        counted = torch.ones_like(divisor) if self.draft_count is None else self.draft_count
        if bool(((divisor == 0) & (counted > 0)).any()):
            found = "counts that depend on activations" if unknown else f"counts {counted.tolist()}"
            raise SharedFailure(_division("draft_denominator", found))
        return divisor


def _division(name: str, found: str) -> ConfigError:
    return ConfigError(
        f"{name} is 0, but the batch has {found}: expected at least as many, from counts() of all batches that "
        "accumulate, or None for this batch's own"
    )


class Entry:
    """Meets the other ranks at the start of every call."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        vocab_size: int,
        count: GraphModule | None,
        draft_steps: int | None,
        anchors: AnchorRule | None = None,
    ) -> None:
        self._world, self._plan, self._vocab_size, self._count = world, plan, vocab_size, count
        self._draft_steps, self._anchors = draft_steps, anchors

    def meet(
        self,
        call: str,
        batches: Sequence[PackedBatch],
        arguments: dict[str, Any],
        refusal: SpecCompileError | None = None,
        flags: TrainedFlags | None = None,
    ) -> Agreement:
        """Check batches and arguments on every rank at once.

        Args:
            call: name of the call.
            batches: this rank's.
            arguments: equal on all ranks.
            refusal: why this rank cannot take the call at all.
            flags: of a call that trains; ranks that share parameters must have frozen the same ones.

        Raises:
            SharedFailure: of a BatchError on every rank, when one rank's batch is malformed or ranks disagree; of
                a ConfigError on ranks with an argument that is not allowed, while the others get a BatchError.
            ChannelError: a peer died, or is later than ``entry_timeout_s``.
        """
        checked: list[CheckedBatch] = []
        agreed: dict[str, Any] = {}

        def describe() -> dict[str, Any]:
            if refusal is not None:
                raise refusal
            agreed.update(checked_arguments(arguments, self._draft_steps))
            checked.extend(check_batch(self._on_device(b), self._vocab_size) for b in batches)
            return self._describe(checked, agreed) | {"frozen": digests(frozen)}

        frozen = {} if flags is None else flags.frozen()
        replies = self.exchange(call, describe, BatchError)
        self._compare(replies)
        _compare_frozen(replies, frozen)
        firsts = _first_of_each_dp(replies)
        counts = [r["count"] for r in firsts]
        known = self._count is not None and all(c is not None for c in counts)
        return Agreement(
            batches=checked,
            arguments=agreed,
            valid_tokens=sum(r["valid"] for r in firsts),
            draft_count=torch.tensor(counts, dtype=torch.float64).sum(0) if known else None,
            num_micro_batches=max(r["micro_batches"] for r in firsts),
        )

    def exchange(
        self, call: str, describe: Callable[[], dict[str, Any]], refused: type[SpecCompileError]
    ) -> list[dict[str, Any]]:
        """Give every rank what ``describe`` returns on each, in the one message that opens a call.

        Args:
            call: name of the call, the same on all ranks.
            describe: reads what the user gave; its errors are about that.
            refused: what a rank raises on account of another.

        Raises:
            SharedFailure: on every rank, when ``describe`` raised on one or ranks made different calls.
            ChannelError: a peer died, or is later than ``entry_timeout_s``.
        """
        own: Exception | None = None
        payload: dict[str, Any] = {"call": call, "dp": self._world.coordinates.dp, "error": None}
        try:
            payload |= describe()
        except SpecCompileError as error:
            own = error
        except Exception as error:  # what is read here comes from the user: any error is about it
            own = refused(f"{call} cannot read what it was given: {type(error).__name__}: {error}")
            own.__cause__ = error
        if own is not None:
            payload["error"] = str(own)
        replies = self._world.control.all_gather(payload, deadline_s=self._plan.entry_timeout_s)
        if own is not None:
            raise SharedFailure(own)
        me = self._world.rank
        for rank, reply in enumerate(replies):
            if reply["error"] is not None:
                raise SharedFailure(refused(f"rank {rank}: {reply['error']}"))
        for rank, reply in enumerate(replies):
            if reply["call"] != call:
                text = f"rank {rank} called {reply['call']} while rank {me} called {call}"
                raise SharedFailure(refused(f"{text}; all ranks make the same calls in one order"))
        return list(replies)

    def _on_device(self, batch: PackedBatch) -> PackedBatch:
        tokens = getattr(batch, "tokens", None)
        if isinstance(tokens, Tensor) and tokens.device != self._world.device:
            raise BatchError(
                f"the batch is on {tokens.device}, the model on {self._world.device}; move the batch's tensors"
            )
        return batch

    def _describe(
        self, checked: Sequence[CheckedBatch], arguments: dict[str, Any]
    ) -> dict[str, Any]:
        limit = self._plan.max_tokens_per_micro_batch
        needed = self._plan.micro_batches
        if limit is not None:
            needed = max((num_micro_batches_for(c.lengths, limit) for c in checked), default=1)
        return {
            "digest": [digest(c) for c in checked] if self._world.size > 1 else [],
            "arguments": json.dumps(arguments, sort_keys=True),
            "valid": sum(c.valid_tokens for c in checked),
            "count": self._draft_count(checked),
            "micro_batches": needed,
        }

    def _draft_count(self, checked: Sequence[CheckedBatch]) -> Any:
        """Run the draft's count on whole batches: it does not depend on how they are dealt."""
        if self._count is None:
            return None
        shape = () if self._draft_steps is None else (self._draft_steps,)
        total = torch.zeros(shape, dtype=torch.float64, device=self._world.device)
        for batch in checked:
            if not batch.num_tokens:  # nothing, not 0 / 0 where the count divides by T
                continue
            inputs = count_inputs(batch, self._anchors)
            one = torch.ones((), device=self._world.device)
            total = total + self._count(**inputs, temperature=one)[0].double()
        return total.tolist()

    def _compare(self, replies: Sequence[dict[str, Any]]) -> None:
        mine = replies[self._world.rank]
        for rank, reply in enumerate(replies):
            if reply["arguments"] != mine["arguments"]:
                raise SharedFailure(
                    BatchError(
                        f"ranks must be given the same arguments; rank {rank} has {reply['arguments']}, "
                        f"rank {self._world.rank} has {mine['arguments']}"
                    )
                )
        first: dict[int, tuple[int, Any]] = {}
        for rank, reply in enumerate(replies):
            other, expected = first.setdefault(reply["dp"], (rank, reply["digest"]))
            if reply["digest"] != expected:
                raise SharedFailure(
                    BatchError(
                        f"ranks {other} and {rank} share dp index {reply['dp']} and must be given the same batch; "
                        "theirs differ. Give each rank the batch of model.dp_rank"
                    )
                )


def _compare_frozen(replies: Sequence[dict[str, Any]], own: Mapping[str, Sequence[str]]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, reply in enumerate(replies):
        for group, found in reply["frozen"].items():
            other, expected = first.setdefault(group, (rank, found))
            if found != expected:
                names = [name for group in own.values() for name in group]
                raise SharedFailure(
                    ConfigError(
                        f"ranks {other} and {rank} share the trained parameters of {group}, and froze different ones "
                        f"since parallelize; this rank froze {listed(names) or 'none'}. Set requires_grad alike on "
                        "every rank"
                    )
                )


def _first_of_each_dp(replies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    seen: dict[int, dict[str, Any]] = {}
    for reply in replies:
        seen.setdefault(reply["dp"], reply)
    return [seen[dp] for dp in sorted(seen)]
