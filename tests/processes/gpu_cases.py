"""What the ranks of the GPU tests do; a module of its own, as spawned processes import it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import spec_compile as sc
from spec_compile.bench.eagle3 import Eagle3Rank
from spec_compile.bench.shards import Shape
from spec_compile.runtime.collectives import PairwiseFabric
from spec_compile.runtime.control import SocketControl
from spec_compile.runtime.fabrics import build_chosen
from spec_compile.runtime.layout import plan_layout
from spec_compile.runtime.one_sided import FIRST_BYTES
from spec_compile.runtime.processes import join
from spec_compile.runtime.taps import TapChannels, TapSpec
from tests.models import packed_batch, tiny_qwen3
from tests.processes.footprint import Samples
from tests.processes.prepared import owned_grads, policy_loss

LENGTHS = ((7, 61, 1, 135, 0, 90), (5, 2, 118))


@dataclass
class Step:
    """What one rank got out of two steps."""

    losses: list[list[float]]
    grads: dict[str, Tensor]


def own_device(rank: int) -> torch.device:
    """Ranks go round the GPUs that there are."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_num_threads(1)
    return device


def batch_on(rank: int, seed: int) -> sc.PackedBatch:
    """A small packed batch on this rank's GPU."""
    batch = packed_batch(LENGTHS[seed], vocab=61, dtype=torch.float32, seed=seed)
    device = own_device(rank)
    return sc.PackedBatch(
        batch.tokens.to(device),
        batch.cu_seqlens.to(device),
        batch.loss_mask.to(device),
        {name: value.to(device) for name, value in batch.fields.items()},
    )


def train(plan: sc.Plan, rank: int) -> Step:
    """Two steps of a small target with an EAGLE-3 draft; gradients of the second."""
    model = build(plan, rank)
    losses = []
    for seed in range(2):
        for group in model.param_groups():
            for parameter in group["params"]:
                parameter.grad = None
        result = model.step(batch_on(rank, seed), policy_loss)
        losses.append([result.policy_loss, result.draft_loss])
    grads = {name: grad.cpu() for name, grad in owned_grads(model).items()}
    model.close()
    return Step(losses, grads)


def build(plan: sc.Plan, rank: int) -> sc.ParallelModel:
    """Bind the small models to this rank's GPU."""
    device = own_device(rank)
    target = tiny_qwen3(hidden=128, head_dim=64, dtype=torch.float32)
    draft = sc.drafts.Eagle3.from_target(target, ttt_length=3)
    return sc.parallelize(target.to(device), draft.to(device), plan)


def die(plan: sc.Plan, rank: int) -> None:
    """A step; then the last rank is killed while the others start the next one."""
    model = build(plan, rank)
    batch = batch_on(rank, 0)
    model.step(batch, policy_loss)
    if rank == plan.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model.step(batch, policy_loss)


def many_steps(plan: sc.Plan, steps: int, rank: int) -> Samples:
    """What this rank holds, twenty times on the way."""
    model, seen = build(plan, rank), Samples()
    batch = batch_on(rank, 0)
    for step in range(1, steps + 1):
        model.step(batch, policy_loss)
        if step % (steps // 20) == 0:
            seen.take()
    model.close()
    return seen


def fabric_of(
    rank: int, size: int, timeout_s: float, kind: str = "cuda_ipc"
) -> tuple[SocketControl, PairwiseFabric]:
    """Join all ranks in one fabric."""
    device = own_device(rank)
    control = join(size, timeout_s=timeout_s)
    assert isinstance(control, SocketControl)
    made = build_chosen(control, sc.Plan(cp=size, timeout_s=timeout_s), device, {"cp": kind})
    return control, made["cp"]


def ring(kind: str, rank: int) -> list[Tensor]:
    """What three passes of EAGLE-3 over a ring of two give, after backwards that nothing is kept of."""
    control, fabric = fabric_of(rank, 2, 60.0, kind)
    shape, lengths = Shape(8, 2, 128, torch.bfloat16), (8190,)
    work = Eagle3Rank(
        shape, plan_layout(lengths, 2), lengths, fabric, fabric.device, strategy="ring",
        backend="auto", passes=3,
    )  # fmt: skip
    for _ in range(4):
        outs = work.forward()
        work.backward(outs)
    found = [x.detach().cpu() for x in outs]
    fabric.close()
    control.close()
    return found


def collectives(kind: str, size: int, rank: int) -> None:
    """Every collective against its definition, with sizes around the arena's."""
    control, fabric = fabric_of(rank, size, 20.0, kind)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 1000, FIRST_BYTES // 4 + 3, FIRST_BYTES * 3):
        every = torch.randn(size, count, generator=generator).to(fabric.device)
        assert torch.equal(fabric.all_gather(every[rank]), every)
        (back,) = fabric.shift([every[rank]])
        assert torch.equal(back, every[(rank - 1) % size])
        table = torch.stack([every + r for r in range(size)])
        expected = (every[rank] + 0.0).clone()
        for r in range(1, size):
            expected += every[rank] + r
        assert torch.equal(fabric.reduce_scatter(table[rank]), expected)
        total = every[rank].clone()
        fabric.all_reduce_(total)
        torch.testing.assert_close(total, every.sum(0))
    for turn in range(40):  # tensors are dropped at once, and a late peer must not see the next
        fabric.send(torch.full((1 << 18,), float(turn), device=fabric.device), (rank + 1) % size, 3)
        value = fabric.recv((1 << 18,), torch.float32, (rank - 1) % size, 3)
        assert bool((value == turn).all())
    fabric.flush()
    fabric.close()
    control.close()


def stuck(rank: int) -> str:
    """Rank 0's device waits for a copy that rank 1 has announced and will never make."""
    _control, fabric = fabric_of(rank, 2, 20.0)
    value = torch.ones(4, device=fabric.device)
    torch.cuda.synchronize()  # the first kernel is loaded, for which the driver may wait for the device
    if rank == 1:
        torch.cuda._sleep(1 << 36)
        fabric.send(value, 0)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    fabric.recv((4,), torch.float32, 1).sum().item()  # ends because the watch lets the device go on
    fabric.check()
    return "no error"


def open_taps(rank: int, spec: TapSpec, transport: str = "cuda_ipc") -> TapChannels:
    """Both ends of a channel of two slots."""
    device = own_device(rank)
    return TapChannels.connect(
        join(2, timeout_s=20.0), [spec], lane="dp0 cp0", stages=(rank,), num_stages=2,
        depths={0: 2}, capacity_rows=2, transport=transport, timeout_s=20.0, device=device,
    )  # fmt: skip


def close_taps(channels: TapChannels) -> None:
    """Leave once everything has arrived."""
    channels.control.all_gather(None, deadline_s=20.0)
    channels.close()
    channels.control.close()


def reuse_memory(rank: int) -> None:
    """The source drops each value once it is pushed, and poisons what takes its memory."""
    rows, width = 4096, 4096
    channels = open_taps(rank, TapSpec(0, (width,), (torch.bfloat16,), "plan"))

    def filled(value: float) -> Tensor:
        return torch.full((rows, width), value, dtype=torch.bfloat16, device=channels.device)

    for step in range(3):
        channels.begin_step(step, [rows] * 12)
        for mb in range(12):
            if rank == 0:
                channels.push(0, mb, [filled(mb)])
                filled(float("nan"))
            else:
                (found,) = channels.pull(0, mb, [torch.empty(rows, width, dtype=torch.bfloat16)])
                assert bool((found == mb).all())
                channels.release(mb)
    close_taps(channels)


def push_taps(transport: str, rank: int) -> None:
    """Random bits through a channel of two slots, eight micro-batches of their own sizes."""
    spec = TapSpec(0, (96, 32), (torch.bfloat16, torch.float32), "plan")
    channels = open_taps(rank, spec, transport)
    device = channels.device
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        rows = [5, 0, 700 * (step + 1), 33, 1, 4097, 2, 64]
        channels.begin_step(step, rows)
        made = [
            [
                torch.randint(-(1 << 15), 1 << 15, (n, w), generator=generator).to(torch.int16)
                for w in (96, 64)
            ]
            for n in rows
        ]
        for mb, (half, whole) in enumerate(made):
            values = [half.view(torch.bfloat16), whole.view(torch.float32)]
            if rank == 0:
                channels.push(0, mb, [x.to(device) for x in values])
            else:
                like = [x.to("meta") for x in values]
                pulled = channels.pull(0, mb, like)
                for found, expected in zip(pulled, (half, whole), strict=True):
                    assert torch.equal(found.view(torch.int16).cpu(), expected)
                channels.release(mb)
    close_taps(channels)
