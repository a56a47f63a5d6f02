"""What every benchmark shares: the arguments, the machine's description, times with the first call apart, and the figures as JSON."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date

import jax


def arguments(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser


def add_execution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--execution", choices=("emulated", "native", "auto"), default="emulated", help="as tcemu.execution; checks are emulated"
    )


def describe_machine() -> dict[str, object]:
    """Prints, and returns, what ran this."""
    device = jax.devices()[0]
    machine: dict[str, object] = {
        "device": f"{device.platform} ({device.device_kind})", "cores": os.cpu_count(), "machine": platform.machine(),
        "jax": jax.__version__, "date": date.today().isoformat(),
    }  # fmt: skip
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    return machine


def timed(run: Callable[[], jax.Array], repeats: int) -> tuple[float, float]:
    """Seconds of the first call, and of the best of `repeats` more."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return seconds[0], min(seconds[1:])


def back_to_back(run: Callable[[], jax.Array], repeats: int, calls: int = 20) -> float:
    """Seconds of a call among `calls` that follow each other, whose end alone is waited for: the best of `repeats`."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)][-1])
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds)


def finish(args: argparse.Namespace, machine: dict, lines: list[dict], wrong: int, where: str, what: str = "mismatches") -> int:
    """The last line, the JSON file if one is wanted, and the exit status: 1 if a word differed, or something else is `wrong`."""
    print(f"{wrong} {what} in {where}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine, "lines": lines}, file, indent=1)
    return 1 if wrong else 0
