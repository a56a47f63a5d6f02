"""Runs every CUDA kernel once on the GPU that is here, at small odd shapes, beside the same call on the CPU.

For tools that watch a program's memory, which make it a hundred times slower:
`XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck --error-exitcode 9 python tests/every_kernel.py`
and the same with `--tool racecheck`. That allocator gives each array memory of its own, so that a step beyond its end is seen.
`--native`: the kernels of `execution("native")` too, which need a GPU of sm_90a. Arguments choose kernels by a part of their names;
`--shard 0/7` runs the first of seven shares of them, so that seven processes run all.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import kernel_cases, quantizer_cases, warp_cases

import tcemu
from tcemu.engine.arithmetic.integer_quotients import divide_on_integers, multiply_on_integers
from tcemu.engine.arithmetic.reduction import reduce_k
from tcemu.engine.backends import elementwise
from tcemu.engine.backends.cuda import matrix_kernels as cuda
from tcemu.formats import F32
from tcemu.operations.quantize import scaled_elements as quantizers
from tcemu.operations.quantize.scale_groups import GroupSizes
from tcemu.uses.fuzz import case_generator as generators

NATIVE = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2",
)
RECIPES = ("deepseek", "fp8")
DRAWN = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
    "wgmma.mma_async.sp.sync.aligned.m64n24k64.f32.e4m3.e5m2",
)
WARPGROUP = ("wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16", "wgmma.mma_async.sp.sync.aligned.m64n24k64.f32.e4m3.e5m2")
Case = tuple[str, Callable, Callable, list]  # its name, what runs on the GPU, what on the CPU, the operands


def matrix_cases() -> Iterator[Case]:
    for name, (model, *_) in kernel_cases.CASES.items():
        signature = kernel_cases.signature(name)
        kernels = cuda.find_matrix_kernels(model, signature)
        assert kernels is not None, name
        operands = list(kernel_cases.operands(name, True, 70, 45, 3 * signature.k, (2,)))
        portable = jax.jit(lambda *given, model=model, signature=signature: reduce_k(model, signature, *given))
        for kind, one in (("tile", kernels), ("integer", kernels._replace(tiling=None))):
            if kind == "integer" or one.tiling is not None:
                yield f"{kind}: {name}", jax.jit(lambda *given, one=one: cuda.multiply_by_kernels(one, *given)), portable, operands


def register_cases() -> Iterator[Case]:
    for spelling, target in warp_cases.KINDS:
        call, operands = warp_cases.mma_call(spelling, target, True, (5,))
        yield f"registers: {spelling} on {target}", call, call, operands
    for spelling in WARPGROUP:
        for place in ("registers", "memory"):
            call, operands = warp_cases.wgmma_call(spelling, place == "memory", True)
            yield f"registers: {spelling}, A in {place}", call, call, operands


def drawing_cases() -> Iterator[Case]:
    for spelling in DRAWN:
        op = tcemu.parse(spelling)

        def call(keys: jax.Array, op: tcemu.Instruction = op) -> jax.Array:
            made = generators.draw_operands(op, (keys[0], keys[1]))
            return jnp.concatenate([made[name].ravel().astype(jnp.uint32) for name in "abc"])

        yield f"draw: {spelling}", jax.jit(call), jax.jit(call), [np.random.default_rng(0).integers(0, 1 << 32, (2, 300), dtype=np.uint32)]


def product_cases(execution: str) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=shape).astype(np.float32) for shape in ((130, 300), (300, 75))]
    calls = {name: lambda a, b, name=name: tcemu.matmul(a, b, recipe=tcemu.get_recipe(name, backward="exact")) for name in RECIPES}
    if execution == "native":
        calls |= {op: lambda a, b, op=op: tcemu.gemm(a, b, op=op, target="sm_90a") for op in NATIVE}
    for name, call in calls.items():
        yield f"{execution}: {name}", lambda *given, call=call: call_with_execution(execution, call, *given), call, operands


def quantizer_cases_on_gpu() -> Iterator[Case]:
    sizes = GroupSizes(1, quantizer_cases.DEPTH)
    for case, (source, target, saturate, _) in quantizer_cases.CASES.items():
        kernel = partial(quantizers.round_with_kernel, source, target, saturate, sizes, "cuda")
        portable = partial(quantizer_cases.quantize_portably, case)
        yield f"quantize: {case}", jax.jit(kernel), jax.jit(portable), list(quantizer_cases.operands(case, 70, 45))
    words = [np.random.default_rng(0).integers(0, 1 << 32, shape, dtype=np.uint32) for shape in ((70, 45), (70, 1))]
    for name, kernel, portable in (
        ("sums by scales", elementwise.multiply_f32, multiply_on_integers),
        ("quotients", elementwise.divide_f32, divide_on_integers),
    ):
        yield f"quantize: {name}", jax.jit(partial(kernel, "cuda")), jax.jit(partial(portable, fmt=F32)), words


def call_with_execution(execution: str, call: Callable, *operands: Any) -> Any:
    with tcemu.execution(execution):
        return call(*operands)


def count_mismatches(case: Case) -> int:
    _, kernel, portable, operands = case
    results = []
    for call, platform in ((kernel, "cuda"), (portable, "cpu")):
        with jax.default_device(jax.devices(platform)[0]):
            results.append(np.asarray(call(*jax.device_put(operands, jax.devices(platform)[0]))))
    got, wanted = (np.ascontiguousarray(v).view(f"u{v.itemsize}") for v in results)
    return int((got != wanted).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--shard", default="0/1")
    args = parser.parse_args()
    shard, shards = map(int, args.shard.split("/"))
    native = product_cases("native") if args.native else ()
    every = chain(matrix_cases(), register_cases(), quantizer_cases_on_gpu(), drawing_cases(), product_cases("emulated"), native)
    named = (case for case in every if not args.names or any(part in case[0] for part in args.names))
    wrong = ran = 0
    for case in islice(named, shard, None, shards):
        start, bad = time.perf_counter(), count_mismatches(case)
        print(f"{bad:6d} mismatches  {time.perf_counter() - start:6.1f} s  {case[0]}", flush=True)
        wrong, ran = wrong + bad, ran + 1
    print(f"{wrong} mismatches in {ran} kernels")
    return 1 if wrong or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
