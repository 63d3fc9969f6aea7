"""Names in shared memory: none outlives the processes that need it."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from spec_compile.runtime import shared_memory


@pytest.mark.dist
def test_a_killed_makers_segment_goes_with_the_next_one_and_a_living_makers_stays() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def make() -> None:
        _kept = shared_memory.create(4096)
        theirs.send(_kept[0])
        time.sleep(60)

    names = []
    makers = [context.Process(target=make) for _ in range(2)]
    for maker in makers:
        maker.start()
        names.append(ours.recv())
    makers[0].kill()
    makers[0].join()
    folder = shared_memory.FOLDER
    assert (folder / names[0]).exists()
    name, _buffer = shared_memory.create(4096)
    assert [(folder / n).exists() for n in (*names, name)] == [False, True, True]
    shared_memory.unlink(name)
    makers[1].kill()
    makers[1].join()
    shared_memory.remove_orphans()
    assert not (folder / names[1]).exists()
