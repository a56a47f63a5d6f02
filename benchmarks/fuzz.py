"""How many cases does a differential run compare a second, end to end? `python benchmarks/fuzz.py`: generated, run by two models, compared.

Each line is the best of several runs of many turns in one call, after the first, which compiles and stands apart, with each core of a
CPU as a device, as `tcemu fuzz` has it. The sides are targets whose models differ: of two that are alike XLA would compute but one.
The first run's cases are run again at the end, and must give the same counts.

What limits it. GPU, m16n8k16 of f16: one kernel draws a case, computes both sides and compares, in 1,838 instructions of a warp (2,375
in kernels of their own). On an H200 it fills 73 % of the issue slots and of the pipe for logic and comparisons, which alone bounds it to
5.7e8 cases a second; the conversions of products to integers bound it to 8.1e8. The code must be small: with a loop for each set of
features of a kind, 68 KB of machine code in place of 41, warps waited 56 % of their time for instructions, at 2.4e8. CPU with AVX2: 10,740
instructions a case of f16, 5,110 of them for the sums, where each product is multiplied once and scaled, converted and added for each side,
and 2,600 for the elements; 21,730 for m16n8k32 of e4m3. 800 ns a case of f16 would be 4.5 instructions a cycle at 3 GHz.
"""

import time

import jax
from harness import arguments, describe_machine, finish

import tcemu
from tcemu.faces.commands.fuzz_commands import use_one_device_per_core
from tcemu.fuzz import KINDS, get_implementation
from tcemu.uses.fuzz.case_generator import generate
from tcemu.uses.fuzz.comparison_loop import make_chunk_runner

OPS = {  # name -> spelling and two sides
    "f16": ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_80", "sm_90a"),
    "bf16": ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "sm_80", "sm_90a"),
    "e4m3": ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "sm_89", "sm_90a"),
}


def main() -> int:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--cases", type=int, default=32768, help="in one call, as many at most as `tcemu fuzz` has in one")
    args = parser.parse_args()
    use_one_device_per_core()
    machine = describe_machine()
    print(f"{'':>12} {'coverage':>9} {'first call s':>13} {'cases/s':>10} {'generated alone/s':>18}")
    lines, wrong = [], 0
    for name, (spelling, left, right) in OPS.items():
        op = tcemu.parse(spelling)
        sides = get_implementation(op, left), get_implementation(op, right)
        alone = []
        for repeat in range(args.repeats + 1):
            start = time.perf_counter()
            jax.block_until_ready(generate(op, 0, repeat * args.cases, args.cases))
            alone.append(time.perf_counter() - start)
        for covering in (False, True):
            chunk = make_chunk_runner(op, *sides, KINDS, sides[0].model if covering else None, tuple(jax.devices()))
            turns, seconds, counts = min(chunk.max_iterations, max(1, args.cases // chunk.cases_per_iteration)), [], []
            for repeat in (*range(args.repeats + 1), 0):
                start = time.perf_counter()
                run = chunk.compare(0, repeat * chunk.cases_per_iteration * turns, chunk.cases_per_iteration * turns, turns)
                seconds.append(time.perf_counter() - start)
                counts.append((run.wrong_cases, run.wrong_outputs, run.first))
            wrong += counts[0] != counts[-1]
            rate, made = run.cases / min(seconds[1:]), args.cases / min(alone[1:])
            lines.append({"name": name, "coverage": covering, "first_call_s": seconds[0], "cases_per_s": rate, "generated_per_s": made})
            print(f"{name:>12} {'yes' if covering else 'no':>9} {seconds[0]:>13.2f} {rate:>10.2e} {made:>18.2e}", flush=True)
    return finish(args, machine, lines, wrong, "runs that were repeated", "other counts")


if __name__ == "__main__":
    raise SystemExit(main())
