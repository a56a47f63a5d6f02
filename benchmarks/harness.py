"""What every benchmark shares: the arguments, the machine's description, times with the first call apart, and the figures as JSON."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from typing import Any

import jax

from tcemu.base.compilation import CACHE_VARIABLE
from tcemu.base.execution import CHOICES


def arguments(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser


def add_execution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--execution", choices=CHOICES, default=CHOICES[0], help="as tcemu.execution; checks are emulated")


def add_processes(parser: argparse.ArgumentParser, *recipes: str) -> None:
    """Add the options of a script that measures each recipe in a process of its own by `measure_in_a_process`."""
    parser.add_argument("--recipes", nargs="+", default=recipes)
    parser.add_argument("--alone", action="store_true", help="one recipe, in this process, as a line of JSON")
    parser.add_argument("--again", action="store_true", help="also a second process, with the compiled programs of a first one on disk")


def measure_in_a_process(script: str, args: argparse.Namespace, recipe: str, cache: str = "off", **changes: object) -> dict:
    """Run a script with `--alone` and return the line that it prints.

    Args:
        script: Path of the script.
        args: Its options, passed on as they are.
        recipe: The recipe that it measures.
        cache: Folder of compiled programs, or "off".
        changes: Options with other values than in `args`.
    """
    options = vars(args) | {"recipes": recipe, "alone": True} | changes
    words = [
        word
        for name, value in options.items()
        if value is not None and value is not False
        for word in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"} | {CACHE_VARIABLE: cache}
    run = subprocess.run([sys.executable, script, *words], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


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


def time_first_call(function: jax.stages.Wrapped, *operands: object) -> tuple[Any, dict[str, float]]:
    """Compile a function and call it once.

    Args:
        function: What `jax.jit` returns.
        operands: Its arguments.

    Returns:
        The compiled function; seconds of tracing and lowering, of compiling, and of the call, and CPU seconds of the first two together
        and of the call.
    """
    marks = []
    mark = lambda: marks.append((time.perf_counter(), time.process_time()))
    mark()
    lowered = function.lower(*operands)
    mark()
    compiled = lowered.compile()
    mark()
    jax.block_until_ready(compiled(*operands))
    mark()
    (trace, _), (compile_, _), (run, run_cpu) = ((after[0] - before[0], after[1] - before[1]) for before, after in pairwise(marks))
    times = {"trace_s": trace, "compile_s": compile_, "run_s": run, "compile_cpu_s": marks[2][1] - marks[0][1], "run_cpu_s": run_cpu}
    return compiled, times


def peak_megabytes() -> int:
    """The most memory that this process has had."""
    import resource  # missing on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20)


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
