"""One rank's part of the models: its parameters, their weights out and in, and the end of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError

from . import weights
from .arguments import check_options
from .binding import (
    LoweredStep,
    anchor_rule,
    draft_steps,
    owned_parameters,
    ownership,
    rank_graphs,
    release_others,
    vocab_size,
)
from .calls import Caller
from .entry import Entry
from .failure import SharedFailure
from .gradients import GradientLedger
from .modes import own_modes
from .timeline import Recorder, Span, recording
from .timeline_picture import picture
from .trained_flags import TrainedFlags
from .world import World, coordinates


class BoundModel:
    """A target and a draft on one rank: what it owns, without the calls that train it."""

    def __init__(
        self, lowered: LoweredStep, world: World, target: nn.Module, draft: nn.Module | None
    ) -> None:
        self.lowered = lowered
        self.plan = lowered.plan
        self.target, self.draft = target, draft
        self._world = world
        rank = world.coordinates.pp
        self._owners = ownership(lowered, target, draft)
        self._owned = owned_parameters(self._owners, target, draft, rank)
        self._ledger = GradientLedger(self._owned, world.fabrics)
        self._caller = Caller(lowered, world, rank_graphs(lowered, rank), self._owned.draft)
        count = lowered.programs.count
        self._entry = Entry(
            world, self.plan, vocab_size(target), count, draft_steps(lowered), anchor_rule(lowered)
        )
        # last: modules that could not be bound keep their weights
        release_others(self._owners, target, draft, lowered, rank)
        self._flags = TrainedFlags.bind(
            {"policy": target, "draft": draft}, vars(self._owners), rank
        )
        self._steps = 0
        self._closed = self._calling = False

    @property
    def dp_rank(self) -> int:
        """Which of the global batch's parts this rank is to be given."""
        return self._world.coordinates.dp

    @property
    def dp_size(self) -> int:
        """Number of parts of the global batch."""
        return self.plan.dp

    def param_groups(
        self,
        policy: Mapping[str, Any] | None = None,
        draft: Mapping[str, Any] | None = None,
        **unknown: Never,
    ) -> list[dict[str, Any]]:
        """Optimizer groups of this rank's parameters: the policy's, then the draft's when there is one.

        A rank whose stage holds no draft parameters gets an empty group, so that groups line up on all ranks.

        Args:
            policy: options of the policy's group, such as ``{"lr": 1e-6}``; None: the optimizer's own.
            draft: the same for the draft.
            unknown: refused.

        Raises:
            ConfigError: a group's options are no mapping, or belong to no group.
        """
        self._check_open()
        check_options({"policy": policy, "draft": draft}, unknown)
        groups = [{"params": self._owned.policy, **(policy or {}), "name": "policy"}]
        if self.draft is not None:
            groups.append({"params": self._owned.draft, **(draft or {}), "name": "draft"})
        return groups

    def export_weights(
        self, which: str, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (public checkpoint name, tensor) of "policy" or "draft"; exhaust it on every rank.

        Raises:
            ConfigError: there is no such model, or ``dtype`` is no torch.dtype.
        """
        self._check_open()
        module = {"policy": self.target, "draft": self.draft}.get(str(which))
        if module is None:
            choices = "'policy'" if self.draft is None else "'policy' or 'draft'"
            raise ConfigError(f"export_weights takes {choices}, found {which!r}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError(f"export_weights needs a torch.dtype or None, found {dtype!r}")
        owners = self._owners.policy if which == "policy" else self._owners.draft
        return weights.export_weights(module, owners, self._world.fabrics["pp"], dtype)

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors by global name, the step and the random state; no pickled objects.

        Gradients are no part of it, summed or not.
        """
        self._check_open()
        return self._checkpoint().state_dict(self._steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, into the same parameters.

        Raises:
            ConfigError: names the entries that are missing or unknown; nothing has changed then.
        """
        self._check_open()
        self._steps = self._checkpoint().load_state_dict(state)

    @contextlib.contextmanager
    def timeline(self, path: str | Path) -> Iterator[None]:
        """Record what runs inside on every rank, and let rank 0 draw it as an SVG file.

        Collective: all ranks enter and leave it together. Bands are compute, messages between stages,
        pushes of taps, and waits. The clocks of the ranks are set when they meet at the beginning.

        Args:
            path: The file, read on rank 0 only.
        """
        self._check_open()
        control = self._world.control
        control.all_gather("timeline", deadline_s=self.plan.entry_timeout_s)
        recorder = Recorder(self._world.device)
        with recording(recorder):
            yield
        told = control.all_gather(recorder.spans(), deadline_s=self.plan.timeout_s)
        if control.rank == 0:
            places = [coordinates(self.plan, rank) for rank in range(len(told))]
            names = [f"rank {r}: pp{c.pp} dp{c.dp} cp{c.cp}" for r, c in enumerate(places)]
            ranks = [[Span(*one) for one in spans] for spans in told]
            title = f"{self.plan.schedule}, plan {self.lowered.plan_hash}"
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(picture(title, ranks, names), encoding="utf-8")

    def close(self) -> None:
        """Free channels, threads and own groups; idempotent."""
        if not self._closed:
            self._closed = True
            self._caller.close()
            self._world.close()

    def _checkpoint(self) -> weights.Checkpoint:
        modules = {"policy": (self.target, self._owners.policy)}
        if self.draft is not None:
            modules["draft"] = (self.draft, self._owners.draft)
        return weights.Checkpoint.of(modules, self._world.coordinates.pp)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this model was closed; call parallelize again")

    @contextlib.contextmanager
    def _call(self, *, grad: bool | None = False) -> Iterator[None]:
        """Run a collective call in modes of its own, and tell all peers about an error they cannot know of."""
        self._check_open()
        if self._calling:
            raise ConfigError(
                "the model was called inside a call of its own (from a policy loss?); a policy loss reads rows alone: "
                "compute what it needs before, and pass it in the batch's fields"
            )
        self._world.control.check()
        shared: BaseException | None = None
        self._calling = True
        try:
            with own_modes(self._world.device, grad, deterministic=self.plan.deterministic):
                yield
        except SharedFailure as failure:
            shared = failure.error
        except BaseException as error:
            if self._world.device.type == "cuda" and isinstance(error, Exception):
                # after a failure devices go on with values that never came; what they break tells nothing
                self._world.control.check()
            self._world.control.fail(error)
            raise
        finally:
            self._calling = False
        if shared is not None:  # raised out here, it keeps the context that it had
            raise shared
