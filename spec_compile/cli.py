"""The command line: `spec-compile bench attention | eagle3 | merge | tap`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from .bench import tap_cpu, tap_cuda, tap_steps
from .bench.attention import Ideal, Row, ideal_rates, measure_matrix
from .bench.merging import measure_merge
from .bench.passes import measure_passes
from .bench.shards import Shape, packed_lengths
from .bench_models import build_on_cpu, build_on_gpu

CPU_TOKENS = 256
"""Most tokens of a step that is timed without a GPU."""
IDEAL_ROWS = 65536
"""Longest causal block that is timed as the ideal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    if options.quick:
        options.tokens, options.repeats = [256], 2
        options.heads, options.key_heads, options.dim = 4, 2, 32
        options.sizes, options.hidden = [1], [64]
    _say(f"{_device_name(device)}; torch {torch.__version__}; repeats {options.repeats}")
    {"attention": _attention, "eagle3": _eagle3, "merge": _merge, "tap": _tap}[options.benchmark](
        options, device
    )
    return 0


def _attention(options: argparse.Namespace, device: torch.device) -> None:
    shape, ideal = _start(options, device)
    cases: dict[str, Sequence[int]] = {
        f"{kind} {total}": (total,) if kind == "one" else packed_lengths(total)
        for kind in options.documents
        for total in options.tokens
    }
    rows = measure_matrix(
        shape, cases, device, ideal, cps=options.cp, strategies=options.strategy,
        backends=options.backend, repeats=options.repeats,
    )  # fmt: skip
    for row in rows:
        _say(str(row))


def _eagle3(options: argparse.Namespace, device: torch.device) -> None:
    shape, ideal = _start(options, device)
    for total in options.tokens:
        for cp in options.cp:
            row = measure_passes(
                f"eagle3 x{options.passes} {total}", shape, (total,), cp, device, ideal,
                backend=options.backend[0], num_passes=options.passes, repeats=options.repeats,
            )  # fmt: skip
            _say(str(row))


def _merge(options: argparse.Namespace, device: torch.device) -> None:
    dtype = getattr(torch, options.dtype)
    for total in options.tokens:
        _say(str(measure_merge(total, options.heads, options.dim, dtype, device, options.repeats)))


def _tap(options: argparse.Namespace, device: torch.device) -> None:
    """Two processes: payload bandwidth, latency, and what taps add to a step of two stages."""
    tokens = options.tokens[0]
    if device.type == "cuda":
        tables = [
            tap_cuda.measure_taps(options.sizes, options.repeats),
            tap_steps.measure_step_cost(build_on_gpu, options.hidden, tokens, options.repeats),
        ]
    else:
        tables = [
            tap_cpu.measure_taps(options.sizes, options.repeats),
            tap_cpu.measure_steps(
                build_on_cpu, options.hidden, min(tokens, CPU_TOKENS), options.repeats
            ),
        ]
    for table in tables:
        for line in table:
            _say(line)


def _start(options: argparse.Namespace, device: torch.device) -> tuple[Shape, Ideal]:
    shape = Shape(options.heads, options.key_heads, options.dim, getattr(torch, options.dtype))
    ideal = ideal_rates(shape, min(max(options.tokens), IDEAL_ROWS), device, options.repeats)
    _say(f"{ideal}\n{Row.HEADER}")
    return shape, ideal


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spec-compile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser(
        "bench", help="measure kernels on one device, or taps between two processes"
    )
    bench.add_argument("benchmark", choices=["attention", "eagle3", "merge", "tap"])
    bench.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    bench.add_argument("--documents", nargs="+", choices=["one", "packed"], default=["one"])
    bench.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4, 8])
    strategies = ["all_gather", "ring"]
    bench.add_argument("--strategy", nargs="+", choices=strategies, default=strategies)
    bench.add_argument("--backend", nargs="+", default=["auto"], help="names of attention backends")
    bench.add_argument("--heads", type=int, default=32)
    bench.add_argument("--key-heads", type=int, default=8)
    bench.add_argument("--dim", type=int, default=128)
    bench.add_argument("--dtype", default="bfloat16")
    bench.add_argument("--passes", type=int, default=7, help="passes of EAGLE-3")
    bench.add_argument("--sizes", type=int, nargs="+", default=[4, 32], help="MiB of a tap")
    bench.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048, 4096])
    bench.add_argument("--repeats", type=int, default=5)
    bench.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    bench.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    return parser


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
