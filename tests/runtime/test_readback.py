"""Numbers that are read back together."""

from __future__ import annotations

import pytest
import torch

from spec_compile.runtime.readback import Readback


def test_numbers_come_back_in_their_shapes_and_in_double_precision() -> None:
    third = torch.tensor(1.0, dtype=torch.float64) / 3
    values = [third, torch.tensor([1, 2, 3]), torch.tensor([[0.5], [-1.0]]), torch.tensor(True)]
    assert Readback(values).numbers() == [1 / 3, [1.0, 2.0, 3.0], [[0.5], [-1.0]], 1.0]


def test_nothing_is_read_back_as_nothing() -> None:
    assert Readback([]).numbers() == []
    assert Readback([torch.zeros(0), torch.tensor(2.0)]).numbers() == [[], 2.0]


def test_a_value_changed_later_is_read_as_it_was() -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    taken = Readback([value])
    with torch.no_grad():
        value.mul_(5)
    assert taken.numbers() == [[1.0, 2.0]]


@pytest.mark.gpu
def test_values_of_a_gpu_and_of_the_host_come_back_together() -> None:
    there = torch.arange(1000, device="cuda")
    taken = [Readback([there * i, torch.tensor(i)]) for i in range(50)]
    for i, one in enumerate(taken):
        vector, number = one.numbers()
        assert number == i
        assert vector == [float(i * j) for j in range(1000)]


@pytest.mark.gpu
def test_values_of_the_host_do_not_make_it_wait_for_the_gpu() -> None:
    there = torch.arange(3.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = Readback([torch.tensor(0.5), there, torch.tensor(7)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken.numbers() == [0.5, [0.0, 1.0, 2.0], 7.0]
