"""The PTX kernel that runs one instruction on many cases, written from the instruction's fields. A case is a warp, or a warpgroup."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.engine.backends.batched_calls import call_batched, launch_numbers
from tcemu.engine.backends.cuda.xla_launch import KernelEntry, launch
from tcemu.engine.backends.product_requests import StatementLaunch
from tcemu.engine.isa.families import LANES, Instruction, Mover, WgmmaControl, WmmaMemory, spell
from tcemu.engine.isa.legality import min_version
from tcemu.engine.isa.targets import resolve_target

ENTRY = "tcemu"
LANE, CASE, MEMORY = "lane", "case", "memory"  # a parameter has words for each lane of a case, for each case, or is an image of its memory
VECTORS, SINGLES = ("d", "a", "b", "c", "r"), ("e", "sp_meta", "scale_a", "scale_b")  # operands in registers
IMMEDIATES = ("f", "sp_sel", "selector_a", "selector_b", "imm_scale_a", "imm_scale_b", "imm_trans_a", "imm_trans_b")
STORES = ("wmma.store", "stmatrix")
PER_CASE = {"a_desc": 2, "b_desc": 2, "scale_d": 1, "stride": 1}  # words
WINDOW = "%window"  # the address in shared memory at which the image begins


class Parameter(NamedTuple):
    """A pointer to uint32 words of global memory: [cases, lanes, words], [cases, words], or [cases, any number] for an image."""

    name: str
    scope: str  # LANE, CASE or MEMORY
    words: int = 0  # words per lane or case; 0 for MEMORY


class StatementKernel(NamedTuple):
    """A PTX kernel, and what is needed to launch it."""

    text: str
    parameters: tuple[
        Parameter, ...
    ]  # the pointers that the entry takes; then the number of cases, and the words of an image. See `kernel`
    written: str  # the parameter that the kernel writes
    threads: int
    shared: bool  # whether an image of each case is copied to shared memory


def statement_kernel(
    op: Instruction, target: str, form: int = 0, immediates: Mapping[str, Any] | None = None, *, pointers: bool = False
) -> StatementKernel:
    """Write the PTX kernel that runs one instruction on many cases.

    Args:
        op: The instruction.
        target: Target or GPU for which the text is written.
        form: Index into `op.operand_forms`.
        immediates: Immediates by the names of the manual, "f", "selector_a", ...
        pointers: The entry takes pointers alone, as XLA gives them: first one to the two numbers, uint32, then the parameters that are
            read, in their order, and last the parameter that is written. If that parameter is read too, both are the same buffer.

    Returns:
        The text and the numbers of its launch, a `StatementKernel`.

    Raises:
        Unsupported: The instruction works on tensor memory, for which no kernel is written.
    """
    if works_on_tensor_memory(op):
        raise Unsupported(f"{op}: no kernel is written for instructions on tensor memory; tcemu.engine.instructions.tcgen05 computes them")
    return _kernel(op, resolve_target(target), form, tuple(sorted((immediates or {}).items())), pointers)


@lru_cache(maxsize=4096)
def _kernel(op: Instruction, target: str, form: int, immediates: tuple[tuple[str, Any], ...], pointers: bool) -> StatementKernel:
    operands, threads, written = op.operand_forms[form], LANES * op.warps, written_operand(op)
    parameters = tuple(_parameters(op, operands))
    shared = uses_shared_memory(op)
    version = ".".join(map(str, min_version(op, target) or ()))
    body = [
        "mov.u32 %thread, %tid.x;",
        "cvt.u64.u32 %lane, %thread;",
        "mov.u32 %word, %ctaid.x;",
        "cvt.u64.u32 %case, %word;",
        "mov.u32 %word, %nctaid.x;",
        "cvt.u64.u32 %step, %word;",
        *_numbers(pointers),
        *([f"mov.u64 {WINDOW}, image;"] if shared else []),
        "NEXT:",
        "setp.ge.u64 %done, %case, %cases;",
        "@%done bra END;",
    ]
    for parameter in parameters:
        body += _address(parameter, threads)
        if parameter.scope != MEMORY and (parameter.name != written or reads_written_operand(op)):
            body += _move_registers(op, parameter, "ld")
    if shared:
        body += [*_copy_image("IN", "global", "shared", threads), *(["fence.proxy.async;"] if op.warps > 1 else []), "bar.sync 0;"]
    body += _statement(op, operands, dict(immediates))
    body += [
        line
        for parameter in parameters
        if parameter.name == written and parameter.scope == LANE
        for line in _move_registers(op, parameter, "st")
    ]
    if shared:
        body += ["bar.sync 0;"]
        body += [*_copy_image("OUT", "shared", "global", threads), "bar.sync 0;"] if written == "memory" else []
    body += ["add.u64 %case, %case, %step;", "bra NEXT;", "END:", "ret;"]
    entry = ",\n".join(f"    .param .u64 {name}" for name in _entry(op, [parameter.name for parameter in parameters], pointers))
    text = [f".version {version}", f".target {target}", ".address_size 64"]
    text += [".extern .shared .align 1024 .b8 image[];"] if shared else []
    text += [f".visible .entry {ENTRY}(\n{entry}\n)", f".maxntid {threads}, 1, 1", "{"]
    body = [*_registers(op, parameters), *body]
    text += [line if line.endswith(":") else f"    {line}" for line in body]
    text = "\n".join([*text, "}", ""])
    return StatementKernel(text=text, parameters=parameters, written=written, threads=threads, shared=shared)


def written_operand(op: Instruction) -> str:
    """The parameter that the instruction writes. If the instruction reads it too, it comes with the old words."""
    return "memory" if op.family in STORES else "d" if "d" in op.operands else "r"


def reads_written_operand(op: Instruction) -> bool:
    """Returns whether the written operand comes with old words that the instruction reads or leaves in part."""
    return op.warps > 1 or op.family in STORES


def _entry(op: Instruction, names: list[str], pointers: bool) -> list[str]:
    if not pointers:
        return [*names, "cases", "words"]
    written = written_operand(op)
    read = [name for name in names if name != written or reads_written_operand(op)]
    return ["numbers", *read, "result" if reads_written_operand(op) else written]


def _numbers(pointers: bool) -> Iterator[str]:
    if pointers:
        yield "ld.param.u64 %index, [numbers];"
    for at, name in enumerate(("cases", "words")):
        if pointers:
            yield f"ld.global.u32 %index_word, [%index+{4 * at}];"
            yield f"cvt.u64.u32 %{name}, %index_word;"
        else:
            yield f"ld.param.u64 %{name}, [{name}];"


def uses_shared_memory(op: Instruction) -> bool:
    """Returns whether the instruction reads or writes shared memory; wmma uses global memory unless its spelling says otherwise."""
    if isinstance(op, WmmaMemory):
        return (op.space or "").startswith("shared")
    return op.warps > 1 or (isinstance(op, Mover) and op.uses_memory)


def _parameters(op: Instruction, operands: tuple[str, ...]) -> Iterator[Parameter]:
    for name in operands:
        if name in VECTORS or name in SINGLES:
            yield Parameter(name=name, scope=LANE, words=op.register_count(name))
        elif name in PER_CASE:
            yield Parameter(name=name, scope=CASE, words=PER_CASE[name])
        elif name == "p":  # a place in the image, in bytes; the movers' lanes have one each
            yield Parameter(name="address", scope=CASE if op.family.startswith("wmma") else LANE, words=1)
    if op.warps > 1 or "p" in operands:
        yield Parameter(name="memory", scope=MEMORY)


def _registers(op: Instruction, parameters: tuple[Parameter, ...]) -> Iterator[str]:
    yield ".reg .pred %done, %inside, %scale_d;"
    yield f".reg .b32 %thread, %word, {', '.join(f'%{name}_word' for name in ('index', 'scale_d'))};"
    yield f".reg .b64 %lane, %case, %step, %cases, %words, %index, %from, %to, {WINDOW}, %place, %offset;"
    yield f".reg .b64 {', '.join(f'%at_{parameter.name}' for parameter in parameters)};"
    for parameter in parameters:
        if parameter.scope == LANE and parameter.name in VECTORS:
            width = words_per_register(op, parameter.name)
            yield f".reg .b{32 * width} %{parameter.name}<{parameter.words // width}>;"
        elif parameter.scope != MEMORY and parameter.name != "scale_d":
            yield f".reg .b{32 * parameter.words} %{parameter.name};"


def words_per_register(op: Instruction, name: str) -> int:
    return op.register_bits(name) // 32


def _address(parameter: Parameter, threads: int) -> Iterator[str]:
    at = f"%at_{parameter.name}"
    yield f"ld.param.u64 {at}, [{parameter.name}];"
    if parameter.scope == MEMORY:
        yield "mul.lo.u64 %offset, %case, %words;"
        yield f"mad.lo.u64 {at}, %offset, 4, {at};"
        return
    if parameter.scope == LANE:
        yield f"mad.lo.u64 %offset, %case, {threads}, %lane;"
    yield f"mad.lo.u64 {at}, {'%offset' if parameter.scope == LANE else '%case'}, {4 * parameter.words}, {at};"


def _move_registers(op: Instruction, parameter: Parameter, access: str) -> Iterator[str]:
    """Between global memory and the registers of one operand; access: "ld" or "st"."""
    width = words_per_register(op, parameter.name) if parameter.scope == LANE and parameter.name in VECTORS else parameter.words
    for i in range(parameter.words // width):
        register = (
            f"%{parameter.name}{i}" if parameter.name in VECTORS else f"%{parameter.name}{'_word' if parameter.name == 'scale_d' else ''}"
        )
        place = f"[%at_{parameter.name}+{4 * width * i}]"
        yield f"{access}.global.b{32 * width} " + (f"{register}, {place};" if access == "ld" else f"{place}, {register};")


def _copy_image(label: str, source: str, target: str, threads: int) -> Iterator[str]:
    """The image between global and shared memory, by all lanes."""
    yield "mov.u64 %index, %lane;"
    yield f"{label}:"
    yield "setp.ge.u64 %inside, %index, %words;"
    yield f"@%inside bra {label}_END;"
    yield f"mad.lo.u64 %{'from' if source == 'global' else 'to'}, %index, 4, %at_memory;"
    yield f"mad.lo.u64 %{'to' if source == 'global' else 'from'}, %index, 4, {WINDOW};"
    yield f"ld.{source}.b32 %index_word, [%from];"
    yield f"st.{target}.b32 [%to], %index_word;"
    yield f"add.u64 %index, %index, {threads};"
    yield f"bra {label};"
    yield f"{label}_END:"


def _statement(op: Instruction, operands: tuple[str, ...], immediates: dict[str, Any]) -> Iterator[str]:
    """The instruction and what must stand around it."""
    for name in operands:
        if name.endswith("_desc"):  # its start counts from the image
            yield f"shr.u64 %offset, {WINDOW}, 4;"
            yield f"add.u64 %{name}, %{name}, %offset;"
        elif name == "scale_d":
            yield "setp.ne.b32 %scale_d, %scale_d_word, 0;"
        elif name == "p":
            yield "cvt.u64.u32 %place, %address;"
            yield f"add.u64 %place, %place, {WINDOW if uses_shared_memory(op) else '%at_memory'};"
            if uses_shared_memory(op) and isinstance(op, Mover | WmmaMemory) and op.space is None:
                yield "cvta.shared.u64 %place, %place;"
    statement = f"{spell(op)} {', '.join(_operand(op, name, immediates) for name in operands)};"
    if op.warps == 1:
        yield statement
        return
    yield from ("wgmma.fence.sync.aligned;", statement, "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;")


def _operand(op: Instruction, name: str, immediates: dict[str, Any]) -> str:
    if name in VECTORS:
        if op.family == "movmatrix":
            return f"%{name}0"
        return "{" + ", ".join(f"%{name}{i}" for i in range(op.register_count(name) // words_per_register(op, name))) + "}"
    if name == "p":
        return "[%place]"
    if name not in IMMEDIATES:
        return f"%{name}"
    value = immediates.get(name, (0, 0) if name.startswith("selector") else 1 if "scale" in name else 0)
    return f"{{{value[0]}, {value[1]}}}" if isinstance(value, tuple) else str(value)


def works_on_tensor_memory(op: Instruction) -> bool:
    return op.family.partition(".")[0] == "tcgen05"


def has_kernel(op: Instruction) -> bool:
    """Return True if `statement_kernel` writes a kernel for the instruction.

    wgmma's fence, commit and wait are part of each wgmma kernel, and no kernel is written for instructions on tensor memory.
    """
    return not (isinstance(op, WgmmaControl) or works_on_tensor_memory(op))


# ---- One instruction on the GPU, inside a program: a kernel that runs the PTX statement on batches of warps.


BLOCKS = 1 << 16  # in a launch; each goes on to further cases


class Statement(NamedTuple):
    """One instruction with its immediates: a `BatchedCall` on words with the cases in front."""

    op: Instruction
    target: str
    form: int
    immediates: tuple[tuple[str, Any], ...]

    @property
    def kernel(self) -> StatementKernel:
        return statement_kernel(self.op, self.target, self.form, dict(self.immediates), pointers=True)

    @property
    def input_names(self) -> list[str]:
        made = self.kernel
        return [parameter.name for parameter in made.parameters if parameter.name != made.written or reads_written_operand(self.op)]

    @property
    def axes(self) -> tuple[str, ...]:
        ranks = {parameter.name: 2 if parameter.scope == LANE else 1 for parameter in self.kernel.parameters}
        own = [" ".join(f"{name.replace('_', '')}{axis}" for axis in range(ranks[name])) for name in self.input_names]
        return (*own, " ".join(f"result{axis}" for axis in range(ranks[self.kernel.written])))

    @property
    def sharing(self) -> tuple[str, ...]:
        return ("",) * len(self.input_names)

    def __call__(self, *words: Array) -> Array:
        made, given = self.kernel, dict(zip(self.input_names, words, strict=True))
        cases = words[0].shape[0]
        image = given["memory"].shape[-1] if "memory" in given else 0
        shape = given[made.written].shape if made.written in given else (cases, made.threads, self.op.register_count(made.written))
        if cases == 0:
            return jnp.zeros(shape, jnp.uint32)
        in_place = 1 + self.input_names.index(made.written) if reads_written_operand(self.op) else None
        entry = KernelEntry(ENTRY, made.text, made.threads, 4 * image if made.shared else 0, is_ptx=True, in_place=in_place)
        result = jax.ShapeDtypeStruct(shape, jnp.uint32)
        return launch(entry, min(cases, BLOCKS), result, launch_numbers(cases, image).astype(jnp.uint32), *words)[0]


IMAGE_WORDS = 8  # 32 bytes, so that every case's image is aligned for anything


Run = Callable[[Instruction, int, Mapping[str, Any], Mapping[str, Array]], Array]


def launch_cases(op: Instruction, launch: StatementLaunch, run: Run) -> Array:
    """Runs a statement by `run`, which takes one axis of cases, and returns its words with the batch axes of the operands."""
    ranks = {name: operand_rank(op, name) for name in launch.words}
    batch = jnp.broadcast_shapes(*(x.shape[: x.ndim - ranks[name]] for name, x in launch.words.items()))
    image = launch.words["memory"].shape[-1] if "memory" in launch.words else 0
    flat = {}
    for name, x in launch.words.items():
        own = x.shape[x.ndim - ranks[name] :]
        x = jnp.broadcast_to(x, (*batch, *own)).reshape(-1, *own)
        if ranks[name] == 3:  # the lanes of four warps in one row
            x = x.reshape(x.shape[0], 4 * LANES, -1)
        flat[name] = jnp.pad(x, ((0, 0), (0, -image % IMAGE_WORDS))) if name == "memory" else x
    written = run(op, launch.form, launch.immediates, flat)
    if written.ndim == 2:
        return written[:, :image].reshape(*batch, image)
    return written.reshape(*batch, *((4,) if op.warps > 1 else ()), LANES, written.shape[-1])


def operand_rank(op: Instruction, name: str) -> int:
    """Axes of a parameter's words without the batch: a case's, a lane's, or those of a warpgroup."""
    if name in ("memory", "a_desc", "b_desc", "scale_d", "stride") or (name == "address" and op.family.startswith("wmma")):
        return 1
    return 3 if op.warps > 1 else 2


def program_runner(target: str) -> Run:
    """Returns the function that runs statements inside a program, on the GPU that is here, of this target.

    It takes and returns words with the cases in front, as a `silicon.Runner` does.
    """

    def run(op: Instruction, form: int, immediates: Mapping[str, Any], words: Mapping[str, Array]) -> Array:
        statement = Statement(op, target, form, tuple(sorted(immediates.items())))
        return call_batched(statement, *(words[name] for name in statement.input_names))

    return run
