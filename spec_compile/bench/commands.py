"""The benchmarks by name; each prints its rows as they come."""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from spec_compile.errors import ConfigError

from . import goals, tap_cpu, tap_cuda, tap_steps
from .attention import compare, measure_passes, measure_usp
from .blocks import Blocks, measure_blocks
from .eagle3 import splits
from .launch import measure_launch, steps
from .losses import LossRow, measure_losses
from .merging import measure_merge
from .peers import flex, packages
from .processes import Processes
from .report import HEADER, Ideal, Report, Row
from .rows import Settings, ideal_rates
from .shards import Shape, packed_lengths
from .tap_models import build_on_cpu, build_on_gpu

IDEAL_ROWS = 65536
"""Longest causal block that is timed as the ideal."""
CPU_TOKENS = 256
"""Most tokens of a step with taps that is timed without a GPU."""


def settings_of(options: argparse.Namespace, device: torch.device) -> Settings:
    """Read how to measure.

    Raises:
        ConfigError: there is no such dtype, or no number has it.
    """
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"--dtype must be a floating torch.dtype such as bfloat16, found {options.dtype!r}"
        )
    shape = Shape(options.heads, options.key_heads, options.dim, dtype)
    return Settings(
        shape, device, options.repeats, options.budget, options.ranks == "all", options.link
    )


def attention(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    """Causal attention: strategies x backends x cp, FlexAttention on one device."""
    if num_ranks() > 1:
        return _attention_processes(options, report, settings)
    ideal = _start(options, report, settings)
    for case, lengths in _cases(options):
        for backend in options.backend:
            for _ in _strategies(options, report, settings, case, lengths, backend, 1, ideal):
                pass
        if settings.device.type == "cuda" and "flex" in options.peers:
            report.add(flex.measure_causal(settings, case, lengths, ideal))
    return None


def eagle3(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    """All passes of EAGLE-3, beside the published procedure in the same run."""
    if num_ranks() > 1:
        return _eagle3_processes(options, report, settings)
    ideal = _start(options, report, settings)
    for name, lengths in _cases(options):
        case = f"x{options.passes} {name}"
        _say_packed(report, options, lengths)
        for backend in options.backend:
            rows = _strategies(
                options, report, settings, case, lengths, backend, options.passes, ideal
            )
            for ours in rows:
                # a peer is measured once, beside the first of the strategies
                if ours.cp > 1 and len(lengths) == 1 and ours.what == options.strategy[0]:
                    for peer in _usp_rows(options, settings, case, lengths[0], ours.cp, ideal):
                        report.add(peer)
                        report.say(compare(ours, peer))
    return None


def blocks(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    """Anchored blocks of DFlash, beside FlexAttention in the same run."""
    ideal = _start(options, report, settings)
    for name, lengths in _cases(options):
        number = _even(min(options.anchors, sum(lengths) // 2), options.cp)
        case = f"{number}x{options.block_size} {name}"
        drawn = Blocks.drawn(lengths, number, options.block_size, settings.device)
        one: Row | None = None
        for cp, strategy in _sizes(options):
            if strategy != "ring":
                row = measure_blocks(
                    settings, case, drawn, cp, strategy=strategy, backend=options.backend[0],
                    ideal=ideal, one_device=one,
                )  # fmt: skip
                one = row if cp == 1 else one
                report.add(row)
        if one is not None and settings.device.type == "cuda" and "flex" in options.peers:
            peer = flex.measure_blocks(settings, case, drawn, ideal)
            report.add(peer)
            report.say(compare(one, peer))


def merge(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    """The two-way merge against the device's own copy."""
    shape, repeats = settings.shape, options.repeats
    for total in options.tokens:
        report.add(
            measure_merge(total, shape.heads, shape.dim, shape.dtype, settings.device, repeats)
        )


def losses(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    """Losses over the vocabulary against their matrix products, and against whole logits."""
    dtype, device = settings.shape.dtype, settings.device
    for total in options.tokens:
        report.say(f"losses of {total} rows over {options.vocab} words, {dtype}")
        report.say(LossRow.HEADER)
        for row in measure_losses(
            total, options.vocab, options.hidden, dtype, device, options.repeats
        ):
            report.add(row)


def launch(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    """Share of a whole step outside kernels."""
    for case, step in steps(settings.shape, options.tokens[0], settings.device, options.vocab):
        report.add(measure_launch(case, step, settings.device, options.repeats))


def tap(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    """Two processes: payload bandwidth, latency, and what taps add to a step of two stages."""
    tokens, hidden, repeats = options.tokens[0], options.hidden, options.repeats
    if settings.device.type == "cuda":
        tables = [
            tap_cuda.measure_taps(options.sizes, repeats),
            tap_steps.measure_step_cost(build_on_gpu, hidden, tokens, repeats),
        ]
    else:
        tables = [
            tap_cpu.measure_taps(options.sizes, repeats),
            tap_cpu.measure_steps(build_on_cpu, hidden, min(tokens, CPU_TOKENS), repeats),
        ]
    for table in tables:
        for line in table:
            report.say(line)
    if settings.device.type != "cuda":
        report.say(f"goals, on GPUs: {'; '.join(map(str, goals.GOALS))}")


BENCHMARKS: dict[str, Callable[[argparse.Namespace, Report, Settings], None]] = {
    "attention": attention, "eagle3": eagle3, "blocks": blocks, "merge": merge, "launch": launch,
    "losses": losses, "tap": tap,
}  # fmt: skip


UNDER_TORCHRUN = ("attention", "eagle3")
"""Benchmarks that all ranks of a launch run together."""


def num_ranks() -> int:
    """Processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _start(
    options: argparse.Namespace, report: Report, settings: Settings, ranks: int = 1
) -> Ideal:
    ideal = ideal_rates(settings, min(max(options.tokens), IDEAL_ROWS))
    report.say(str(ideal))
    if options.peers:
        for line in packages.absent(settings.device, ranks, options.peers):
            report.say(line)
    if ranks == 1:
        report.say(
            "each rank runs alone, the slowest counts; its exchange is not in the times: 'link ms' is "
            f"what the bytes sent take at {settings.link_gb_s:g} GB/s, nothing hidden"
        )
    report.say(HEADER)
    return ideal


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, Sequence[int]]]:
    for kind in options.documents:
        for total in options.tokens:
            yield f"{kind} {total}", (total,) if kind == "one" else packed_lengths(total)


def _strategies(
    options: argparse.Namespace, report: Report, settings: Settings, case: str,
    lengths: Sequence[int], backend: str, passes: int, ideal: Ideal,
) -> Iterator[Row]:  # fmt: skip
    """Yield ours, on one device first; every row but that one knows how well it scales."""
    one: Row | None = None
    for cp, strategy in _sizes(options):
        row = measure_passes(
            settings, case, lengths, cp, strategy=strategy, backend=backend, passes=passes,
            ideal=ideal, one_device=one,
        )  # fmt: skip
        one = row if cp == 1 else one
        report.add(row)
        yield row


def _sizes(options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Ranks and strategies; with one rank all strategies are one."""
    for cp in options.cp:
        for strategy in options.strategy if cp > 1 else ["all_gather"]:
            yield cp, strategy


def _usp_rows(
    options: argparse.Namespace, settings: Settings, case: str, total: int, cp: int, ideal: Ideal
) -> Iterator[Row]:
    for kernel in _peer_kernels(options, settings):
        for split in splits(cp, settings.shape, options.splits) if "usp" in options.peers else []:
            yield measure_usp(
                settings, case, total, split, backend=kernel, passes=options.passes, ideal=ideal
            )
    if "repeated" in options.peers:
        # for its memory: one timed call is enough
        once = replace(settings, repeats=1, all_ranks=False)
        kernel = _peer_kernels(options, settings)[0]
        yield measure_usp(
            once, case, total, (1, cp), backend=kernel, passes=options.passes, ideal=ideal,
            repeat_heads=True,
        )  # fmt: skip


def _say_packed(report: Report, options: argparse.Namespace, lengths: Sequence[int]) -> None:
    if len(lengths) > 1 and {"usp", "repeated"} & set(options.peers):
        report.say("    peers USP and repeated heads: not measured, they take one document a row")


def _even(number: int, sizes: Sequence[int]) -> int:
    """Most anchors up to ``number`` that can be dealt evenly to each number of ranks."""
    step = math.lcm(*sizes)
    if number < step:
        raise ConfigError(
            f"blocks deals its anchors evenly to --cp {' '.join(map(str, sizes))} and needs {step} or more, found "
            f"{number} (half of --tokens at most); give more --anchors and --tokens, or a smaller --cp"
        )
    return number - number % step


def _peer_kernels(options: argparse.Namespace, settings: Settings) -> list[str]:
    return list(options.peer_backend) if settings.device.type == "cuda" else ["aten_cpu"]


def _attention_processes(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    processes = Processes(settings, num_ranks())
    try:
        ideal = _start(options, report, settings, processes.size)
        for case, lengths in _cases(options):
            _together(options, report, processes, case, lengths, 1, ideal)
            peers = packages.process_peers(settings.shape, sum(lengths), settings.device)
            for name, peer in peers.items() if len(lengths) == 1 and options.peers else ():
                make = functools.partial(peer, settings.shape, lengths[0], settings.device)
                report.add(processes.measure_peer(name, case, lengths[0], make, ideal))
    finally:
        processes.close()


def _eagle3_processes(options: argparse.Namespace, report: Report, settings: Settings) -> None:
    processes = Processes(settings, num_ranks())
    try:
        ideal = _start(options, report, settings, processes.size)
        for name, lengths in _cases(options):
            case = f"x{options.passes} {name}"
            ours = _together(options, report, processes, case, lengths, options.passes, ideal)
            _say_packed(report, options, lengths)
            if len(lengths) > 1 or "usp" not in options.peers:
                continue
            for kernel in _peer_kernels(options, settings):
                for split in splits(processes.size, settings.shape, options.splits):
                    peer = processes.measure_usp(
                        case, lengths[0], split, backend=kernel, passes=options.passes, ideal=ideal
                    )
                    report.add(peer)
                    report.say(compare(ours, peer))
    finally:
        processes.close()


def _together(
    options: argparse.Namespace, report: Report, processes: Processes, case: str,
    lengths: Sequence[int], passes: int, ideal: Ideal,
) -> Row:  # fmt: skip
    """Report every strategy without its exchange and with it by each fabric; return the first one with."""
    first: Row | None = None
    for strategy in options.strategy:
        rows = processes.measure_passes(
            case, lengths, strategy=strategy, backend=options.backend[0], passes=passes,
            ideal=ideal, fabrics=options.fabric,
        )  # fmt: skip
        report.add(alone := next(rows))
        for row in rows:
            report.add(row)
            more = row.total.median / alone.total.median - 1.0
            report.say(f"    {case}: the exchange of {row.what} adds {more:+.1%} to the time alone")
            first = first or row
    assert first is not None, "there is a strategy and a fabric"
    return first
