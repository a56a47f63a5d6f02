"""What is still done late? `python benchmarks/first_calls.py`: seconds of calls 1 to 6 of a product, what JAX traced and compiled in each.

Each way to call and each setting runs in a process of its own. On a GPU the settings tell the causes of a slow second call apart:
without command buffers XLA makes no CUDA graph, which it otherwise does in the second call; with eager loading the driver loads each
kernel before its first launch; "warm" runs plain products between the first call and the second, so that the GPU's clock is high.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, finish

import tcemu
from tcemu.base.jax_internals import COMPILE_EVENTS

CALLS = 6
WARM_PRODUCTS = 50
WAYS = ("plain jit", "jit", "jit, sharded", "eager", "eager, NumPy")
SETTINGS = {  # environment variables, added to XLA_FLAGS or set
    "as it is": {},
    "no command buffers": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="},
    "eager loading": {"CUDA_MODULE_LOADING": "EAGER"},
    "warm": {"FIRST_CALLS_WARM": "1"},
}


def make_call(way: str, size: int, op: str, target: str) -> Callable[[], Any]:
    """Return a product of two matrices as a function without arguments."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), np.float32) for _ in "ab")
    gemm = partial(tcemu.gemm, op=op, target=target)
    if way == "eager, NumPy":
        return lambda: gemm(a, b)
    if way == "jit, sharded":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
        specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "d")
        x, y = (jax.device_put(v, jax.sharding.NamedSharding(mesh, spec)) for v, spec in zip((a, b), specs, strict=True))
    else:
        x, y = jax.device_put(a), jax.device_put(b)
    fn = {"plain jit": jax.jit(jnp.matmul), "eager": gemm}.get(way, jax.jit(lambda x, y: gemm(x, y)))
    return lambda: fn(x, y)


def measure(args: Any) -> None:
    """Call the product, and print a line of JSON for each call."""
    done: Counter[str] = Counter()

    def note(event: str, duration_secs: float, **facts: Any) -> None:
        if event.startswith(COMPILE_EVENTS):
            kind = event.removeprefix(COMPILE_EVENTS).removesuffix("_duration")
            done[f"{kind} {facts['fun_name']}" if "fun_name" in facts else kind] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    call = make_call(args.way, args.size, args.op, args.target)
    square = jax.jit(lambda x: x @ x)
    matrix = jax.block_until_ready(square(jnp.ones((args.size, args.size))))
    for number in range(1, CALLS + 1):
        if number == 2 and os.environ.get("FIRST_CALLS_WARM"):
            jax.block_until_ready([square(matrix) for _ in range(WARM_PRODUCTS)])
        done.clear()
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds = time.perf_counter() - start
        names = [f"{count} x {what}" if count > 1 else what for what, count in done.items()]
        print(json.dumps({"call": number, "seconds": seconds, "done": names}), flush=True)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--op", default="f16")
    parser.add_argument("--target", default="H100")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=tuple(SETTINGS), metavar="SETTING")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for each process")
    parser.add_argument("--way", help="used by the script itself")
    args = parser.parse_args()
    if args.way:
        measure(args)
        return 0
    print(f"{'setting':20} {'way':14} seconds of calls 1 to {CALLS}, and what was traced or compiled after the first")
    rows, late = [], 0
    for setting in args.settings:
        changes = SETTINGS[setting]
        flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), changes.get("XLA_FLAGS"))))
        for way in args.ways:
            command = [sys.executable, __file__, "--size", str(args.size), "--op", args.op, "--target", args.target, "--way", way]
            environment = os.environ | changes | ({"XLA_FLAGS": flags} if flags else {})
            try:
                run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=args.limit)
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                print(f"{setting:20} {way:14} FAILED: {str(error)[-200:]}")
                late += 1
                continue
            calls = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
            rows.append({"setting": setting, "way": way, "calls": calls})
            seconds = " ".join(f"{call['seconds']:.4f}" for call in calls)
            print(f"{setting:20} {way:14} {seconds}")
            for call in calls[1:]:
                if call["done"]:
                    late += 1
                    print(f"{'':35} call {call['call']}: {', '.join(call['done'])}")
    machine = {"jax": jax.__version__, "size": args.size}
    return finish(args, machine, rows, late, "calls after the first, which traced or compiled, or failed", "late calls")


if __name__ == "__main__":
    raise SystemExit(main())
