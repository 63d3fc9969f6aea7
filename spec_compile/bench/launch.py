"""What a step spends outside its kernels: Python, launches, waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from spec_compile.api import parallelize
from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.drafts import Eagle3
from spec_compile.plan import Plan

from .shards import Shape
from .timing import Timing, measure

WARM_UP = 3


@dataclass(frozen=True)
class LaunchRow:
    """One step."""

    case: str
    step: Timing
    """From one idle device to the next."""
    busy_ms: float | None
    """At least one kernel or copy runs; None where the device is the host."""
    kernels: int

    @property
    def outside(self) -> float | None:
        """Share of the step in which the device does nothing."""
        return None if self.busy_ms is None else 1.0 - self.busy_ms / self.step.median

    def __str__(self) -> str:
        text = f"{self.case:34} step {self.step!s:24} ms"
        if self.outside is None or self.busy_ms is None:
            return text + "; kernels are not told apart from the rest on this device"
        return (
            f"{text}; {self.kernels} kernels and copies keep the device busy for {self.busy_ms:.3f} ms; "
            f"outside {self.outside:.1%}"
        )


def measure_launch(
    case: str, step: Callable[[], object], device: torch.device, repeats: int
) -> LaunchRow:
    """Time steps without a profiler, and one more with it for the time in which the device is busy."""
    for _ in range(WARM_UP):
        step()
    samples = [measure(step, device, 1, warmup=0).median for _ in range(repeats)]
    timing = Timing.of(samples)
    if device.type != "cuda":
        return LaunchRow(case, timing, None, 0)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        torch.cuda.synchronize(device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return LaunchRow(case, timing, covered(spans) / 1e3, len(spans))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def steps(
    shape: Shape, tokens: int, device: torch.device, vocab: int
) -> Iterable[tuple[str, Callable[[], object]]]:
    """Yield whole training steps: one layer alone, and two with EAGLE-3 of four passes.

    Args:
        shape: of the attention; the layer is as wide as its query heads.
        tokens: of the batch, in one document.
        device: where it runs.
        vocab: ids.
    """
    batch = PackedBatch(
        torch.randint(vocab, (tokens,), device=device),
        torch.tensor([0, tokens], device=device),
        torch.ones(tokens, dtype=torch.bool, device=device),
    )
    for layers in (1, 2):
        target = _target(shape, layers, device, vocab)
        draft = Eagle3.from_target(target, ttt_length=4) if layers == 2 else None
        model = parallelize(target, draft, Plan(verify=False))
        case = (
            f"{layers} layer{'s' * (layers > 1)}{', EAGLE-3 x4' if draft else ''}, {tokens} tokens"
        )

        def step(model: Any = model) -> None:
            model.step(batch, _policy_loss)

        yield case, step
        model.close()


def _policy_loss(rows: TokenOutputs) -> torch.Tensor:
    return -(rows.logprobs * rows.mask).sum()


def _target(shape: Shape, layers: int, device: torch.device, vocab: int) -> Any:
    width = shape.heads * shape.dim
    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, vocab_size=vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, head_dim=shape.dim,
    )  # fmt: skip
    with device:
        return torch.nn.Module.to(Qwen3ForCausalLM(config), shape.dtype)
