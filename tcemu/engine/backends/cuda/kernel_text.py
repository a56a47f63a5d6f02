"""The text of a kernel for one arithmetic: numbers, formulas that are rendered from `arithmetic.step`, and the files of `kernels/`."""

from functools import cache
from importlib import resources
from math import prod
from typing import NamedTuple

from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.step.forms import AnchoredForm, IntegerForm, StepNumbers
from tcemu.engine.backends.cuda import step_functions as functions
from tcemu.engine.backends.elementwise_request import ElementwiseRequest
from tcemu.engine.formats.number_formats import F16, F32, UE8M0, Format

FILES = {  # entry point of a text -> its files, in order
    "integer": ("decode", "step", "sums", "integer"),
    "warp": ("decode", "step", "sums", "lanes", "significands", "warp", "registers"),
    "steps": ("decode", "step", "sums", "lanes", "significands", "warp"),  # no kernel: what another text calls
    "prepare": ("decode", "sums", "prepared", "prepare"),
    "tile": ("decode", "step", "sums", "prepared", "align", "products", "tile"),
}
STEPS_OF_GROUPS = {"products": "groups"}  # where products are summed in groups
STEPS_REPEATED = {"products": "repeated"}  # where a tensor core truncates each product
FLOATS = {"significands": "floats"}  # where a warp keeps factors as f32
CODES = {8: "u8", 16: "u16", 32: "u32"}
COUNTED = (  # numbers of a step that the loops use
    "terms", "of_instruction", "of_group", "groups", "chain", "together", "fraction_bits", "mantissas", "summed", "floor", "promoted",
    "rounded_again",
)  # fmt: skip
DEFINED = ("scaled", "block_scaled")  # numbers of a step for the preprocessor: whether a kernel has these operands
MACHINE_ENDS = "// ---- end of the machine\n"
OF_BLOCK = 1024  # bytes of shared memory that are the driver's


class TileNumbers(NamedTuple):
    """The form of the steps of `tile`, and how its threads are arranged."""

    form: AnchoredForm
    row_tiles: int  # of a warp, in tiles of 16 x 8 elements of D
    column_tiles: int
    warps_down: int  # of a block
    warps_across: int
    steps_together: int
    ring: int  # stages in shared memory
    blocks: int  # of a multiprocessor, at least; bounds the registers of a thread
    unrolled: int
    pause: int  # tiles between which nothing is loaded ahead
    own_bits: int = 0  # fraction bits of the tensor core that truncates the products; 0: it does not

    @property
    def in_bf16(self) -> bool:
        """True if a tensor core multiplies the factors."""
        return bool(self.form.numbers.summed or self.own_bits)

    @property
    def threads(self) -> int:
        return 32 * self.warps_down * self.warps_across

    @property
    def lines(self) -> tuple[int, int]:
        """Rows and columns of D of a block."""
        return 16 * self.row_tiles * self.warps_down, 8 * self.column_tiles * self.warps_across


def tile_numbers(form: AnchoredForm | None) -> TileNumbers | None:
    """A form in the arrangement that is the fastest for large products."""
    return None if form is None else TileNumbers(form, **_arrangements(form.numbers, form.wide)[0])


def step_bytes(n: StepNumbers, tiles: TileNumbers) -> int:
    """Returns the bytes of one line in a step, as `prepare` makes it."""
    powers, wide = 2 * max(8, n.terms), tiles.form.wide
    return 4 + 4 * tiles.form.relative + powers + (powers if tiles.in_bf16 else n.terms * (8 if wide else 4) + 2 * n.terms)


def _arrangements(n: StepNumbers, wide: bool, small: bool = False, own_bits: int = 0) -> tuple[dict[str, int], ...]:
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
    if own_bits:
        large |= {"steps_together": 1, "ring": 2, "blocks": 4, "own_bits": own_bits}
    if small:
        few = large | {"row_tiles": 2, "column_tiles": 2, "ring": 2, "blocks": 4, "pause": 2}
        return few, few | {"ring": 1}, few | {"ring": 1, "blocks": 2}
    alone = large | {"warps_across": 4, "ring": 2, "blocks": 1} | ({} if wide else {"unrolled": 4, "pause": 4})
    return large, large | {"ring": 1}, alone, alone | {"ring": 1}, alone | {"ring": 1, "row_tiles": 2}


def shared_bytes(n: StepNumbers, tiles: TileNumbers) -> int:
    """Shared memory of a block of `tile`: the stages, and the sums of chains or promoted parts."""
    sums = 4 * prod(tiles.lines) if n.chain or n.promoted else 0
    return sums + tiles.ring * tiles.steps_together * sum(tiles.lines) * step_bytes(n, tiles)


def fit_shared_memory(n: StepNumbers, tiles: TileNumbers | None, most: int, small: bool = False, own_bits: int = 0) -> TileNumbers | None:
    """Return the numbers in the first arrangement that fits into `most` bytes of shared memory per block; None if no arrangement does.

    own_bits: Fraction bits of the GPU's own steps of bf16; 0: products are not left to them.

    A multiprocessor has OF_BLOCK bytes more than a block may have. Its blocks share all of them, and the driver takes OF_BLOCK for each.
    """
    if tiles is None:
        return None
    for arrangement in _arrangements(n, tiles.form.wide, small, own_bits if tiles.form.can_repeat_products(own_bits) else 0):
        one = tiles._replace(**arrangement)
        if one.blocks * (shared_bytes(n, one) + OF_BLOCK) <= most + OF_BLOCK:
            return one
    return None


class Stored(NamedTuple):
    """How a warp has its operands."""

    formats: tuple[Format, Format]  # of the codes of A and B
    tables: str  # the text of the places of elements
    floats: bool  # factors are kept as f32


def kernel_text(
    entry: str, n: StepNumbers, spec: ProductSpec, result: Format, tiles: TileNumbers | None = None, stored: Stored | None = None
) -> str:
    """CUDA C++ without any include.

    Args:
        entry: Of FILES.
        n: The step's numbers.
        spec: The formats, A and B as they are multiplied.
        result: Format of the steps' results.
        tiles: For "prepare" and "tile".
        stored: For "warp" and "steps".
    """
    form, scale = IntegerForm(n, spec.a, spec.b, result), spec.scale or UE8M0
    instead = (STEPS_OF_GROUPS if n.summed else {}) | (FLOATS if stored is not None and stored.floats else {})
    instead |= STEPS_REPEATED if tiles is not None and tiles.own_bits else {}
    structs, rendered = [], functions.step_functions(form) + functions.sum_functions(form)
    for name, fmt in (("A", form.a), ("B", form.b)):
        members = [*functions.decoding_functions(fmt), functions.scaling_function(fmt, scale, bool(n.summed))]
        if tiles is not None:
            members += functions.preparing_functions(tiles.form, fmt, tiles.in_bf16)
        structs.append(functions.format_text(name, fmt, *members))
        if stored is not None:
            own = stored.formats[len(structs) > 1]
            structs.append(functions.format_text(f"{name}Stored", own, *functions.stored_functions(own, fmt)))
    structs.append(functions.format_text("RESULT", result, *functions.decoding_functions(result)))
    structs += [functions.format_text(name, fmt) for name, fmt in (("F32", F32), ("F16", F16))]
    if tiles is not None:
        rendered += functions.tile_functions(tiles.form, tiles.own_bits)
    if stored is not None:
        rendered += functions.register_functions(form)
    c, d = (F32, F32) if n.promoted else (result, spec.d)
    codes = {"ACode": spec.a, "BCode": spec.b, "CCode": c, "DCode": d}
    types = [f"typedef {CODES[fmt.dtype.itemsize * 8]} {name};" for name, fmt in codes.items()]
    defined = [f"#define {name.upper()} {int(getattr(n, name))}" for name in DEFINED]
    numbers = functions.constants_text(**{name: getattr(n, name) for name in COUNTED}, **functions.STEP_CONSTANTS)
    if tiles is not None:
        arrangement = {name: value for name, value in tiles._asdict().items() if name != "form"}
        numbers += "\n" + functions.constants_text(**functions.tile_constants(tiles.form), **arrangement)
    files = {name: _file(instead.get(name, name)) for name in FILES[entry]}
    if stored is not None:
        tables = [functions.constants_text(**functions.register_constants(form, stored.formats)), stored.tables]
        files["lanes"] = "\n".join([*tables, files["lanes"]])
    text = [
        _file("machine"),
        MACHINE_ENDS,
        *defined,
        numbers,
        functions.FACTOR.text,
        functions.FLOAT_FACTOR.text,
        *structs,
        *types,
        *rendered,
    ]
    return "\n".join([*text, *files.values()])


def quantizer_text(request: ElementwiseRequest) -> str:
    """CUDA C++ of "quantize", which divides by scales, or multiplies, or there are none, and rounds."""
    codes = {"Source": request.source, "Target": request.target, "Scale": request.scale}
    types = [f"typedef {CODES[fmt.dtype.itemsize * 8]} {name};" for name, fmt in codes.items()]
    lines = [f"#define SCALES {int(request.depth is not None)}", f"constexpr bool SOURCE_IS_F16 = {int(request.source == F16)};"]
    return "\n".join([_file("machine"), MACHINE_ENDS, *lines, *types, *functions.quantizer_functions(request), _file("quantize")])


def prepend_machine(*parts: str) -> str:
    """The text of a kernel of another package, which may use the names of machine.cu."""
    return "\n".join([_file("machine"), MACHINE_ENDS, *parts])


@cache
def _file(name: str) -> str:
    return resources.files("tcemu.engine.backends.cuda").joinpath("kernels", f"{name}.cu").read_text(encoding="utf-8")
