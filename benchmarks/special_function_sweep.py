"""Are the special functions those of this GPU? `python benchmarks/special_function_sweep.py`, on a machine with an NVIDIA GPU.

The GPU's own instruction and the model compute all 2^32 operands of each function, with `.ftz` and without; all pairs of f16 and bf16
operands; all upper words of the f64 seeds; and drawn operands of the divisions. The table has the words that differ, NaN words included,
and the first operand of which they do. `--record FOLDER` keeps the words of `tanh.approx` there
instead, as `tanh_f32_*.xz` and `tanh_narrow.npz`.
"""

import lzma
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, describe_machine, finish
from jax import Array

from tcemu.engine.arithmetic import special_functions as modelled
from tcemu.engine.backends.cuda.xla_launch import KernelEntry, launch, route

THREADS, CHUNK = 256, 1 << 26
SIGN, KEPT = np.uint32(1 << 31), np.uint32(0x807FFFFF)  # KEPT: all but an f32 code's exponent
KERNEL = """
extern "C" __global__ void instruction(const unsigned *x, const unsigned *y, unsigned *result) {
    unsigned i = blockIdx.x * 256u + threadIdx.x, a = x[i], b = y[i], d, e;
    BODY
    result[i] = d;
}
"""
UPPER_BODY = """
    unsigned low;
    asm("{ .reg .f64 s, t; mov.b64 s, {%3, %2}; OPCODE t, s; mov.b64 {%1, %0}, t; }" : "=r"(d), "=r"(low) : "r"(a), "r"(b));
    d |= low != 0; e = 0;
"""


NARROW: dict[str, Callable[[Array], Array]] = {
    "ex2.approx.f16": modelled.NARROW["ex2", "f16"],
    "ex2.approx.ftz.bf16": modelled.NARROW["ex2", "bf16"],
    "tanh.approx.f16": modelled.NARROW["tanh", "f16"],
    "tanh.approx.bf16": modelled.NARROW["tanh", "bf16"],
}


def instruction(opcode: str, operands: int = 1) -> Callable[..., Array]:
    """Return the GPU's own instruction as a function of uint32 words."""
    kind = opcode.rpartition(".")[2]
    if kind == "f64":
        body = UPPER_BODY.replace("OPCODE", opcode)
    elif kind in ("f16", "bf16"):
        body = f'e = 0; asm("{{ .reg .b16 s, t; cvt.u16.u32 s, %1; {opcode} t, s; cvt.u32.u16 %0, t; }}" : "=r"(d) : "r"(a));'
    elif kind == "f32":
        body = f'float u; asm("{opcode} %0, %1{", %2" * (operands - 1)};" : "=f"(u) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));'
        body += " d = __float_as_uint(u); e = 0;"
    else:
        body = f'e = 0; asm("{opcode} %0, %1;" : "=r"(d) : "r"(a));'
    entry = KernelEntry("instruction", KERNEL.replace("BODY", body), THREADS)

    def run(x: Array, y: Array | None = None) -> Array:
        return launch(entry, x.size // THREADS, jax.ShapeDtypeStruct(x.shape, jnp.uint32), x, x if y is None else y)[0]

    return run


def paired(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a function of 16-bit codes on both halves of a word."""
    return lambda x: function(x & 0xFFFF) | (function(x >> 16) << 16)


def with_flush(function: Callable[..., Array], flush: bool) -> Callable[..., Array]:
    return lambda *operands: function(*operands, flush)


def all_words(chunk: int, _: Array) -> tuple[Array]:
    return (jnp.uint32(chunk * CHUNK) + jnp.arange(CHUNK, dtype=jnp.uint32),)


def drawn_words(chunk: Array, key: Array) -> tuple[Array, Array]:
    """Draw two words: in half of the cases all bits, in the other half exponents at most 30 apart or at an end of the range."""
    keys = jax.random.split(jax.random.fold_in(key, chunk), 5)
    a, b, near, ends = (jax.random.bits(each, (CHUNK,), jnp.uint32) for each in keys[:4])
    exponent = jnp.where(ends & 1 == 0, (a >> 23) & 0xFF, jnp.where(ends & 2 == 0, (ends >> 4) % 30, 225 + (ends >> 4) % 30))
    other = jnp.clip(exponent.astype(jnp.int32) + (near % 61).astype(jnp.int32) - 30, 0, 255).astype(jnp.uint32)
    is_near = jax.random.bits(keys[4], (CHUNK,), jnp.uint32) & 1 == 0
    return jnp.where(is_near, (a & KEPT) | (exponent << 23), a), jnp.where(is_near, (b & KEPT) | (other << 23), b)


def compare(opcode: str, model: Callable[..., Array], chunks: int, operands: int = 1) -> tuple[int, str]:
    """Return how many words differ in `chunks` calls, and the first operands of which they do, with both words."""
    drawn, own = drawn_words if operands == 2 else all_words, instruction(opcode, operands)

    @jax.jit
    def differing(chunk: Array, key: Array) -> tuple[Array, Array]:
        given = drawn(chunk, key)
        words, expected = model(*given), own(*given)
        wrong = words != expected
        at = jnp.argmax(wrong)
        return wrong.sum(dtype=jnp.uint32), jnp.stack([*(x[at] for x in given), words[at], expected[at]])

    results = [differing(jnp.uint32(chunk), jax.random.key(0)) for chunk in range(chunks)]
    counts = [int(count) for count, _ in results]
    first = next((" ".join(f"{int(word):#010x}" for word in words) for count, (_, words) in zip(counts, results, strict=True) if count), "")
    return sum(counts), first


def rows() -> list[tuple[str, Callable[..., Array], int, int]]:
    """Return opcode, model, calls and operands of each comparison."""
    whole = (1 << 32) // CHUNK
    listed: list[tuple[str, Callable[..., Array], int, int]] = []
    for ftz in (".ftz", ""):
        for name, function in modelled.UNARY.items():
            listed.append((f"{name}.approx{ftz}.f32", with_flush(function, bool(ftz)), whole, 1))
        for name, division in modelled.DIVISIONS.items():
            listed.append((f"{name}{ftz}.f32", with_flush(division, bool(ftz)), 16, 2))
    listed.append(("tanh.approx.f32", modelled.tanh, whole, 1))
    listed += [
        (f"{name}.approx.ftz.f64", function, whole, 1) for name, function in (("rcp", modelled.rcp_upper), ("rsqrt", modelled.rsqrt_upper))
    ]
    for opcode, function in NARROW.items():
        listed.append((opcode, lambda x, function=function: function(x & 0xFFFF), 1, 1))
        listed.append((opcode + "x2", paired(function), whole, 1))
    return listed


def record_tanh(folder: Path) -> None:
    """Keep what determines `tanh.approx`: all words of the f32 exponents where it is neither x nor 1, and all of f16 and bf16.

    The words of an exponent are kept as differences, compressed, several exponents a file.
    """
    own = jax.jit(instruction("tanh.approx.f32"))
    span = 1 << 23

    def words(exponent: int, sign: int = 0) -> Array:
        return own(jnp.uint32((sign << 31) | (exponent + 127) << 23) + jnp.arange(span, dtype=jnp.uint32))

    kept = {}
    for exponent in range(-127, 129):
        upper, lower = words(exponent), words(exponent, 1)
        given = jnp.uint32((exponent + 127) << 23) + jnp.arange(span, dtype=jnp.uint32)
        odd, same, ones = (int(x) for x in (((lower ^ upper) != SIGN).sum(), (upper == given).sum(), (upper == 0x3F800000).sum()))
        falls = int((upper[1:].astype(jnp.int32) < upper[:-1].astype(jnp.int32)).sum())
        steps = int((upper[1:] != upper[:-1]).sum())
        print(f"2^{exponent}: not odd {odd}, equal to x {same}, equal to 1 {ones}, falls {falls}, changes {steps}")
        if same < span and ones < span and exponent < 128:
            kept[exponent] = np.asarray(upper)
    parts = [sorted(kept)[i::6] for i in range(6)]

    def write(part: int) -> None:
        names = parts[part]
        data = b"".join(np.diff(kept[name], prepend=np.uint32(0)).astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes() for name in names)
        (folder / f"tanh_f32_{part}.xz").write_bytes(lzma.compress(data, preset=4))
        print(part, names, (folder / f"tanh_f32_{part}.xz").stat().st_size)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    codes = jnp.arange(1 << 16, dtype=jnp.uint32)
    narrow = {kind: np.asarray(jax.jit(instruction(f"tanh.approx.{kind}"))(codes)).astype(np.uint16) for kind in ("f16", "bf16")}
    pairs = {}
    for kind in narrow:
        both = jax.jit(instruction(f"tanh.approx.{kind}x2"))
        one = jnp.asarray(narrow[kind]).astype(jnp.uint32)
        pairs[kind] = sum(
            int((both((x := all_words(chunk, codes)[0])) != (one[x & 0xFFFF] | (one[x >> 16] << 16))).sum()) for chunk in range(64)
        )
    print("words of x2 that are not those of two single ones:", pairs)
    np.savez_compressed(folder / "tanh_narrow.npz", **narrow)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--record", metavar="FOLDER", type=Path, help="keep the words of tanh.approx there")
    args = parser.parse_args()
    if missing := route().missing:
        raise SystemExit(f"this needs an NVIDIA GPU: {missing}")
    machine = describe_machine()
    if args.record:
        record_tanh(args.record)
        return 0
    print(f"{'opcode':>24} {'operands':>11} {'differ':>10} {'s':>6}  first operands, model, GPU")
    lines, wrong = [], 0
    for opcode, model, chunks, operands in rows():
        begun = time.perf_counter()
        differ, first = compare(opcode, model, chunks, operands)
        seconds = time.perf_counter() - begun
        lines.append({"opcode": opcode, "operands": chunks * CHUNK, "differ": differ, "first": first, "seconds": seconds})
        print(f"{opcode:>24} {chunks * CHUNK:>11} {differ:>10} {seconds:>6.1f}  {first}", flush=True)
        wrong += differ
    return finish(args, machine, lines, wrong, f"{sum(line['operands'] for line in lines)} words")


if __name__ == "__main__":
    sys.exit(main())
