"""Do several JAX processes give the bits of one? `python benchmarks/several_gpus.py`: one process for each NVIDIA GPU here.

`JAX_PLATFORMS=cpu python benchmarks/several_gpus.py --processes 2 --size 64` does the same on CPUs. A first process computes each item
alone, on one device. Then the script starts the processes of one job (`jax.distributed` on this machine), and each item is computed by
all of them. Printed are the words that differ, whether all processes compiled the same program, and seconds. An item that takes longer
than `--limit` is reported with the place where each process stands, the processes are killed, and the next item is taken by new ones.
"""

import faulthandler
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial, reduce
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from harness import arguments, finish
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tcemu
from tcemu.products import Flash

ALL, FIRST, SECOND = PartitionSpec(), PartitionSpec("d"), PartitionSpec(None, "d")  # replicated; an axis that is sharded
FUZZED = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
STACK_SECONDS = 1.0  # for a process to write where it stands
TAIL = 1500  # characters of a failed process's last words


class Item(NamedTuple):
    """A function of arrays, and how each array is sharded over the processes' devices."""

    fn: Callable[..., Any]
    operands: tuple[Any, ...]
    specs: tuple[Any, ...]


# ---- what is computed


def product_items(size: int) -> dict[str, Callable[[], Item]]:
    """Items whose results are sharded arrays, by name. `size`: M, N and K of the products."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    half, short = size // 2, max(size // 8, 16)

    def gradients() -> Item:
        loss = lambda w, x: (tcemu.matmul(x, w, recipe="fp8 on H100") ** 2).sum()
        return Item(jax.grad(loss, (0, 1)), (draw(size, half), draw(size, size)), (ALL, FIRST))

    def training_step() -> Item:
        def loss(weights: dict, x: jax.Array, labels: jax.Array) -> jax.Array:
            scores = jax.nn.gelu(x @ weights["up"]) @ weights["down"]
            return -(jax.nn.log_softmax(scores) * labels).sum()

        emulated = tcemu.emulate(loss, "mxfp8 on B200")
        step = lambda weights, x, labels: jax.tree.map(lambda w, g: w - 0.01 * g, weights, jax.grad(emulated)(weights, x, labels))
        labels = np.eye(32, dtype=np.float32)[np.arange(size) % 32]
        return Item(step, ({"up": draw(half, half), "down": draw(half, 32)}, draw(size, half), labels), (ALL, FIRST, FIRST))

    def attention() -> Item:
        fn = partial(tcemu.attention, recipe="fp8 on H100", flash=Flash(block_k=32), is_causal=True)
        return Item(fn, tuple(draw(4, short, 2, 32) for _ in "qkv"), (FIRST,) * 3)

    def ragged() -> Item:
        sizes = np.array([size // 4, 0, size // 2, size // 8], np.int32)  # the last rows belong to no group
        return Item(
            tcemu.ragged_dot("bf16 on H100"), (draw(size, half), draw(4, half, half), sizes), (ALL, PartitionSpec(None, None, "d"), ALL)
        )

    gemm = partial(tcemu.gemm, op="f16", target="H100")
    nvfp4 = partial(tcemu.matmul, recipe="nvfp4 on B200")
    return {
        "gemm, N sharded": lambda: Item(gemm, (draw(size, size), draw(size, size)), (ALL, SECOND)),
        "gemm, batch sharded": lambda: Item(gemm, (draw(4, half, half), draw(4, half, half)), (FIRST, FIRST)),
        "matmul nvfp4, N sharded": lambda: Item(nvfp4, (draw(size, size), draw(size, size)), (ALL, SECOND)),
        "matmul fp8, gradients": gradients,
        "training step, emulate": training_step,
        "attention, batch sharded": attention,
        "ragged_dot, N sharded": ragged,
    }


def compute_product(item: Item, repeats: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Compute an item on all devices of all processes. Returns whole results, a digest of the program, and seconds."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    start = time.perf_counter()

    def place(x: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    placed = [jax.tree.map(partial(place, spec=spec), x) for x, spec in zip(item.operands, item.specs, strict=True)]
    compiled = jax.jit(item.fn).lower(*placed).compile()
    result = jax.block_until_ready(compiled(*placed))
    first, later = time.perf_counter() - start, []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*placed))
        later.append(time.perf_counter() - start)
    gathered = jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, ALL))(jax.tree.leaves(result))
    program = sha256((compiled.as_text() or "").encode()).hexdigest()[:12]
    return [np.asarray(leaf.addressable_data(0)) for leaf in gathered], {"first_s": first, "later_s": min(later), "program": program}


def compute_fuzz(cases: int, folder: Path) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Compare two GPUs on drawn cases, with a file that the first process owns."""
    out, start = folder / f"fuzz-{jax.process_count()}", time.perf_counter()
    compare = partial(tcemu.fuzz.find_mismatches, FUZZED, "sm_80", "sm_90a", cases=cases, seed=1, out=out)
    run, from_file = compare(), compare()
    counts = [(x.done, x.wrong_cases, x.wrong_outputs, *x.first, *str(x).encode()) for x in (run, from_file)]
    return [np.asarray(count, np.int64) for count in counts], {"first_s": time.perf_counter() - start, "later_s": run.seconds}


def compute_alone(size: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Each process by itself: an eager product on its own device, and a fingerprint, whose candidates are computed on a CPU."""
    start, rng = time.perf_counter(), np.random.default_rng(1)
    a, b = rng.standard_normal((size, size), np.float32), rng.standard_normal((size, 16), np.float32)
    product = tcemu.gemm(a, b, op="bf16", target="A100")
    found = tcemu.replay.fingerprint(_add_in_lanes, 8, 8, 40)
    assert found.recipe is not None, found
    values = [np.asarray(product), np.frombuffer(str(found).encode(), np.uint8)]
    return values, {"first_s": time.perf_counter() - start, "later_s": 0.0}


def _add_in_lanes(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """A kernel with four lanes, as a black box."""
    products = x.astype(np.float32)[:, :, None] * w.astype(np.float32)
    lanes = reduce(np.add, [products[:, k : k + 4] for k in range(0, products.shape[1], 4)])
    return ((lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])).astype(np.float16)


# ---- one process of the job


def work(args: Any) -> None:
    """Compute the items in order, and print a line of JSON before and after each."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank, count, address = args.worker
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(rank))
    folder, products = Path(args.folder), product_items(args.size)

    def say(**facts: Any) -> None:
        print(json.dumps(facts), flush=True)

    say(ready=jax.process_count(), device=f"{jax.local_devices()[0].platform} ({jax.local_devices()[0].device_kind})")
    for name in args.items:
        say(begins=name)
        if name in products:
            values, facts = compute_product(products[name](), args.repeats)
        elif name == FUZZ:
            values, facts = compute_fuzz(args.cases, folder)
        else:
            values, facts = compute_alone(min(args.size, 256))
        path = folder / f"{list(item_names()).index(name)}.npz"
        if int(count) == 1:
            np.savez(path, *values)  # type: ignore[arg-type]
        with np.load(path) as saved:
            expected = [saved[key] for key in saved.files]
        pairs = [
            (x.reshape(-1).view(f"u{x.itemsize}"), y.reshape(-1).view(f"u{y.itemsize}")) for x, y in zip(values, expected, strict=True)
        ]
        assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs), name
        say(ends=name, words=sum(x.size for x, _ in pairs), wrong=sum(int((x != y).sum()) for x, y in pairs), **facts)


# ---- the job


class Failed(NamedTuple):
    """An item that did not end, and why."""

    item: str
    reason: str


FUZZ, ALONE = "fuzz.find_mismatches", "each process alone"


def item_names() -> tuple[str, ...]:
    return (*product_items(64), FUZZ, ALONE)


def run_job(args: Any, count: int, items: list[str], folder: Path) -> tuple[dict[str, list[dict]], Failed | None]:
    """Start the processes of one job, and collect what each prints of each item, until all have ended or one fails or is late."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    lines: queue.Queue[tuple[int, str]] = queue.Queue()
    words = [
        "--size",
        str(args.size),
        "--cases",
        str(args.cases),
        "--repeats",
        str(args.repeats),
        "--folder",
        str(folder),
        "--items",
        *items,
    ]
    processes = []
    for rank in range(count):
        environment = {"CUDA_VISIBLE_DEVICES": str(rank), **({"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"} if count > 1 else {})}
        command = [sys.executable, __file__, *words, "--worker", str(rank), str(count), address]
        with (folder / f"errors-{rank}").open("w") as errors:
            processes.append(
                subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1)
            )
    for rank, process in enumerate(processes):
        threading.Thread(target=lambda rank=rank, out=process.stdout: [lines.put((rank, line)) for line in out or ()], daemon=True).start()
    found: dict[str, list[dict]] = {name: [] for name in items}
    waits_for, since = items[0], time.monotonic()
    try:
        while any(len(of_all) < count for of_all in found.values()):
            try:
                _, line = lines.get(timeout=0.1)
            except queue.Empty:
                ended = [rank for rank, process in enumerate(processes) if process.poll() and lines.empty()]
                if ended:
                    return found, Failed(
                        waits_for, f"process {ended[0]} ended with {processes[ended[0]].poll()}: {_tail(folder, ended[0])}"
                    )
                if time.monotonic() - since > args.limit:
                    for process in processes:
                        process.send_signal(signal.SIGUSR1)
                    time.sleep(STACK_SECONDS)
                    places = "".join(f"\nprocess {rank} stands here:\n{_tail(folder, rank)}" for rank in range(count))
                    return found, Failed(waits_for, f"not ended within {args.limit:g} s{places}")
                continue
            facts = json.loads(line) if line.startswith("{") else {}
            if "ends" in facts:
                found[facts["ends"]].append(facts)
                waits_for, since = next((name for name in items if len(found[name]) < count), items[-1]), time.monotonic()
        for process in processes:
            process.wait(args.limit)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found, None


def _tail(folder: Path, rank: int) -> str:
    return (folder / f"errors-{rank}").read_text(errors="replace")[-TAIL:].strip()


def run_items(args: Any, count: int, folder: Path, report: Callable[[str, list[dict], str], None]) -> None:
    """Run all items in jobs of `count` processes: a new job after each failure."""
    items = list(args.items)
    while items:
        found, failed = run_job(args, count, items, folder)
        for name in items:
            if len(found[name]) == count:
                report(name, found[name], "")
        if failed is not None:
            report(failed.item, found[failed.item], failed.reason)
        items = [name for name in items if len(found[name]) < count and (failed is None or name != failed.item)]


def count_gpus() -> int:
    """Count the NVIDIA GPUs by their driver's files: this process itself must not take one."""
    if "cuda" not in os.environ.get("JAX_PLATFORMS", "cuda"):
        return 0
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").iterdir())


def main() -> int:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--processes", type=int, help="by default one for each NVIDIA GPU, or two where there is none")
    parser.add_argument("--size", type=int, default=4096, help="M, N and K of the products: a multiple of 64")
    parser.add_argument("--cases", type=int, default=20_000, help="cases of the differential run")
    parser.add_argument("--limit", type=float, default=90.0, metavar="SECONDS", help="for each item")
    parser.add_argument("--items", nargs="+", choices=item_names(), default=item_names(), metavar="ITEM")
    parser.add_argument("--worker", nargs=3, metavar=("RANK", "PROCESSES", "ADDRESS"), help="used by the script itself")
    parser.add_argument("--folder", help="likewise")
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    gpus = count_gpus()
    processes = args.processes or gpus or 2
    print(f"{processes} processes, {gpus} NVIDIA GPUs, size {args.size}, jax {jax.__version__}")
    print(f"{'item':26} {'processes':>9} {'wrong of':>10} {'words':>12} {'programs':>9} {'first s':>9} {'later s':>9}")
    rows, failures = [], []

    def report(name: str, of_all: list[dict], reason: str, *, count: int) -> None:
        if reason:
            failures.append(name)
            print(f"{name:26} {count:>9} FAILED: {reason}", flush=True)
            return
        texts = {facts.get("program") for facts in of_all}
        wrong, words = (sum(facts[key] for facts in of_all) for key in ("wrong", "words"))
        first, later = (max(facts[key] for facts in of_all) for key in ("first_s", "later_s"))
        row = {"item": name, "processes": count, "wrong": wrong, "words": words, "programs": len(texts), "first_s": first, "later_s": later}
        rows.append(row)
        print(f"{name:26} {count:>9} {wrong:>10} {words:>12} {len(texts):>9} {first:>9.2f} {later:>9.4f}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for count in (1, processes):
            run_items(args, count, Path(folder), partial(report, count=count))
    wrong = sum(row["wrong"] for row in rows) + sum(row["programs"] - 1 for row in rows) + len(failures)
    machine = {"processes": processes, "gpus": gpus, "size": args.size, "jax": jax.__version__}
    return finish(args, machine, rows, wrong, "the processes' words, programs and items against one process", "faults")


if __name__ == "__main__":
    raise SystemExit(main())
