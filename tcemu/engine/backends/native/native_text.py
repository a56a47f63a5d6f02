"""The texts of the kernels that reduce K with an instruction: the files of `kernels/`, after their parameters."""

from dataclasses import replace
from functools import cache
from importlib import resources
from typing import NamedTuple

from tcemu.engine.backends.native.native_statement import words_per_register
from tcemu.engine.formats.number_formats import F16, F32
from tcemu.engine.isa.families import MatrixMultiply, spell

MACHINE_ENDS, STATEMENT_ENDS = "// ---- end of the machine", "// ---- end of the statement"  # what a test puts its own in the place of
CODES = {1: "u8", 2: "u16", 4: "u32"}
LINE = 128  # bytes along K of a tile of `wgmma`
ROWS, ATOM = 128, 1024  # rows of a block of `wgmma.cu`; bytes to which its ring is aligned
THREADS = 288
MOST_REGISTERS = 192  # registers for the fragments of a warp of `mma.cu`
RING = 192 << 10  # bytes of the ring's stages


class WgmmaKernelSpec(NamedTuple):
    op: MatrixMultiply  # its N is of no account
    columns: int  # columns of D of a block
    promoted: bool = False
    scaled: bool = False  # promoted sums are multiplied by block scales

    @property
    def stages(self) -> int:
        return RING // ((ROWS + self.columns) * LINE)

    @property
    def shared_bytes(self) -> int:
        """The ring, its barriers, and room to align it."""
        return self.stages * ((ROWS + self.columns) * LINE + 16) + ATOM


@cache
def place_kernel_text(size: int, lines: int) -> str:
    """The text of `place.cu`, for codes of `size` bytes and tiles of `lines` lines."""
    head = [_file("machine"), MACHINE_ENDS, f"typedef {CODES[size]} Code;", f"constexpr int LINES = {lines};"]
    return "\n".join([*head, MACHINE_ENDS, STATEMENT_ENDS, _file("place")])


@cache
def wgmma_kernel_text(kernel: WgmmaKernelSpec) -> str:
    op = replace(kernel.op, n=kernel.columns)
    count = op.register_count("d")
    flags = [f"#define PROMOTED {int(kernel.promoted)}", f"#define SCALED {int(kernel.scaled)}"]
    flags += [f"#define ADDENDS {_addends(kernel)}"]
    numbers = {"TILE_N": kernel.columns, "STAGES": kernel.stages, "ACCUMULATORS": count, "PAIRS": kernel.columns // 4}
    constants = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    head = [_file("machine"), MACHINE_ENDS, *flags, *constants, *_accumulator(op), MACHINE_ENDS]
    return "\n".join([*head, _statement(op, count), STATEMENT_ENDS, _file("wgmma")])


class MmaKernelSpec(NamedTuple):
    op: MatrixMultiply
    down: int  # fragments of D, of a warp
    across: int

    @classmethod
    def choose(cls, op: MatrixMultiply, rows: int, columns: int) -> "MmaKernelSpec":
        """Return the parameters for a D of `rows` x `columns` fragments. The larger a warp's part, the less is loaded."""
        a, b, d = (op.register_count(name) for name in "abd")
        for down, across in ((4, 8), (4, 4), (2, 4), (2, 2)):
            if rows >= down and columns >= across and down * across * d + down * a + across * b <= MOST_REGISTERS:
                return cls(op, down, across)
        return cls(op, 1, 1)


@cache
def mma_kernel_text(kernel: MmaKernelSpec) -> str:
    op = kernel.op
    width = words_per_register(op, "d")
    counts = {name: op.register_count(name) // width for name in "abd"}
    numbers = {f"{name.upper()}_REGISTERS": count for name, count in counts.items()}
    numbers |= {"DOWN": kernel.down, "ACROSS": kernel.across}
    constants = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    head, _, rest = _file("mma").partition("STATEMENT\n")
    types = f"typedef {'u64' if width == 2 else 'u32'} Word;"
    statement = _statement_of_warp(op, counts, "l" if width == 2 else "r")
    return "\n".join([_file("machine"), MACHINE_ENDS, types, *constants, head, MACHINE_ENDS, statement, STATEMENT_ENDS, rest])


def _statement_of_warp(op: MatrixMultiply, counts: dict[str, int], kind: str) -> str:
    """`multiply`, the instruction on the registers of fragments: d = a·b + d."""
    d, a, b = counts["d"], counts["a"], counts["b"]
    listed = lambda first, count: "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"
    constraints = lambda name, count, sign: ", ".join(f'"{sign}{kind}"({name}.r[{i}])' for i in range(count))
    operands = f"{listed(0, d)}, {listed(d, a)}, {listed(d + a, b)}, {listed(0, d)}"
    return f"""
__device__ __forceinline__ void multiply(D &d, const A &a, const B &b) {{
    asm volatile("{spell(op)} {operands};"
                 : {constraints("d", d, "+")} : {constraints("a", a, "")}, {constraints("b", b, "")});
}}
"""


def _addends(kernel: WgmmaKernelSpec) -> str:
    if not kernel.promoted:
        return "const Result *c,"
    return "const float *scales_a, const float *scales_b," if kernel.scaled else ""


def _accumulator(op: MatrixMultiply) -> list[str]:
    """The types of a lane's accumulators and of D's codes, and how two neighbours go from one to the other."""
    if op.d == F16:
        types, put = "typedef u32 Accumulator; typedef u16 Result;", "sum[pair] = x | (u32)y << 16;"
        get = "x = (Result)sum[pair], y = (Result)(sum[pair] >> 16);"
    elif op.d == F32:
        types, put = (
            "typedef float Accumulator; typedef u32 Result;",
            "sum[2 * pair] = __uint_as_float(x), sum[2 * pair + 1] = __uint_as_float(y);",
        )
        get = "x = __float_as_uint(sum[2 * pair]), y = __float_as_uint(sum[2 * pair + 1]);"
    else:
        types, put = "typedef u32 Accumulator; typedef u32 Result;", "sum[2 * pair] = x, sum[2 * pair + 1] = y;"
        get = "x = sum[2 * pair], y = sum[2 * pair + 1];"
    inline = "__device__ __forceinline__ void"
    return [
        types,
        f"{inline} set_pair(Accumulator (&sum)[ACCUMULATORS], int pair, Result x, Result y) {{ {put} }}",
        f"{inline} get_pair(const Accumulator (&sum)[ACCUMULATORS], int pair, Result &x, Result &y) {{ {get} }}",
    ]


def _statement(op: MatrixMultiply, count: int) -> str:
    """`multiply`, the instruction with A and B in shared memory; and `hold`, across which no accumulator is moved."""
    kind = "f" if op.d == F32 else "r"
    registers = ", ".join(f"%{i}" for i in range(count))
    held = ", ".join(f'"+{kind}"(d[{i}])' for i in range(count))
    values = {"imm_scale_a": "1", "imm_scale_b": "1", "imm_trans_a": "0", "imm_trans_b": "0"}
    immediates = [values[name] for name in op.operand_forms[0] if name in values]
    operands = ", ".join([f"{{{registers}}}", f"%{count}", f"%{count + 1}", "p", *immediates])
    return f"""
__device__ __forceinline__ void multiply(Accumulator (&d)[ACCUMULATORS], u64 a, u64 b, int keep) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; {spell(op)} {operands}; }}"
                 : {held} : "l"(a), "l"(b), "r"(keep));
}}
__device__ __forceinline__ void hold(Accumulator (&d)[ACCUMULATORS]) {{ asm volatile("" : {held} :: "memory"); }}
"""


@cache
def _file(name: str) -> str:
    return resources.files("tcemu.engine.backends.native").joinpath("kernels", f"{name}.cu").read_text(encoding="utf-8")
