"""How many tokens to draft: the number with the most expected tokens a second, 0 included."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

REMEMBERED = 9
"""Times whose median stands for a size: one slow call changes nothing."""
PROBE_ROUNDS = 64
"""Rounds without a draft after which one drafts, so that speculation can come back."""
DECAY = 0.995
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.6, 4.0


class Timing:
    """Seconds of a call by its number of rows, between and beyond the sizes that were seen."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """Remember one call."""
        self._seen.setdefault(_bucket(rows), deque(maxlen=REMEMBERED)).append(seconds)

    def predict(self, rows: int) -> float | None:
        """Seconds of a call; None when none was seen."""
        sizes = sorted(self._seen)
        if not sizes:
            return None
        times = [median(self._seen[size]) for size in sizes]
        at = bisect_left(sizes, rows)
        if 0 < at < len(sizes):
            left, right = at - 1, at
        elif len(sizes) > 1:
            left, right = (0, 1) if at == 0 else (len(sizes) - 2, len(sizes) - 1)
        else:
            return times[0] * max(1.0, rows / sizes[0])
        slope = (times[right] - times[left]) / (sizes[right] - sizes[left])
        edge = right if at >= len(sizes) else left
        if not 0 < at < len(sizes):
            slope = min(max(slope, 0.0), times[edge] / sizes[edge])
        return times[edge] + slope * (rows - sizes[edge])


def _bucket(rows: int) -> int:
    """Round to four leading bits."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return max(round(rows / step) * step, 1)


class DraftLength:
    """Chooses the number of drafted tokens of each round from what the last rounds took and gave."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.break_even = 1.0
        """Acceptance length above which drafting (the best number >= 1) beats not drafting."""
        self._feed, self._chain, self._verify = Timing(), Timing(), Timing()
        self._kept = [PRIOR_ACCEPTANCE * PRIOR_WEIGHT] * max_tokens
        self._judged = [PRIOR_WEIGHT] * max_tokens
        self._warm_up = deque(k for k in (max_tokens, 0, max_tokens, 0) if max_tokens)
        self._rounds_without = 0

    def choose(self, num_sequences: int) -> int:
        """Give the number for the next round of this many sequences."""
        if self._warm_up:
            return self._warm_up.popleft()
        lengths = self._expected_lengths()
        seconds = [self._seconds(k, num_sequences, lengths[k]) for k in range(self.max_tokens + 1)]
        rates = [length / time for length, time in zip(lengths, seconds, strict=True)]
        drafting = max(range(1, self.max_tokens + 1), key=rates.__getitem__, default=0)
        if not drafting:
            return 0
        self.break_even = seconds[drafting] / seconds[0]
        if rates[drafting] > rates[0] or self._rounds_without >= PROBE_ROUNDS:
            self._rounds_without = 0
            return drafting
        self._rounds_without += 1
        return 0

    def observe_draft(self, fed_rows: int, feed_seconds: float) -> None:
        """Remember what the trunk rows and the first drafted token took."""
        self._feed.observe(fed_rows, feed_seconds)

    def observe_chain(self, num_sequences: int, seconds: float) -> None:
        """Remember what one further drafted token of each sequence took."""
        self._chain.observe(num_sequences, seconds)

    def observe_verify(self, rows: int, seconds: float) -> None:
        """Remember what the target took for this many rows, sampling included."""
        self._verify.observe(rows, seconds)

    def observe_kept(self, drafted: Sequence[int], kept: Sequence[int]) -> None:
        """Count drafted and kept tokens by position, of one round."""
        for j, (num_drafted, num_kept) in enumerate(zip(drafted, kept, strict=True)):
            judged = num_drafted if j == 0 else min(kept[j - 1], num_drafted)
            fade = DECAY**judged
            self._judged[j] = fade * self._judged[j] + judged
            self._kept[j] = fade * self._kept[j] + num_kept

    def _expected_lengths(self) -> list[float]:
        lengths, chance = [1.0], 1.0
        for kept, judged in zip(self._kept, self._judged, strict=True):
            chance *= kept / judged
            lengths.append(lengths[-1] + chance)
        return lengths

    def _seconds(self, k: int, num_sequences: int, length: float) -> float:
        verify = self._verify.predict(num_sequences * (k + 1)) or 1.0
        if k == 0:
            return verify
        feed = self._feed.predict(max(round(num_sequences * length), 1)) or 0.0
        return verify + feed + (k - 1) * (self._chain.predict(num_sequences) or 0.0)
