"""The decoding loop: admit prompts, draft, verify, retire what is finished.

Running sequences always fill the first slots, so that one call serves them all. Legend: B running
sequences, k drafted tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from spec_compile.errors import SpecCompileError

from .cache import PackedRows
from .draft_length import DraftLength
from .drafting import ServedDraft, Unread
from .sampling import RowParams
from .sequence import Sequence
from .serving import ServedTarget
from .speculation import Proposal, Verdict, propose, verify
from .stats import Stats

PREFILL_TOKENS = 4096
"""Prompt tokens of one call, unless a single prompt is longer."""
UNREAD_ROWS = 32
"""Rows that a draft that is not asked may be behind: read together they cost little."""


class DecodeLoop:
    """Runs sequences to their end, at most ``max_num_seqs`` at a time."""

    def __init__(
        self,
        target: ServedTarget,
        draft: ServedDraft | None,
        lengths: DraftLength,
        stats: Stats,
        *,
        max_num_seqs: int,
        max_model_len: int,
        min_confidence: float = 0.0,
    ) -> None:
        self._min_confidence = min_confidence
        self._target, self._draft, self._lengths, self._stats = target, draft, lengths, stats
        self._max_num_seqs, self._last_position = max_num_seqs, max_model_len - 1

    def run(self, sequences: Iterable[Sequence], num_drafted: int | None) -> None:
        """Complete all sequences, in place; ``num_drafted`` None chooses the number by cost."""
        waiting, running = deque(sequences), list[Sequence]()
        slots = min(len(waiting), self._max_num_seqs)
        for served in (self._target, self._draft):
            if served is not None:
                served.cache.reserve(slots, 1)
        while waiting or running:
            admitted = self._admit(waiting, running)
            if admitted:
                self._prefill(admitted)
            else:
                self._round(running, num_drafted)
            self._retire(running)

    def _admit(self, waiting: deque[Sequence], running: list[Sequence]) -> list[Sequence]:
        """Give free slots to waiting sequences, as far as one call should prefill."""
        admitted: list[Sequence] = []
        tokens, prompt = 0, -1
        while waiting and len(running) < self._max_num_seqs:
            new = waiting[0]
            tokens += 0 if new.prompt_index == prompt else len(new.prompt)
            if admitted and tokens > PREFILL_TOKENS:
                break
            prompt = new.prompt_index
            new.slot = len(running)
            running.append(new)
            admitted.append(waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[Sequence]) -> None:
        """Read each different prompt once, and draw the first token of each sequence."""
        first: dict[int, Sequence] = {}
        for one in admitted:
            first.setdefault(one.prompt_index, one)
        readers = list(first.values())
        counts = [len(one.prompt) for one in readers]
        device = self._target.device
        rows = PackedRows([one.slot for one in readers], [0] * len(readers), counts, device)
        ids = torch.tensor([token for one in readers for token in one.prompt], device=device)
        hidden, features = self._target.run(ids, rows, self._last_position)
        logits = self._target.logits(hidden[rows.last_rows])
        parts = dict(zip(first, features.split(counts), strict=True))
        place = {prompt: row for row, prompt in enumerate(first)}
        for one in admitted:
            reader = first[one.prompt_index]
            if one is not reader:
                self._target.cache.copy(reader.slot, one.slot, len(one.prompt))
            if self._draft is not None:
                one.unread = [parts[one.prompt_index]]
        of_each = torch.tensor([place[one.prompt_index] for one in admitted], device=device)
        verdict = self._verify(admitted, logits[of_each][:, None], None)
        for one, token, logprob in zip(
            admitted, verdict.tokens.tolist(), verdict.logprobs.tolist(), strict=True
        ):
            one.extend(token, logprob)
            self._stats.tokens += 1

    def _round(self, running: list[Sequence], num_drafted: int | None) -> None:
        """Draft, verify, and give each sequence its new tokens."""
        k = self._lengths.choose(len(running)) if num_drafted is None else num_drafted
        proposal = self._propose(running, k)
        started = self._now()
        device = self._target.device
        tokens = torch.tensor([[one.last_token] for one in running], device=device)
        if proposal is not None:
            tokens = torch.cat((tokens, proposal.tokens), 1)
        k = tokens.shape[1] - 1
        slots, starts = range(len(running)), [one.length - 1 for one in running]
        rows = PackedRows(slots, starts, [k + 1] * len(running), device)
        hidden, features = self._target.run(tokens.flatten(), rows, self._last_position)
        logits = self._target.logits(hidden).unflatten(0, (-1, k + 1))
        verdict = self._verify(running, logits, proposal)
        self._deal(running, proposal, verdict, features.unflatten(0, (-1, k + 1)))
        self._lengths.observe_verify(len(running) * (k + 1), self._now() - started)

    def _deal(
        self, running: list[Sequence], proposal: Proposal | None, verdict: Verdict, features: Tensor
    ) -> None:
        counts = [0] * len(running) if proposal is None else proposal.counts.tolist()
        k = verdict.tokens.shape[1] - 1
        drafted, accepted = [0] * k, [0] * k
        kept = verdict.kept.tolist()
        tokens, logprobs = verdict.tokens.tolist(), verdict.logprobs.tolist()
        for row, one in enumerate(running):
            for j in range(min(counts[row], one.remaining)):
                drafted[j] += 1
            end = kept[row] + 1
            taken = one.extend(tokens[row][:end], logprobs[row][:end])
            for j in range(min(kept[row], taken)):
                accepted[j] += 1
            if self._draft is not None:
                one.unread.append(features[row, :taken])
            self._stats.tokens += taken
        self._stats.count_round(len(running), drafted, accepted)
        self._lengths.observe_kept(drafted, accepted)

    def _propose(self, running: list[Sequence], k: int) -> Proposal | None:
        """Draft k tokens of each sequence; with k = 0 only keep the draft from falling far behind."""
        if self._draft is None:
            return None
        if k == 0:
            behind = [one for one in running if one.num_unread >= UNREAD_ROWS]
            if behind:
                self._draft.read(self._take_unread(behind))
            return None
        started, fed = self._now(), sum(one.num_unread for one in running)
        last = torch.tensor([one.last_token for one in running], device=self._target.device)
        drafting = self._draft.draft(self._take_unread(running), k)
        params = RowParams.of([one.params for one in running], self._target.device)
        keys = [one.key for one in running]
        positions = torch.tensor([one.length for one in running], device=self._target.device)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        sure = torch.ones_like(last, dtype=torch.bool)
        lengths = torch.zeros_like(last)
        for j in range(k):
            if self._min_confidence > 0:
                chance = drafting.confidence(last)
                sure = sure if chance is None else sure & (chance >= self._min_confidence)
            drawn, law = propose(drafting.logits(last), params, keys, positions + j)
            lengths += sure
            last = drawn
            tokens.append(drawn)
            if law is not None:
                laws.append(law)
            now = self._now()
            if j == 0:
                self._lengths.observe_draft(fed, now - started)
            else:
                self._lengths.observe_chain(len(running), now - started)
            started = now
        proposal = Proposal(torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None)
        self._check_draft(running, proposal)
        return proposal.cut(lengths) if self._min_confidence > 0 else proposal

    def _take_unread(self, sequences: list[Sequence]) -> Unread:
        """Hand the draft all rows that it has not read."""
        ids = [token for one in sequences for token in one.unread_tokens()]
        unread = Unread(
            [one.slot for one in sequences],
            [one.trunk_rows for one in sequences],
            torch.tensor(ids, device=self._target.device),
            [torch.cat(one.unread) if len(one.unread) > 1 else one.unread[0] for one in sequences],
        )
        for one in sequences:
            one.trunk_rows, one.unread = one.length - 1, []
        return unread

    def _verify(
        self, sequences: list[Sequence], logits: Tensor, proposal: Proposal | None
    ) -> Verdict:
        device = logits.device
        params = RowParams.of([one.params for one in sequences], device)
        first = torch.tensor([one.length for one in sequences], device=device)
        positions = first[:, None] + torch.arange(logits.shape[1], device=device)
        verdict = verify(logits, proposal, params, [one.key for one in sequences], positions)
        used = torch.arange(logits.shape[1], device=device) <= verdict.kept[:, None]
        bad = (~verdict.logprobs.isfinite() & used).nonzero()
        if len(bad):
            row, offset = bad[0].tolist()
            raise SpecCompileError(
                f"{_name(sequences[row])}, position {int(positions[row, offset])}: the target's logits are not "
                "finite; check the weights of the last update"
            )
        return verdict

    def _check_draft(self, running: list[Sequence], proposal: Proposal) -> None:
        if proposal.log_laws is None:
            return
        drawn = proposal.log_laws.gather(-1, proposal.tokens[..., None])[..., 0]
        bad = (~drawn.isfinite()).nonzero()
        if len(bad):
            row, offset = bad[0].tolist()
            raise SpecCompileError(
                f"{_name(running[row])}, position {running[row].length + offset}: the draft's logits are not finite; "
                "check its weights, or pass num_speculative_tokens=0"
            )

    def _retire(self, running: list[Sequence]) -> None:
        """Free the slots of finished sequences; the last ones move into the gaps."""
        for slot in reversed(range(len(running))):
            if running[slot].finish_reason is None:
                continue
            running[slot].unread = []
            last = running.pop()
            if last.slot != slot:
                self._target.cache.copy(last.slot, slot, last.length - 1)
                if self._draft is not None:
                    self._draft.cache.copy(last.slot, slot, last.trunk_rows)
                last.slot = slot
                running[slot] = last

    def _now(self) -> float:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return time.perf_counter()


def _name(one: Sequence) -> str:
    return f"prompt {one.prompt_index}, sample {one.sample_index}"
