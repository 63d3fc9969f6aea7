"""The command line: `spec-compile bench attention | eagle3 | blocks | merge | launch | losses | tap`.

Under torchrun, `attention` and `eagle3` run all ranks at once and measure the real exchange.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .bench.commands import BENCHMARKS, UNDER_TORCHRUN, num_ranks, settings_of
from .bench.processes import own_device
from .bench.report import Report
from .errors import ConfigError

DEFAULT_TOKENS = {"losses": [16384], "tap": [16384]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 when it asks for what there is not."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(typed)
    gc.freeze()  # every case collects garbage first, and need not search what is older than all of them
    try:
        _bench(options, typed)
    except ConfigError as error:
        sys.stderr.write(f"spec-compile bench: {error}\n")
        return 2
    finally:
        gc.unfreeze()
    return 0


def _bench(options: argparse.Namespace, typed: list[str]) -> None:
    _check(options)
    if options.quick:
        options.tokens, options.repeats = [256], 2
        options.heads, options.key_heads, options.dim = 4, 2, 32
        options.anchors, options.block_size, options.vocab = 16, 4, 64
        options.sizes, options.hidden = [1], [64]
    elif options.tokens is None:
        options.tokens = DEFAULT_TOKENS.get(options.benchmark, [32768, 131072])
    device = _device(options.device)
    if num_ranks() > 1:
        device = own_device(options.device, int(os.environ.get("LOCAL_RANK", "0")))
    first = int(os.environ.get("RANK", "0")) == 0
    paths = (options.json, options.markdown) if first else (None, None)
    report = Report(device, typed, _say if first else _drop, *paths)
    BENCHMARKS[options.benchmark](options, report, settings_of(options, device))


def _check(options: argparse.Namespace) -> None:
    counts = {
        "--repeats": [options.repeats], "--tokens": options.tokens or [], "--vocab": [options.vocab],
        "--hidden": options.hidden, "--sizes": options.sizes,
    }  # fmt: skip
    for name, values in counts.items():
        if min(values, default=1) < 1:
            raise ConfigError(f"{name} must be 1 or more, found {min(values)}")
    if num_ranks() > 1 and options.benchmark not in UNDER_TORCHRUN:
        raise ConfigError(
            f"{options.benchmark} is no benchmark of several ranks ({' and '.join(UNDER_TORCHRUN)} are), found "
            f"WORLD_SIZE={num_ranks()}; start it without torchrun"
        )
    on_gpus = [fabric for fabric in options.fabric if fabric in ("cuda_ipc", "nccl")]
    if on_gpus and not options.device.startswith("cuda"):
        raise ConfigError(f"--fabric {on_gpus[0]} needs --device cuda, found {options.device!r}")


def _device(name: str) -> torch.device:
    """The device of a run; --device decides which kernels there are."""
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number == "" or number.isdecimal()):
        raise ConfigError(f"--device must be 'cpu' or 'cuda', found {name!r}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name} is not here: torch finds {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    return torch.device(name)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _drop(line: str) -> None:
    """The first rank says everything."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spec-compile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure kernels, exchange and steps")
    bench.add_argument("benchmark", choices=list(BENCHMARKS))
    _add_cases(bench)
    _add_peers(bench)
    bench.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="timed calls, 5; `tap`: at least three pairs of steps each",
    )
    bench.add_argument("--budget", type=float, default=20.0, help="seconds for timed calls a rank")
    bench.add_argument(
        "--ranks", choices=["all", "slowest"], default="all",
        help="which ranks run: all, or those that can be the slowest",
    )  # fmt: skip
    bench.add_argument("--link", type=float, default=380.0, help="GB/s assumed for the exchange")
    bench.add_argument(
        "--fabric", nargs="+", choices=["auto", "cuda_ipc", "nccl", "gloo"], default=["auto"],
        help="several processes: what carries the exchange; auto is what a step would use",
    )  # fmt: skip
    bench.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    bench.add_argument("--json", type=Path, help="also write everything to this file")
    bench.add_argument("--markdown", type=Path, help="also write the table to this file")
    bench.add_argument(
        "--quick",
        action="store_true",
        help="tiny shapes in place of those given, to see that it runs",
    )
    return parser


def _add_cases(bench: argparse.ArgumentParser) -> None:
    strategies = ["all_gather", "ring", "pass_q"]
    bench.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        help="of a row or batch; 32768 131072, of `losses` and `tap`'s steps 16384",
    )
    bench.add_argument("--documents", nargs="+", choices=["one", "packed"], default=["one"])
    bench.add_argument(
        "--cp", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of ranks, without torchrun"
    )
    bench.add_argument("--strategy", nargs="+", choices=strategies, default=strategies)
    bench.add_argument("--backend", nargs="+", default=["auto"], help="names of attention backends")
    bench.add_argument("--heads", type=int, default=32)
    bench.add_argument("--key-heads", type=int, default=8)
    bench.add_argument("--dim", type=int, default=128)
    bench.add_argument("--dtype", default="bfloat16")
    bench.add_argument("--passes", type=int, default=7, help="passes of EAGLE-3")
    bench.add_argument("--anchors", type=int, default=512, help="blocks of a block draft")
    bench.add_argument("--block-size", type=int, default=16)
    bench.add_argument("--vocab", type=int, default=32000, help="words of `launch` and `losses`")
    bench.add_argument(
        "--sizes", type=int, nargs="+", default=[4, 32, 128, 512], help="MiB of a tap"
    )
    bench.add_argument(
        "--hidden",
        type=int,
        nargs="+",
        default=[1024, 2048, 4096],
        help="of `losses` and `tap`'s steps",
    )


def _add_peers(bench: argparse.ArgumentParser) -> None:
    peers = ["usp", "repeated", "flex"]
    bench.add_argument(
        "--peers", nargs="*", choices=peers, default=peers,
        help="measured beside ours: usp and repeated by eagle3, flex by attention and blocks; all unless "
        "given, none when given without names",
    )  # fmt: skip
    bench.add_argument(
        "--peer-backend", nargs="+", default=["aten_flash", "cudnn"],
        help="kernels of the rebuilt USP's tiles on a GPU; aten_flash is the published one",
    )  # fmt: skip
    bench.add_argument(
        "--splits", choices=["ring", "all"], default="all", help="USP: the pure ring, or all splits"
    )


if __name__ == "__main__":
    sys.exit(main())
