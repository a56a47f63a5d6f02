"""The PTX kernel that runs one instruction on many cases, written from the instruction's fields. A case is a warp, or a warpgroup."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from tcemu.isa.catalog import least
from tcemu.isa.instructions import FAMILIES, LANES, Instruction, spell
from tcemu.isa.targets import named_target

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
    of: str
    words: int = 0


class Kernel(NamedTuple):
    """A PTX kernel, and what is needed to launch it."""

    text: str
    parameters: tuple[
        Parameter, ...
    ]  # the pointers that the entry takes; then the number of cases, and the words of an image. See `kernel`
    written: str  # the parameter that the kernel writes
    threads: int
    shared: bool  # whether an image of each case is copied to shared memory


def kernel(op: Instruction, target: str, form: int = 0, immediates: Mapping[str, Any] | None = None, *, pointers: bool = False) -> Kernel:
    """The kernel of `op` for `target`. form: an index into `op.forms`; immediates: by the names of the manual, "f", "selector_a", ...

    pointers: the entry takes pointers alone, as XLA gives them: first one to the two numbers, uint32, then the parameters that are read, in
    their order, and last the one that is written. If that one is read too, both are the same buffer.
    """
    return _kernel(op, named_target(target), form, tuple(sorted((immediates or {}).items())), pointers)


@lru_cache(maxsize=4096)
def _kernel(op: Instruction, target: str, form: int, immediates: tuple[tuple[str, Any], ...], pointers: bool) -> Kernel:
    operands, threads, written = op.forms[form], LANES * op.warps, written_by(op)
    parameters = tuple(_parameters(op, operands))
    shared = in_shared(op)
    version = ".".join(map(str, least(op, target) or ()))
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
        if parameter.of != MEMORY and (parameter.name != written or rewrites(op)):
            body += _moved(op, parameter, "ld")
    if shared:
        body += [*_copied("IN", "global", "shared", threads), *(["fence.proxy.async;"] if op.warps > 1 else []), "bar.sync 0;"]
    body += _statement(op, operands, dict(immediates))
    body += [line for parameter in parameters if parameter.name == written and parameter.of == LANE for line in _moved(op, parameter, "st")]
    if shared:
        body += ["bar.sync 0;"]
        body += [*_copied("OUT", "shared", "global", threads), "bar.sync 0;"] if written == "memory" else []
    body += ["add.u64 %case, %case, %step;", "bra NEXT;", "END:", "ret;"]
    entry = ",\n".join(f"    .param .u64 {name}" for name in _entry(op, [parameter.name for parameter in parameters], pointers))
    text = [f".version {version}", f".target {target}", ".address_size 64"]
    text += [".extern .shared .align 1024 .b8 image[];"] if shared else []
    text += [f".visible .entry {ENTRY}(\n{entry}\n)", f".maxntid {threads}, 1, 1", "{"]
    body = [*_registers(op, parameters), *body]
    text += [line if line.endswith(":") else f"    {line}" for line in body]
    text = "\n".join([*text, "}", ""])
    return Kernel(text=text, parameters=parameters, written=written, threads=threads, shared=shared)


def written_by(op: Instruction) -> str:
    """The parameter that the instruction writes. If the instruction reads it too, it comes with the old words."""
    return "memory" if op.family in STORES else "d" if "d" in op.operands else "r"


def rewrites(op: Instruction) -> bool:
    """Whether what it writes comes with old words that it reads, or leaves in part."""
    return op.warps > 1 or op.family in STORES


def _entry(op: Instruction, names: list[str], pointers: bool) -> list[str]:
    """The names of the entry's parameters."""
    if not pointers:
        return [*names, "cases", "words"]
    written = written_by(op)
    read = [name for name in names if name != written or rewrites(op)]
    return ["numbers", *read, "result" if rewrites(op) else written]


def _numbers(pointers: bool) -> Iterator[str]:
    """The number of cases, and the words of an image."""
    if pointers:
        yield "ld.param.u64 %index, [numbers];"
    for at, name in enumerate(("cases", "words")):
        if pointers:
            yield f"ld.global.u32 %index_word, [%index+{4 * at}];"
            yield f"cvt.u64.u32 %{name}, %index_word;"
        else:
            yield f"ld.param.u64 %{name}, [{name}];"


def in_shared(op: Instruction) -> bool:
    """Whether the memory that it reads or writes is shared memory; wmma goes to global memory unless it says otherwise."""
    return op.warps > 1 or op.family in ("ldmatrix", "stmatrix") or (op.space or "").startswith("shared")


def _parameters(op: Instruction, operands: tuple[str, ...]) -> Iterator[Parameter]:
    for name in operands:
        if name in VECTORS or name in SINGLES:
            yield Parameter(name=name, of=LANE, words=op.registers(name))
        elif name in PER_CASE:
            yield Parameter(name=name, of=CASE, words=PER_CASE[name])
        elif name == "p":  # a place in the image, in bytes; the movers' lanes have one each
            yield Parameter(name="address", of=CASE if op.family.startswith("wmma") else LANE, words=1)
    if op.warps > 1 or "p" in operands:
        yield Parameter(name="memory", of=MEMORY)


def _registers(op: Instruction, parameters: tuple[Parameter, ...]) -> Iterator[str]:
    yield ".reg .pred %done, %inside, %scale_d;"
    yield f".reg .b32 %thread, %word, {', '.join(f'%{name}_word' for name in ('index', 'scale_d'))};"
    yield f".reg .b64 %lane, %case, %step, %cases, %words, %index, %from, %to, {WINDOW}, %place, %offset;"
    yield f".reg .b64 {', '.join(f'%at_{parameter.name}' for parameter in parameters)};"
    for parameter in parameters:
        if parameter.of == LANE and parameter.name in VECTORS:
            width = words_of_register(op, parameter.name)
            yield f".reg .b{32 * width} %{parameter.name}<{parameter.words // width}>;"
        elif parameter.of != MEMORY and parameter.name != "scale_d":
            yield f".reg .b{32 * parameter.words} %{parameter.name};"


def words_of_register(op: Instruction, name: str) -> int:
    """Words of one register."""
    fmt = getattr(op, op.operand or name, None)
    return 2 if fmt is not None and fmt.bits == 64 else 1


def _address(parameter: Parameter, threads: int) -> Iterator[str]:
    at = f"%at_{parameter.name}"
    yield f"ld.param.u64 {at}, [{parameter.name}];"
    if parameter.of == MEMORY:
        yield "mul.lo.u64 %offset, %case, %words;"
        yield f"mad.lo.u64 {at}, %offset, 4, {at};"
        return
    if parameter.of == LANE:
        yield f"mad.lo.u64 %offset, %case, {threads}, %lane;"
    yield f"mad.lo.u64 {at}, {'%offset' if parameter.of == LANE else '%case'}, {4 * parameter.words}, {at};"


def _moved(op: Instruction, parameter: Parameter, access: str) -> Iterator[str]:
    """Between global memory and the registers of one operand; access: "ld" or "st"."""
    width = words_of_register(op, parameter.name) if parameter.of == LANE and parameter.name in VECTORS else parameter.words
    for i in range(parameter.words // width):
        register = (
            f"%{parameter.name}{i}" if parameter.name in VECTORS else f"%{parameter.name}{'_word' if parameter.name == 'scale_d' else ''}"
        )
        place = f"[%at_{parameter.name}+{4 * width * i}]"
        yield f"{access}.global.b{32 * width} " + (f"{register}, {place};" if access == "ld" else f"{place}, {register};")


def _copied(label: str, source: str, target: str, threads: int) -> Iterator[str]:
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
            yield f"add.u64 %place, %place, {WINDOW if in_shared(op) else '%at_memory'};"
            if in_shared(op) and op.space is None:
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
        return "{" + ", ".join(f"%{name}{i}" for i in range(op.registers(name) // words_of_register(op, name))) + "}"
    if name == "p":
        return "[%place]"
    if name not in IMMEDIATES:
        return f"%{name}"
    value = immediates.get(name, (0, 0) if name.startswith("selector") else 1 if "scale" in name else 0)
    return f"{{{value[0]}, {value[1]}}}" if isinstance(value, tuple) else str(value)


def runs(op: Instruction) -> bool:
    """Whether there is a kernel for the instruction. wgmma's fence, commit and wait have none: they stand in each kernel of wgmma."""
    return bool(FAMILIES[op.family].operands) and "n" not in op.operands
