"""The text of a kernel for one arithmetic: the files of `cuda/`, after the numbers that they are compiled for."""

from functools import cache
from importlib import resources
from math import prod
from typing import NamedTuple

from tcemu.arithmetic.model import ROUNDING_MODES, Model
from tcemu.arithmetic.order import Order
from tcemu.arithmetic.product_spec import ProductSpec
from tcemu.formats import BF16, F16, F32, F64, UE8M0, Format

FILES = {  # entry point of a text -> its files, in order
    "integer": ("machine", "decode", "step", "sums", "accumulators", "integer"),
    "warp": ("machine", "decode", "step", "sums", "accumulators", "lanes", "significands", "warp"),
    "prepare": ("machine", "decode", "sums", "prepared", "prepare"),
    "tile": ("machine", "decode", "step", "sums", "prepared", "align", "products", "tile"),
    "quantize": ("machine", "decode", "quantize"),
}
STEPS_OF_GROUPS = {"products": "groups"}  # where products are summed in groups
FLOATS = {"significands": "floats"}  # where a warp keeps factors as f32
OF_WARP = 3  # files of "warp" that need its tables
SPECIALS = {"none": "NO_SPECIALS", "ieee": "IEEE", "nan": "NAN_ONLY"}
CODES = {8: "u8", 16: "u16", 32: "u32"}
REACH, NEAR = 15, 12  # binades below the greatest exponents of a row and a column: those with a power, and those that a step may lie
DEFINED = ("scaled", "block_scaled")  # of Numbers, for the preprocessor: whether a kernel has these operands
MACHINE_ENDS = "// ---- end of the machine\n"
FACTORS_END = "// A factor under its block scale"  # in decode.cu: what comes before knows formats only
OF_BLOCK = 1024  # bytes of shared memory that are the driver's
BYTE = 0x80  # of the bytes of lowest bits: where the flag stands


class KernelNumbers(NamedTuple):
    """Numbers compiled into a text, besides the formats: a line `constexpr int NAME = value;` each, the name in capitals."""

    terms: int  # products of a step
    of_instruction: int
    of_group: int
    groups: int
    chain: int  # steps in a chain; 0 for none
    together: bool
    fraction_bits: int
    mantissas: int  # fraction bits of a product, or of a group's sum
    summed: int  # products that are added exactly, as one term; 0 for none
    floor: int
    kept: int  # fraction bits of a result
    rounding: str
    alignment: str
    rounded_again: bool
    scaled: bool
    promoted: int = 0  # instructions whose sum is promoted to f32; 0 for none
    block_scaled: bool = False  # promoted sums are multiplied by f32 scales of their blocks


class TileNumbers(NamedTuple):
    """Further numbers that `tile` is compiled for; its file and `prepare` explain each."""

    wide: bool  # sums in f64
    relative: bool  # exponents count from the greatest one of the line in the step
    base: int  # of the powers: 2^base
    offset: int  # exponent fields of their sums, divided by base, begin here
    power_of_a: int
    power_of_b: int
    low_bits_begin: int  # the exponents of lowest bits, of a product
    absent: int
    depth: int
    most: int  # binades
    least_unit: int
    least_tops: int
    floor_counts: bool
    row_tiles: int  # of a warp, in tiles of 16 x 8 elements of D
    column_tiles: int
    warps_down: int  # of a block
    warps_across: int
    steps_together: int
    ring: int  # stages in shared memory
    blocks: int  # of a multiprocessor, at least; bounds the registers of a thread
    unrolled: int
    pause: int  # tiles between which nothing is loaded ahead
    relative_reach: int = REACH
    near: int = NEAR

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_down * self.warps_across

    @property
    def lines(self) -> tuple[int, int]:
        """Rows and columns of D of a block."""
        return 16 * self.row_tiles * self.warps_down, 8 * self.column_tiles * self.warps_across


def kernel_numbers(model: Model, spec: ProductSpec) -> KernelNumbers | None:
    """The numbers of a model whose steps are fused dot-adds and known before tracing; else None."""
    if (model.step_kind, model.flush, model.nan, model.dealing) != (None, None, None, "pairs"):
        return None
    known = all(isinstance(v, int) for v in (model.terms, model.fraction_bits, model.floor)) and isinstance(model.result_bits, int | None)
    modes = all(isinstance(v, str) for v in (model.rounding, model.alignment))
    if not (known and modes) or model.result not in (F16, F32):
        return None
    if spec.d != model.result and (model.result, spec.d) != (F32, F16):
        return None
    order, k = Order.from_model(model, spec.k), spec.k
    assert isinstance(model.fraction_bits, int) and isinstance(model.floor, int)
    kept = model.result.mantissa_bits if model.result_bits is None else model.result_bits
    assert isinstance(kept, int)
    mantissas = spec.a.mantissa_bits + spec.b.mantissa_bits
    if model.summed is not None:  # in units of 2^least_exponent, and of the scales' last places
        mantissas += 2 * spec.require_scale().mantissa_bits - spec.a.min_exponent - spec.b.min_exponent
    return KernelNumbers(
        order.step_size(k), k, k // order.groups, order.groups, order.steps_per_chain(k) or 0, order.together, model.fraction_bits,
        mantissas, model.summed or 0, model.floor, kept, str(model.rounding), str(model.alignment),
        spec.d != model.result, spec.scale is not None,
    )  # fmt: skip


def tile_numbers(model: Model, spec: ProductSpec) -> TileNumbers | None:
    """The numbers for `tile`, for a model that it can take; else None."""
    n = kernel_numbers(model, spec)
    served = "result", "terms", "fraction_bits", "floor", "result_bits", "multiplicand", "groups", "chain", "summed", "rounding"
    rounding = "RZ" if model.result == F32 else "RN"
    if n is None or not model.uses_only(*served) or n.rounding != rounding or n.rounded_again or n.of_group % n.terms:
        return None
    if n.summed:
        return _grouped(n, spec)
    if n.terms not in (4, 8, 16, 32):
        return None
    relative = n.scaled or spec.a.exponent_bits > 5 or spec.b.exponent_bits > 5
    return (_relative if relative else _absolute)(n, spec.a, spec.b)


def step_bytes(n: KernelNumbers, tiles: TileNumbers) -> int:
    """Returns the bytes of one line in a step, as `prepare` makes it."""
    powers, wide = 2 * max(8, n.terms), tiles.wide
    return 4 + 4 * tiles.relative + powers + (powers if n.summed else n.terms * (8 if wide else 4) + 2 * n.terms)


def _arrangements(n: KernelNumbers, wide: bool, small: bool = False) -> tuple[dict[str, int], ...]:
    """Returns arrangements of `tile` among threads. The first that has room is the fastest of some hundreds measured on an NVIDIA H200.

    small: for products whose large tiles would leave multiprocessors without work.
    """
    if n.summed:
        groups = {
            "row_tiles": 2, "column_tiles": 4, "warps_down": 2, "warps_across": 2, "steps_together": 1, "ring": 2, "blocks": 3,
            "unrolled": 1, "pause": 1,
        }  # fmt: skip
        return groups, groups | {"ring": 1}, groups | {"ring": 1, "blocks": 1}
    large = {
        "row_tiles": 4, "column_tiles": 4, "warps_down": 2, "warps_across": 2, "steps_together": max(1, 16 // n.terms),
        "ring": 2 if wide and n.terms <= 16 else 1, "blocks": 2 if wide else 3,
        "unrolled": 1, "pause": 8 if n.terms < 16 else 4 if wide and n.terms == 16 else 2,
    }  # fmt: skip
    if small:
        few = large | {"row_tiles": 2, "column_tiles": 2, "ring": 2, "blocks": 4, "pause": 2}
        return few, few | {"ring": 1}, few | {"ring": 1, "blocks": 2}
    alone = large | {"warps_across": 4, "ring": 2, "blocks": 1} | ({} if wide else {"unrolled": 4, "pause": 4})
    return large, large | {"ring": 1}, alone, alone | {"ring": 1}, alone | {"ring": 1, "row_tiles": 2}


def _absolute(n: KernelNumbers, a: Format, b: Format) -> TileNumbers | None:
    """Numbers for formats whose product exponents all fit one float as powers."""
    least, greatest = a.min_exponent + b.min_exponent, a.max_exponent + b.max_exponent
    offset = 2 - least
    base = 8 if 8 * (offset + greatest) + 7 < 255 else 4
    wide = n.terms * 2 ** (n.fraction_bits + 2) + 2 ** (n.fraction_bits + 1) >= 2**21
    low_bits_begin = least - n.mantissas
    nearest = -offset - n.fraction_bits - low_bits_begin  # the least unit, counted as the sum of two bytes
    absent = min((255 - BYTE + nearest) // 2, 127)
    most = absent + n.fraction_bits + low_bits_begin  # E, so that a zero counts as whole
    if not wide:
        most = min(most, F32.max_exponent - (F32.mantissa_bits - n.fraction_bits) - 1)
    fits = 4 * (offset + greatest) + 3 < 255 and greatest - low_bits_begin <= 255 - BYTE + nearest and absent >= 0
    if not fits or most < greatest // 2 + 16 or n.fraction_bits > F32.mantissa_bits + 17:
        return None
    power = base * offset - F32.bias
    return TileNumbers(
        wide, False, base, offset, power // 2, power - power // 2, low_bits_begin, absent, 0, most - 1, -offset - n.fraction_bits, 0,
        n.floor > -offset, **_arrangements(n, wide)[0],
    )  # fmt: skip


def _relative(n: KernelNumbers, a: Format, b: Format) -> TileNumbers | None:
    """Numbers for other formats: powers are relative to the max exponents of the row and the column in the step."""
    depth, base = n.fraction_bits + NEAR + 1, 8
    absent = (255 - BYTE + n.fraction_bits + NEAR + 2) // 2
    least_unit = F32.min_exponent + 1
    if 2 * depth + 1 > absent:
        return None
    power = BYTE + base * NEAR - F32.bias  # bit 30 of the sum of powers is set from -NEAR on
    return TileNumbers(
        True, True, base, (F32.bias + power) // base, power // 2, power - power // 2, 0, absent, depth, 120, least_unit,
        least_unit + n.fraction_bits + NEAR, n.floor > least_unit + n.fraction_bits, **_arrangements(n, True)[0],
    )  # fmt: skip


def _grouped(n: KernelNumbers, spec: ProductSpec) -> TileNumbers | None:
    """Numbers for products summed in groups: the powers are those of their scales, and bf16 holds each value with its scale's
    significand.
    """
    a, b, scale = spec.a, spec.b, spec.require_scale()
    scales = (2 << scale.mantissa_bits) - 1
    largest = [(((2 << fmt.mantissa_bits) - 1) << (fmt.max_exponent - fmt.min_exponent)) * scales for fmt in (a, b)]
    above = (n.summed * largest[0] * largest[1]).bit_length() - n.mantissas  # a group's sum is below 2^above times the power of its scales
    if max(largest) >= 2 << BF16.mantissa_bits or n.terms % 16 or n.summed % 16 or n.terms > 128:
        return None
    sum_fits = n.fraction_bits + above + (n.terms // n.summed).bit_length() + 1 <= F64.mantissa_bits
    if not sum_fits or above + n.fraction_bits >= F64.mantissa_bits or n.fraction_bits < n.kept:
        return None
    base, least_unit, offset = 8, F32.min_exponent + 1, 2 - 2 * scale.min_exponent
    relative = base * (offset + 2 * scale.max_exponent) + base - 1 >= F32.infinity >> F32.mantissa_bits  # as `_relative`, or `_absolute`
    power = BYTE + base * NEAR - F32.bias if relative else base * offset - F32.bias
    if not relative:
        least_unit = -offset - n.fraction_bits
    return TileNumbers(
        True, relative, base, (F32.bias + power) // base, power // 2, power - power // 2, 0, 0, 0, 120, least_unit,
        least_unit + n.fraction_bits + NEAR, n.floor > least_unit + n.fraction_bits, **_arrangements(n, True)[0],
    )  # fmt: skip


def exponent_limit(tiles: TileNumbers, k: int) -> int:
    """On the sum of the greatest exponents of a row and a column in a step, so that no sum of k products leaves the binades."""
    return 90 if tiles.relative else tiles.most - 2 - max(k - 1, 1).bit_length()


def shared_bytes(n: KernelNumbers, tiles: TileNumbers) -> int:
    """Shared memory of a block of `tile`: the stages, and the sums of chains or promoted parts."""
    sums = 4 * prod(tiles.lines) if n.chain or n.promoted else 0
    return sums + tiles.ring * tiles.steps_together * sum(tiles.lines) * step_bytes(n, tiles)


def fit_shared_memory(n: KernelNumbers, tiles: TileNumbers | None, most: int, small: bool = False) -> TileNumbers | None:
    """Return the numbers in the first arrangement that fits into `most` bytes of shared memory per block; None if no arrangement does.

    A multiprocessor has OF_BLOCK bytes more than a block may have. Its blocks share all of them, and the driver takes OF_BLOCK for each.
    """
    if tiles is None:
        return None
    for arrangement in _arrangements(n, tiles.wide, small):
        one = tiles._replace(**arrangement)
        if one.blocks * (shared_bytes(n, one) + OF_BLOCK) <= most + OF_BLOCK:
            return one
    return None


def kernel_text(
    entry: str,
    n: KernelNumbers,
    spec: ProductSpec,
    result: Format,
    tiles: TileNumbers | None = None,
    tables: str = "",
    floats: bool = False,
) -> str:
    """CUDA C++ without any include. entry: of FILES; "prepare" and "tile" need `tiles`, "warp" needs `tables`, put before its own files.

    floats: its factors are kept as f32.
    """
    instead = (STEPS_OF_GROUPS if n.summed else {}) | (FLOATS if floats else {})
    constants = {name: value for name, value in n._asdict().items() if name not in DEFINED} | ({} if tiles is None else tiles._asdict())
    lines = [f"[[maybe_unused]] constexpr int {name.upper()} = {_word(value)};" for name, value in constants.items()]
    formats = [f"typedef {format_type(fmt)} {name};" for name, fmt in (("A", spec.a), ("B", spec.b), ("RESULT", result))]
    scale = f"typedef {format_type(spec.scale or UE8M0)} SCALE;"
    c, d = (F32, F32) if n.promoted else (result, spec.d)
    codes = {"ACode": spec.a, "BCode": spec.b, "CCode": c, "DCode": d}
    types = [f"typedef {CODES[fmt.dtype.itemsize * 8]} {name};" for name, fmt in codes.items()]
    machine, decode, *rest = (_file(instead.get(name, name)) for name in FILES[entry])
    head, mark, tail = decode.partition(FACTORS_END)
    defined = [f"#define {name.upper()} {int(getattr(n, name))}" for name in DEFINED]
    before, own = rest[:-OF_WARP], rest[-OF_WARP:]
    return "\n".join([machine, MACHINE_ENDS, *defined, *lines, head, *formats, scale, *types, mark + tail, *before, tables, *own])


def quantizer_text(source: Format, target: Format, saturate: bool, scaled: bool, multiplied: bool = False) -> str:
    """CUDA C++ of "quantize", which divides by scales, or multiplies, or there are none, and rounds."""
    machine, decode, rest = map(_file, FILES["quantize"])
    types = [f"typedef {format_type(fmt)} {name};" for name, fmt in (("SOURCE", source), ("TARGET", target))]
    types += [f"typedef {CODES[fmt.dtype.itemsize * 8]} {name};" for name, fmt in (("Source", source), ("Target", target))]
    lines = [
        f"#define SCALES {int(scaled)}",
        f"[[maybe_unused]] constexpr bool SATURATE = {int(saturate)}, MULTIPLIED = {int(multiplied)};",
    ]
    return "\n".join([machine, MACHINE_ENDS, *lines, decode.partition(FACTORS_END)[0], *types, rest])


def prepend_machine(*parts: str) -> str:
    """The text of a kernel of another package, which may use the names of machine.cu."""
    return "\n".join([_file("machine"), MACHINE_ENDS, *parts])


def _word(value: int | str) -> str:
    """A rounding is its index, as in step.cu."""
    return str(ROUNDING_MODES.index(value) if isinstance(value, str) else int(value))


def format_type(fmt: Format) -> str:
    numbers = (
        fmt.bits,
        fmt.exponent_bits,
        fmt.mantissa_bits,
        fmt.bias,
        SPECIALS[fmt.specials],
        fmt.unused_bits,
        int(fmt.signed),
        int(fmt.subnormals),
    )
    return f"Format<{', '.join(map(str, numbers))}>"


@cache
def _file(name: str) -> str:
    return resources.files("tcemu.backends.cuda").joinpath("kernels", f"{name}.cu").read_text()
