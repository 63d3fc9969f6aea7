"""One direction between two ranks: the sender copies straight into memory of the receiver.

    sender's host      describes a message and counts it as posted, once its copy is queued
    sender's device    copies the payload, then stores the message's number as landed
    receiver's host    finds the message by its lane, queues a wait and a copy, marks it as taken
    receiver's device  waits until it landed, copies it out, then stores its number as done

A host waits only for what a peer's *host* has queued, a device only for what a peer has queued
already; so no cycle of waits can arise, and hosts run ahead of their devices. Space in the
receiver's memory is dealt out by the sender: first what is free, then what was taken and will be
free by the time the device gets there. When neither is enough, the sender asks for a larger arena,
which another thread of the receiver allocates.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from spec_compile.errors import ChannelError

from .copy_engine import HANDLE_BYTES, PAGE_BYTES, Engine
from .shared_words import SharedWords, WordWatch, fence

SLOTS = 256
"""Messages on their way at one time, at most."""
FIRST_BYTES = PAGE_BYTES
"""Size of an arena at first, and the unit of its growth."""
SPARE_BYTES = 1 << 26
"""Room beyond what is under way, at most as much again, so that small messages wait for nobody."""
_ALIGNMENT = 512

# words that the sender's host stores
_POSTED, _WANTED, _CLOSED, _FIRST = 0, 1, 2, 3
# words that the receiver's host stores
_GENERATION, _CAPACITY, _REFUSED, _HANDLE = 8, 9, 10, 12
# the word that the sender's device stores
_LANDED = 24
_SLOTS_AT = 32
# words of a slot: the sender's host stores four, the receiver's host one, its device the last
_LANE, _BYTES, _OFFSET, _ARENA, _TAKEN, _DONE = range(6)
_SLOT_WORDS = 8
BLOCK_WORDS = _SLOTS_AT + SLOTS * _SLOT_WORDS
"""Words of one direction."""


class Block:
    """The words of one direction, by meaning."""

    def __init__(self, words: SharedWords, position: int) -> None:
        self.words = words
        self._base = position * BLOCK_WORDS

    def at(self, index: int) -> int:
        """Index of a word in the segment."""
        return self._base + index

    def slot(self, number: int, field: int) -> int:
        """Index in the segment of a word of message ``number``'s slot."""
        return self._base + _SLOTS_AT + number % SLOTS * _SLOT_WORDS + field

    def __getitem__(self, index: int) -> int:
        return self.words[self._base + index]

    def __setitem__(self, index: int, value: int) -> None:
        self.words[self._base + index] = value

    def taken(self, number: int) -> bool:
        """Whether the receiver's host has queued its copy."""
        return self.words[self.slot(number, _TAKEN)] >= number

    def done(self, number: int) -> bool:
        """Whether the receiver's device has made its copy."""
        return self.words[self.slot(number, _DONE)] >= number


@dataclass(frozen=True)
class _Region:
    number: int
    start: int
    end: int


class Outbox:
    """The sender's end.

    Args:
        block: shared with the receiver.
        engine: this rank's device.
        watch: ends waits.
        ask: tells the receiver that the arena must grow.
        name: of the direction, for messages.
    """

    def __init__(
        self, block: Block, engine: Engine, watch: WordWatch, ask: Callable[[], None], name: str
    ) -> None:
        self._block = block
        self._engine = engine
        self._watch = watch
        self._ask = ask
        self._name = name
        self._lane = engine.new_lane()
        self._kept: list[Tensor] = []
        self._live: list[_Region] = []
        self._posted = 0
        self._generation = 0
        self._arena = 0
        self._capacity = 0

    def connect(self) -> None:
        """Map the arena that the receiver has made."""
        self._generation = self._block[_GENERATION]
        self._capacity = self._block[_CAPACITY]
        self._arena = self._engine.map(
            self._block.words.read(self._block.at(_HANDLE), HANDLE_BYTES)
        )

    def post(self, x: Tensor, lane: int) -> None:
        """Queue the copy of a contiguous tensor, which is kept until `join`."""
        number = self._posted + 1
        if number > SLOTS:
            oldest = number - SLOTS
            self._watch.until(
                lambda: self._block.done(oldest), lambda: f"{self._name}: message {oldest} back"
            )
        start, before = self._place(number, x.nbytes)
        block, words = self._block, self._block.words
        self._lane.after(self._engine.current_lane())
        for earlier in before:
            done = block.slot(earlier, _DONE)
            self._watch.hold(
                self._lane, words, done, earlier,
                lambda: f"{self._name}, room for message {number}",
            )  # fmt: skip
        self._lane.copy(self._arena + start, x.data_ptr(), x.nbytes)
        self._lane.write(words.address(block.at(_LANDED)), number)
        self._kept.append(x)
        for field, value in (
            (_LANE, lane), (_BYTES, x.nbytes), (_OFFSET, start), (_ARENA, self._generation),
        ):  # fmt: skip
            words[block.slot(number, field)] = value
        fence()
        block[_POSTED] = self._posted = number

    def join(self) -> None:
        """Let the caller's computation go on only when all copies are made; frees the tensors."""
        if self._kept:
            self._engine.current_lane().after(self._lane)
            self._kept.clear()

    def drain(self) -> None:
        """Wait until the receiver's host has taken everything."""
        for number in range(max(1, self._posted - SLOTS + 1), self._posted + 1):
            self._watch.until(
                lambda n=number: self._block.taken(n),  # type: ignore[misc]
                lambda n=number: f"{self._name}: the receipt of message {n}",  # type: ignore[misc]
            )

    def close(self) -> None:
        """Unmap the arena; no copy may be queued any more."""
        if self._generation:
            self._engine.unmap(self._arena)
            self._block[_CLOSED] = self._generation
            self._generation = 0
        self._kept.clear()

    def _place(self, number: int, num_bytes: int) -> tuple[int, list[int]]:
        """Find room; returns its offset, and the messages that must be done before it is written."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._live = [r for r in self._live if not self._block.done(r.number)]
        untaken = [r for r in self._live if not self._block.taken(r.number)]
        start = _gap(self._live, size, self._capacity)
        if start is None:
            start = _gap(untaken, size, self._capacity)
        if start is None:
            needed = size + sum(r.end - r.start for r in untaken)
            self._grow(needed + min(needed, SPARE_BYTES))
            start = 0
        region = _Region(number, start, start + size)
        over = [r for r in self._live if r.start < region.end and region.start < r.end]
        self._live = [r for r in self._live if r not in over] + [region]
        return start, [r.number for r in over]

    def _grow(self, num_bytes: int) -> None:
        block, landed = self._block, self._posted
        room = max(num_bytes, self._capacity + self._capacity // 4)
        block[_WANTED] = -(-room // FIRST_BYTES) * FIRST_BYTES
        self._ask()
        self._watch.until(
            lambda: block[_GENERATION] > self._generation or block[_REFUSED] == block[_WANTED],
            lambda: f"{self._name}: a receive buffer of {block[_WANTED]} bytes",
        )
        if block[_GENERATION] == self._generation:
            raise ChannelError(
                f"{self._name}: the receiver has no room for a buffer of {block[_WANTED]} bytes on "
                "its device; use fewer tokens per micro-batch"
            )
        self._watch.until(
            lambda: block[_LANDED] >= landed, lambda: f"{self._name}: the copy of message {landed}"
        )
        self._engine.unmap(self._arena)
        closed, self._live = self._generation, []
        self.connect()
        block[_FIRST] = self._posted + 1
        fence()
        block[_CLOSED] = closed


class Inbox:
    """The receiver's end; it owns the arena.

    Args:
        block: shared with the sender.
        engine: this rank's device.
        watch: ends waits.
        name: of the direction, for messages.
    """

    def __init__(self, block: Block, engine: Engine, watch: WordWatch, name: str) -> None:
        self._block = block
        self._engine = engine
        self._watch = watch
        self._name = name
        self._arenas: dict[int, int] = {}
        self._lock = threading.Lock()
        self._seen = 0
        self._waiting: defaultdict[int, deque[int]] = defaultdict(deque)
        self.allocate(FIRST_BYTES)

    def allocate(self, num_bytes: int) -> None:
        """Make a new arena and publish it."""
        block = self._block
        with self._lock:
            address = self._engine.allocate(num_bytes)
            generation = block[_GENERATION] + 1
            self._arenas[generation] = address
            block.words.store(block.at(_HANDLE), self._engine.export(address))
            block[_CAPACITY] = num_bytes
            fence()
            block[_GENERATION] = generation

    def grow(self) -> None:
        """Do what the sender asked for; called by another thread."""
        wanted = self._block[_WANTED]
        try:
            self.allocate(wanted)
        except Exception:  # the sender reports it, with the sizes
            self._block[_REFUSED] = wanted
            raise

    def take(self, out: Tensor, lane: int) -> None:
        """Queue the copy of the oldest message on ``lane`` into ``out``; waits until it is posted."""
        self._watch.until(
            lambda: self._arrived(lane), lambda: f"{self._name}: a tensor with tag {lane - 1}"
        )
        number = self._waiting[lane].popleft()
        block, words = self._block, self._block.words
        num_bytes, offset, generation = (
            words[block.slot(number, field)] for field in (_BYTES, _OFFSET, _ARENA)
        )
        if num_bytes != out.nbytes:
            raise ChannelError(
                f"{self._name}: expected {tuple(out.shape)} {out.dtype} ({out.nbytes} bytes), found "
                f"{num_bytes} bytes; check that all ranks make the same calls in the same order"
            )
        here = self._engine.current_lane()
        self._watch.hold(
            here, words, block.at(_LANDED), number, lambda: f"{self._name}, message {number}"
        )
        here.copy(out.data_ptr(), self._arenas[generation] + offset, num_bytes)
        here.write(words.address(block.slot(number, _DONE)), number)
        fence()
        words[block.slot(number, _TAKEN)] = number
        if len(self._arenas) > 1:
            self._free_old()

    def close(self) -> None:
        """Free the arenas; no copy out of them may be queued any more."""
        for address in self._arenas.values():
            self._engine.free(address)
        self._arenas.clear()

    @property
    def released(self) -> bool:
        """Whether the sender has unmapped the arena for good."""
        return self._block[_CLOSED] >= self._block[_GENERATION]

    def _arrived(self, lane: int) -> bool:
        posted = self._block[_POSTED]
        fence()
        while self._seen < posted:
            self._seen += 1
            at = self._block.slot(self._seen, _LANE)
            self._waiting[self._block.words[at]].append(self._seen)
        return bool(self._waiting[lane])

    def _free_old(self) -> None:
        """Free arenas that the sender has left, once nothing in them is needed."""
        block = self._block
        closed, first = block[_CLOSED], block[_FIRST]
        if all(block.done(n) for n in range(max(1, first - SLOTS), first)):
            with self._lock:
                old = [g for g in self._arenas if g <= closed]
                addresses = [self._arenas.pop(g) for g in old]
            for address in addresses:
                self._engine.free(address)


def _gap(taken: Sequence[_Region], size: int, capacity: int) -> int | None:
    """Start of the first gap of ``size`` bytes between regions."""
    at = 0
    for start, end in sorted((r.start, r.end) for r in taken):
        if start - at >= size:
            return at
        at = max(at, end)
    return at if capacity - at >= size else None
