"""The executor: gradients equal one process, uneven micro-batches, order and number of messages."""

from __future__ import annotations

import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from spec_compile.errors import InvariantError
from spec_compile.runtime.executor import RankStages, run_forward, run_schedule
from spec_compile.runtime.schedule import build_schedule, parse_actions
from tests.ranks import run_processes

WIDTH = 5
ROWS = [3, 2, 7, 2, 4, 6]


class Wire:
    """A mailbox for each source, destination and tag, and a record of every message."""

    def __init__(self, size: int) -> None:
        self._boxes: defaultdict[tuple[int, int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()
        self.log: list[tuple[int, int, int]] = []

    def box(self, src: int, dst: int, tag: int) -> queue.Queue[Any]:
        with self._lock:  # else two ranks that meet here make a box each
            return self._boxes[src, dst, tag]


class QueueFabric:
    """Point-to-point half of a fabric whose send completes only when it has been received."""

    name = "pp"

    def __init__(self, wire: Wire, rank: int, size: int) -> None:
        self.wire, self.rank, self.size = wire, rank, size
        self.pending: list[threading.Event] = []

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        taken = threading.Event()
        self.wire.log.append((self.rank, dst, tag))
        self.wire.box(self.rank, dst, tag).put((x, taken))
        self.pending.append(taken)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, src: int, tag: int = 0) -> Tensor:
        x, taken = self.wire.box(src, self.rank, tag).get(timeout=20)
        assert (tuple(x.shape), x.dtype) == (tuple(shape), dtype)
        taken.set()
        received: Tensor = x.clone()
        return received

    def flush(self) -> None:
        assert all(event.wait(20) for event in self.pending)
        self.pending.clear()


class LinearStage:
    """One linear layer; the last stage sums squares of its output per micro-batch."""

    hidden_dtype = torch.float64

    def __init__(self, rank: int, size: int, weight: Tensor, inputs: list[Tensor]) -> None:
        self.first, self.last = rank == 0, rank == size - 1
        self.weight = weight.clone().requires_grad_()
        self.inputs = inputs
        self.saved: dict[int, tuple[Tensor | None, Tensor]] = {}
        self.left: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.losses: dict[int, float] = {}

    def hidden_shape(self, mb: int) -> tuple[int, ...]:
        return (len(self.inputs[mb]), WIDTH)

    def forward(self, mb: int, hidden: Tensor | None) -> Tensor | None:
        assert (hidden is None) == self.first
        x = self.inputs[mb] if hidden is None else hidden.requires_grad_()
        y = torch.tanh(x @ self.weight)
        if self.last:
            y = y.square().sum()
            self.losses[mb] = y.item()
        self.saved[mb] = (hidden, y)
        return None if self.last else y

    def backward(self, mb: int, grad: Tensor | None, *, weights: bool = True) -> Tensor | None:
        assert (grad is None) == self.last
        hidden, y = self.saved.pop(mb)
        if weights:
            y.backward(grad)
            return None if hidden is None else hidden.grad
        self.left[mb] = (y, grad)
        if hidden is None:
            return None
        return torch.autograd.grad(y, hidden, grad, retain_graph=True)[0]

    def backward_weights(self, mb: int) -> None:
        y, grad = self.left.pop(mb)
        y.backward(grad, inputs=[self.weight])


def make_inputs() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in ROWS]
    weights = [
        torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(8)
    ]
    return weights, inputs


def on_ranks(
    size: int, work: Callable[[RankStages], None], stages_per_rank: int = 1
) -> tuple[list[LinearStage], Wire]:
    """Run ``work`` with the stages of each rank; returns all stages in order."""
    weights, inputs = make_inputs()
    wire = Wire(size)
    count = size * stages_per_rank
    stages = [LinearStage(s, count, weights[s], inputs) for s in range(count)]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        pp: Any = QueueFabric(wire, rank, size)
        try:
            work(RankStages({s: stages[s] for s in range(rank, count, size)}, count, pp))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "the pipeline hangs"
    if errors:
        raise errors[0]
    return stages, wire


def on_schedule(
    name: str, size: int, stages_per_rank: int = 1, **options: Any
) -> tuple[list[LinearStage], Wire]:
    orders = build_schedule(name, size, len(ROWS), stages_per_rank)
    return on_ranks(
        size, lambda mine: run_schedule(orders[mine.pp.rank], mine, **options), stages_per_rank
    )


def dense_gradients(size: int) -> tuple[list[Tensor], list[float]]:
    weights, inputs = make_inputs()
    weights = [w.requires_grad_() for w in weights[:size]]
    losses = []
    for x in inputs:
        for w in weights:
            x = torch.tanh(x @ w)
        losses.append(x.square().sum())
    return list(torch.autograd.grad(sum(losses, torch.zeros(())), weights)), [
        loss.item() for loss in losses
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_equal_one_process(name: str, size: int) -> None:
    stages, _ = on_schedule(name, size)
    gradients, losses = dense_gradients(size)
    for stage, gradient in zip(stages, gradients, strict=True):
        torch.testing.assert_close(stage.weight.grad, gradient)
        assert not stage.saved
    assert [stages[-1].losses[m] for m in range(len(ROWS))] == pytest.approx(losses)


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble"])
@pytest.mark.parametrize(("size", "stages_per_rank"), [(1, 2), (2, 1), (2, 2), (2, 4), (3, 2)])
def test_gradients_of_several_stages_a_rank_equal_one_process(
    name: str, size: int, stages_per_rank: int
) -> None:
    stages, wire = on_schedule(name, size, stages_per_rank)
    gradients, losses = dense_gradients(size * stages_per_rank)
    for stage, gradient in zip(stages, gradients, strict=True):
        torch.testing.assert_close(stage.weight.grad, gradient)
        assert not stage.saved
        assert not stage.left
    assert [stages[-1].losses[m] for m in range(len(ROWS))] == pytest.approx(losses)
    assert len(set(wire.log)) == len(wire.log) == 2 * (len(stages) - 1) * len(ROWS)


def test_every_message_has_its_own_tag() -> None:
    _, wire = on_schedule("1f1b", 3)
    assert len(wire.log) == 2 * 2 * len(ROWS)
    assert len(set(wire.log)) == len(wire.log)
    assert all(tag % 2 == (src > dst) for src, dst, tag in wire.log)


def test_no_gradient_travels_when_the_target_is_frozen() -> None:
    stages, wire = on_schedule("1f1b", 3, target_grad=False)
    assert all(dst == src + 1 for src, dst, _ in wire.log)
    assert [stage.weight.grad is None for stage in stages] == [True, True, False]


def test_forward_only_runs_every_micro_batch() -> None:
    orders = build_schedule("1f1b", 3, len(ROWS))
    stages, wire = on_ranks(3, lambda mine: run_forward(orders[mine.pp.rank], mine))
    _, losses = dense_gradients(3)
    assert [stages[-1].losses[m] for m in range(len(ROWS))] == pytest.approx(losses)
    assert len(wire.log) == 2 * len(ROWS)
    assert not any(y.requires_grad for stage in stages for _, y in stage.saved.values())


def test_output_of_another_shape_is_refused_before_it_is_sent() -> None:
    class Wrong(LinearStage):
        def forward(self, mb: int, hidden: Tensor | None) -> Tensor | None:
            return torch.zeros(1, WIDTH, dtype=torch.float64)

    weights, inputs = make_inputs()
    wire = Wire(2)
    pp: Any = QueueFabric(wire, 0, 2)
    with pytest.raises(InvariantError, match=r"must return \(3, 5\).*found \(1, 5\)"):
        run_forward(parse_actions("0F0"), RankStages({0: Wrong(0, 2, weights[0], inputs)}, 2, pp))
    assert not wire.log


def test_another_stages_list_is_refused() -> None:
    weights, inputs = make_inputs()
    pp: Any = QueueFabric(Wire(2), 0, 2)
    mine = RankStages({0: LinearStage(0, 2, weights[0], inputs)}, 2, pp)
    with pytest.raises(InvariantError, match=r"runs stages \[0\], found an action of stage 1"):
        run_schedule(parse_actions("1F0 1B0"), mine)


class TorchStage(torch.nn.Module):
    """The layer of `LinearStage` as torch's pipelining wants it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gradients_equal_torchs_own_executor_bitwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROWS", [4] * 5)  # torch needs equal shapes
    weights, inputs = make_inputs()
    schedule_class: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]

    def torch_gradient(rank: int) -> list[list[float]]:
        dist.init_process_group("gloo")
        module = TorchStage(weights[rank])
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        schedule = schedule_class(
            stage, len(inputs), loss_fn=lambda y, target: y.square().sum(), scale_grads=False
        )
        batch = torch.cat(inputs)
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        dist.destroy_process_group()
        assert module.weight.grad is not None
        return module.weight.grad.tolist()

    expected = run_processes(2, torch_gradient)
    stages, _ = on_schedule(name, 2)
    for stage, gradient in zip(stages, expected, strict=True):
        assert stage.weight.grad is not None
        assert stage.weight.grad.tolist() == gradient
