"""Operands of every class in each position of every statement: tcemu refuses by name what ptxas 13.0 refuses, and takes what it takes."""

import json
import lzma
import random
import re
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import pytest
from support.sampling import sample_cases

from tcemu import NotModelled, UndefinedBehaviour, Unsupported
from tcemu.kernels.ptx.linker.linked_kernel import link
from tcemu.ptx import Misaligned, OutOfBounds, PtxError, StepLimit, Trapped, parse, run

ASSEMBLER = Path(__file__).parents[2] / "assembler"
sys.path.append(str(ASSEMBLER))
from operand_candidates import ENTRY, ENTRY_END, HEADER, mutants, split  # noqa: E402

BATCHES, RUN_BATCHES, RUNS = 60, 20, 8  # batches of statements; of those that are run; runs of a batch
RUN_ERRORS = (UndefinedBehaviour, NotModelled, Unsupported, OutOfBounds, Misaligned, Trapped, StepLimit)
NUMBERS, VARIABLES = {"-1", "1", "0x1FFFFFFFF"}, {"gvar", "gvar+4", "svar", "prm"}


def named(*names):
    """Return the test whether a spelling begins with one of some names."""
    return lambda spelling: spelling.partition(".")[0] in names


# where tcemu takes an operand that ptxas refuses: name -> (reason, which spellings, which operands)
LAXER = {
    "an absolute address": ("PTX ISA 6.4.1 allows it; ptxas asks for a window of a state space", lambda spelling: True, {"[16]"}),
    "a constant out of range": (
        "the class is right; the instruction takes the constant's low bits, or a fault is noted when it runs",
        named("bfe", "bfi", "wgmma", "cp", "fence", "mbarrier", "createpolicy", "tensormap", "applypriority", "discard", "pmevent"),
        NUMBERS,
    ),
    "the bytes of st.bulk": (
        "a constant that is no multiple of 8 is a fault when it runs",
        lambda spelling: spelling == "st.bulk",
        NUMBERS,
    ),
    "a fraction above one": ("createpolicy's fraction is not followed", named("createpolicy"), {"1.5"}),
    "one register without braces": ("a matrix of one register", named("mma", "wmma"), {"%d5", "%e5", "%w5"}),
    "a variable as a number": (
        "an address plus an offset is a constant (6.4.2), also where ptxas takes none; of which space it is, is not followed",
        named("cvta", "mapa", "getctarank", "ld", "st", "ldu", "atom", "red", "cp", "mbarrier", "createpolicy", "wgmma"),
        VARIABLES,
    ),
    "a wider register in cvt": (
        "9.4.1 gives cvt wider registers; ptxas takes none with packed and narrow types, .relu and .satfinite",
        named("cvt"),
        {"%d5", "%e5", "%f5", "%h5", "%r5", "%s5", "%u5", "%v5", "%w5", "%hf5", "%hx5"},
    ),
    "a special register in 16 bits": (
        "ptxas takes %tid.x with mov.b16, and no others",
        lambda spelling: spelling in ("mov.b16", "mov.u16"),
        {"%laneid", "%clock64"},
    ),
    "a discarded result": ("ptxas discards these, and not of each type", named("ld", "ldu", "atom", "mbarrier", "shfl"), {"_"}),
    "one offset without braces": ("ptxas asks for the braces of an im2col offset", named("cp"), {"%h5", "%hf5", "%v5"}),
    "an mbarrier without its state": ("ptxas asks for the state or `_` unless .shared::cluster is named", named("mbarrier"), {None}),
    "coordinates of another number": ("the number of coordinates is checked with the map's rank", named("cp"), {"[%d5, {%r5}]"}),
}  # fmt: skip
HALVES = {"{%h5, %h6}", "{%r5}", "{%r5, %r6}", "{%r5, %r6, %r7, %r4}"}
# where ptxas's reader takes an operand that tcemu refuses
STRICTER = {
    "packed floats as numbers": ("9.4 gives .f16x2 registers to no integer type", lambda spelling: True, {"%hx5"}),
    "a vector in place of a packed register": (
        "ptxas takes vectors with half precision, set and mbarrier, in no syntax of the manual",
        lambda spelling: "16" in spelling or named("mbarrier", "set", "cp", "mov", "createpolicy", "clusterlaunchcontrol")(spelling),
        HALVES,
    ),
    "what the reader does not check": (
        "ptxas reads any register or constant as these operands of bulk copies, movmatrix, createpolicy and set of packed types",
        lambda spelling: named("cp", "movmatrix", "createpolicy")(spelling) or ("16x2" in spelling and named("set", "setp")(spelling)),
        None,
    ),
    "a constant of 128 bits": ("a constant has 64 bits at most", named("clusterlaunchcontrol", "mov", "st"), {*NUMBERS, *VARIABLES}),
    "one register for a vector": ("st.async.v4 has four registers", lambda spelling: spelling.startswith("st.async"), None),
    "a variable as a number": ("addresses of variables are stored as 16 bits or more", named("st", "red", "cvt"), {"gvar+4"}),
    "bf16 as bits": (
        "9.7.5 and 9.7.7 give .bf16 registers of .b16; ptxas takes .u16 and integers too",
        lambda spelling: "bf16" in spelling.split("."),
        {"%v5", *NUMBERS},
    ),
    "any register for a pair of bf16": ("ptxas reads any", lambda spelling: spelling == "cvt.rn.bf16x2.ue8m0x2", None),
    "an address of 32 bits": ("addresses have 64 bits here", named("isspacep"), {"%r5", "%u5", "%s5"}),
    "stochastic rounding": ("no GPU that has it was measured", lambda spelling: spelling.startswith("cvt.rs."), None),
    "red without its operands": ("ptxas reads red with fewer, and atom with more", named("red", "atom"), {"_", None}),
}  # fmt: skip


@cache
def bases():
    """Return the recorded statements: target, opcode, operands, and a bit for each of the mutants."""
    answers = json.loads(lzma.decompress((ASSEMBLER / "operand_answers.json.xz").read_bytes()))
    rows = (re.fullmatch(r"(\S+) (\S+) \| (.*) \| ([01]+)", text).groups() for text in answers["bases"])
    return [(target, spelling, text, [bit == "1" for bit in bits]) for target, spelling, text, bits in rows]


def parse_statements(target, statements):
    """Return the module of a kernel with the statements."""
    return parse(HEADER.format(target=target) + ENTRY.format(number=0) + "\n".join(statements) + ENTRY_END)


def link_each(target, statements):
    """Yield for each statement the linked kernel that has it alone, or tcemu's error. Any other error is the test's failure."""
    try:
        module = parse_statements(target, statements)
    except PtxError as error:  # the parser refuses one of them
        yield from [error] if len(statements) == 1 else (result for each in statements for result in link_each(target, [each]))
        return
    entry = module.entries["k0"]
    for statement in entry.statements[:-1]:
        alone = replace(entry, statements=(statement, entry.statements[-1]), labels={"L1": 1})
        try:
            with jax.enable_x64(True):
                kernel = link(replace(module, functions=module.functions | {"k0": alone}), alone, target, checked=False)
                for block in kernel.blocks:
                    for linked in block.statements:
                        linked.bind()
            yield kernel
        except (Unsupported, NotModelled) as error:
            yield error


def find_exception(table, spelling, given, text):
    """Return the name of the exception that applies to a mutant, or None. given, text: the operands before and after the mutation."""
    changed = {new for old, new in zip(given, text, strict=True) if old != new} if len(given) == len(text) else {None}
    return next((name for name, (_, applies, wanted) in table.items() if applies(spelling) and (wanted is None or changed & wanted)), None)


def compare_base(base):
    """Return what tcemu and ptxas decide differently about the mutants of a statement: laxer, stricter, and the exceptions used."""
    target, spelling, text, taken = base
    statements = list(mutants(spelling, text))
    assert len(statements) == len(taken)
    laxer, stricter, used = [], [], set()
    for statement, legal, result in zip(statements, taken, link_each(target, statements), strict=True):
        refused = isinstance(result, Exception)
        if refused != legal:
            continue
        operands = split(statement.partition(" ")[2].rstrip(";"))
        name = find_exception(STRICTER if refused else LAXER, spelling, split(text), operands)
        used.add(name)
        if name is None:
            (stricter if refused else laxer).append((statement, str(result) if refused else ""))
    return laxer, stricter, used


def test_the_record_has_every_class_of_operands():
    assert len(bases()) > 1100 and sum(len(taken) for *_, taken in bases()) > 110_000
    names = {spelling.partition(".")[0] for _, spelling, _, _ in bases()}
    assert {"add", "atom", "bar", "bra", "cp", "cvt", "ld", "mbarrier", "mma", "setp", "shfl", "st", "vote", "wgmma", "wmma"} <= names


@pytest.mark.parametrize("batch", sample_cases(range(BATCHES), (7,)))
def test_operands_of_a_wrong_class_are_refused_by_name(batch):
    """Every mutant ends in one of tcemu's own errors or links, as ptxas decides, but for the named exceptions."""
    laxer, stricter, seen = [], [], 0
    for base in bases()[batch::BATCHES]:
        more, fewer, _ = compare_base(base)
        laxer += more
        stricter += fewer
        seen += len(base[3])
    assert laxer == [] and stricter == [], (len(laxer), laxer[:10], len(stricter), stricter[:10])
    assert seen > 1000


@pytest.mark.full
def test_every_exception_is_needed():
    used = {name for base in bases() for name in compare_base(base)[2]}
    assert used == {*LAXER, *STRICTER}


@pytest.mark.parametrize("batch", sample_cases(range(RUN_BATCHES), (3,)))
def test_what_is_taken_runs_to_its_end_or_to_a_named_error(batch):
    """A statement that links raises nothing but named errors when it runs."""
    draw, runs = random.Random(batch), 0
    for target, spelling, text, taken in draw.sample(bases(), len(bases())):
        legal = [statement for statement, bit in zip(mutants(spelling, text), taken, strict=True) if bit]
        statement = draw.choice(legal)
        if any(isinstance(result, Exception) for result in link_each(target, [statement])):
            continue
        module = parse_statements(target, [statement])
        with suppress(*RUN_ERRORS):
            run(module, grid=1, block=32, args=[bytes(64)], target=target, step_limit=50)
        runs += 1
        if runs == RUNS:
            return


@pytest.mark.parametrize("statement", ["mbarrier.arrive.b64 _, [%d5];", "mbarrier.init.shared.b64 [%d5], 1;", "st.shared.u32 [%d5], 1;"])
def test_a_kernel_without_shared_memory_is_out_of_bounds(statement):
    with pytest.raises(OutOfBounds, match="memory"):
        run(parse_statements("sm_90a", [statement]), grid=1, block=32, args=[bytes(64)], target="sm_90a")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("add.u32 5, %r1, %r2;", "operand 1 is 5, an integer constant; here the instruction takes a register of 32 bits"),
        ("add.u32 %laneid, %r1, 7;", "operand 1 is %laneid, a special register"),
        ("mov.u32 %tid.x, %r1;", "operand 1 is %tid.x, a special register"),
        ("atom.global.add.u32 %tid.x, [%d1], %r1;", "operand 1 is %tid.x"),
        ("vote.sync.all.pred %p1, 1.5, %r1;", "operand 2 is 0d3FF8000000000000, a floating-point constant"),
        ("bar.sync %p1;", "operand 1 is %p1, a register of .pred"),
        ("bar.sync 16;", "the barrier's number is 16; expected 0 to 15"),
        ("add.u32 {%r1, %r2}, %r3;", "operand 1 is {%r1, %r2}, a vector"),
        ("add.f32 %f1, %f2, 1;", "operand 3 is 1, an integer constant"),
        ("add.u32 %r1, %f1, 1;", "operand 2 is %f1, a register of .f32"),
        ("st.global.u32 %d1, %r1;", "operand 1 is %d1, a register of .b64; here the instruction takes an address"),
        ("mbarrier.init.shared.b64 [%d1], %p1;", "operand 2 is %p1, a register of .pred"),
        ("lop3.b32 %r1, %r2, %r3, %r4, %r5;", "operand 5 is %r5, a register of .b32; here the instruction takes an integer constant"),
        ("movmatrix.sync.aligned.m8n8.trans.b16 %p1, %r1;", "operand 1 is %p1, a register of .pred"),
        ("shfl.sync.idx.b32 %r1, [%d1], 1, 31, -1;", r"operand 2 is \[%d1\], an address"),
        ("bra 5;", "its operand must be a label"),
    ],
)
def test_errors_name_the_position_what_came_and_what_is_allowed(statement, said):
    (result,) = link_each("sm_90a", [statement])
    assert isinstance(result, Unsupported) and re.search(f"line 9, column 1: .*{said}", str(result)), result
