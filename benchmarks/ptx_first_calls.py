"""How much CPU time does the first call of a kernel's PTX take, on a fresh machine and in a later process?

`python benchmarks/ptx_first_calls.py` runs each kernel of tests/ptx_kernels that is named in SLOWEST in two processes with one folder of
compiled statements, which is empty before the first. Seconds are those of all threads of the process, without imports; results are
compared with the words that an H200 gave.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import arguments, describe_machine, finish

from tcemu.base.stored_code import CACHE_VARIABLE

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ptx_kernels.manifest import KERNELS
from ptx_kernels.replay import replay_kernel
from ptx_kernels.words import differing, recorded_buffers

TARGET = "sm_90a"
SLOWEST = (  # the twenty kernels whose first calls took longest on 2026-11-27, the slowest first
    "triton_matmul_tma", "atomics", "tma_gemm", "triton_attention", "tma_boxes", "bulk_round_trip", "specialised", "calls", "layer_norm",
    "triton_matmul_fp8", "attention", "doubles", "floats", "approximations", "triton_layer_norm", "triton_softmax", "gelu", "triton_matmul",
    "halves", "cutlass_gemm",
)  # fmt: skip
PROCESSES = ("first", "later")


def measure(name: str) -> dict:
    """Run a kernel twice in this process, and return the CPU seconds of each call and the number of wrong buffers."""
    kernel = next(each for each in KERNELS if each.name == name)
    seconds, wrong = [], 0
    for _ in range(2):
        start = time.process_time()
        found = replay_kernel(kernel, TARGET)
        seconds.append(time.process_time() - start)
    for place, recorded in enumerate(recorded_buffers(kernel, TARGET)):
        wrong += bool(differing(kernel, place, found[place], recorded))
    return {"first_call": seconds[0], "second_call": seconds[1], "wrong": wrong}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--kernels", nargs="+", default=SLOWEST, metavar="NAME")
    parser.add_argument("--alone", metavar="NAME", help="one kernel, in this process, as a line of JSON")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.alone)))
        return 0
    machine, lines = describe_machine(), []
    print(f"{'CPU seconds':20} {'first process':>14} {'later process':>14} {'second call':>12}")
    for name in args.kernels:
        with tempfile.TemporaryDirectory() as folder:
            environment = {each: value for each, value in os.environ.items() if each != "JAX_COMPILATION_CACHE_DIR"}
            command = [sys.executable, __file__, "--alone", name]
            for process in PROCESSES:
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment | {CACHE_VARIABLE: folder})
                lines.append({"kernel": name, "process": process, **json.loads(done.stdout.splitlines()[-1])})
        first, later = lines[-2:]
        print(f"{name:20} {first['first_call']:14.2f} {later['first_call']:14.2f} {later['second_call']:12.2f}", flush=True)
    return finish(args, machine, lines, sum(line["wrong"] for line in lines), "the words of an H200")


if __name__ == "__main__":
    sys.exit(main())
