"""The parser of PTX: whole files, a kernel for every instruction, each rule of the grammar, and errors for text that is not PTX."""

import pickle
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.engine.backends.native.native_statement import statement_kernel
from tcemu.kernels.ptx.text.module import Address, Float, Guard, Integer, Negated, Pair, Pointer, Register, Sink, Symbol, Vector
from tcemu.ptx import PtxError, parse

FILES = sorted(Path(__file__).parents[2].glob("*kernels/**/*.ptx"))
HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
ENTRY = ".visible .entry k(.param .u64 a)\n"


def instructions():
    """Those for which a kernel is written."""
    left_out = ("wait_group", "tcgen05")
    return [
        (target, op) for target in tcemu.targets() for op in tcemu.isa.instructions(target) if not any(name in str(op) for name in left_out)
    ]


def body(text):
    """Return the function `k` of a file in which it has these lines."""
    return parse(f"{HEAD}{ENTRY}{{\n{text}\n}}\n").functions["k"]


def operands(text, declared=""):
    """Return the operands of one instruction."""
    return body(f".reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<4>; .reg .f32 %f<4>; {declared} {text}").statements[-1].operands


def read_twice(text):
    """Parse a text, and check that the module's own text parses to an equal module."""
    module = parse(text)
    again = parse(str(module))
    assert again == module
    assert str(again) == str(module)
    return module


# ---- whole files


@pytest.mark.parametrize("path", sample_cases(FILES, 4), ids=lambda path: path.name)
def test_a_file_is_read_and_prints_as_text_that_says_the_same(path):
    text = path.read_text()
    module = read_twice(text)
    lines = text.splitlines()
    for function in module.functions.values():
        for statement in function.statements:
            rest = lines[statement.position.line - 1][statement.position.column - 1 :]
            assert rest.replace(" ", "").startswith(statement.opcode)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas here")
@pytest.mark.parametrize("path", sample_cases(FILES, FILES[:2]), ids=lambda path: path.name)
def test_the_printed_text_is_what_ptxas_takes(path, tmp_path):
    module = parse(path.read_text())
    (tmp_path / "printed.ptx").write_text(str(module))
    command = ["ptxas", "-c", f"-arch={module.target}", str(tmp_path / "printed.ptx"), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_kernels_of_instructions_are_read():
    for target, op in instructions()[::200]:
        made = statement_kernel(op, target)
        (entry,) = read_twice(made.text).entries.values()
        assert [parameter.name for parameter in entry.parameters] == [*(given.name for given in made.parameters), "cases", "words"]
        assert entry.directives["maxntid"] == (made.threads, 1, 1)
        assert any(str(op).startswith(statement.opcode) for statement in entry.statements)


def test_no_kernel_is_written_for_tensor_memory():
    with pytest.raises(tcemu.Unsupported, match="tensor memory"):
        statement_kernel(tcemu.parse("f16 tcgen05"), "B200")


@pytest.mark.full
def test_the_kernels_of_all_instructions_are_read():
    for target, op in instructions():
        read_twice(statement_kernel(op, target).text)


def test_a_long_file_takes_time_by_its_length():
    lines = "\n".join(f"add.s32 %r{at % 50}, %r{at % 7}, {at};{{ .reg .b32 t; mov.b32 t, %r1; }}" for at in range(20_000))
    function = body(f".reg .b32 %r<50>;\n{lines}")
    assert len(function.statements) == 40_000
    assert function.registers["t$19999"] == "b32"


# ---- rules, one by one


def test_the_head():
    module = parse(".version 8.3\n.target sm_80, debug\n.address_size 64\n")
    assert (module.version, module.target, module.address_size, module.functions) == ((8, 3), "sm_80", 64, {})


def test_comments_and_lines_for_debuggers_say_nothing():
    plain = parse(f"{HEAD}{ENTRY}{{ ret; }}")
    text = f"""// one
{HEAD}/* two
 * lines */ .file 1 "a.cu", 12, 34
{ENTRY} .pragma "a", "b"; {{ .loc 1 2 3
.loc 1 4 5, function_name $s + 3, inlined_at 1 2 3
.pragma "nounroll"; ret /* ; */ ; // ret;
}} .section .debug_str {{ $s: .b8 1,2
{{ .b32 .a }} }}"""
    assert parse(text) == plain
    assert parse(text).functions["k"].position == (7, 17)


def test_parameters_and_directives():
    text = f"""{HEAD}.weak .entry k(.param .u64 .ptr .global .align 16 a, .param .align 8 .b8 s[24],
        .param .f32 f, .param .b64 .ptr.shared b, .param .v2 .f32 v) .maxntid 128, 2, 1 .minnctapersm 2 .noreturn {{ ret; }}"""
    function = read_twice(text).functions["k"]
    shown = [(given.name, given.kind, given.shape, given.alignment) for given in function.parameters]
    assert shown == [("a", "u64", (), 8), ("s", "b8", (24,), 8), ("f", "f32", (), 4), ("b", "b64", (), 8), ("v", "f32", (2,), 8)]
    assert function.directives == {"maxntid": (128, 2, 1), "minnctapersm": (2,), "noreturn": ()}


def test_registers():
    registers = body(".reg .b32 b, %r<3>, $b; .reg .v2 .f32 V, W<2>; .reg .pred %p; .reg .b128 q;").registers
    vectors = {f"{name}.{axis}": "f32" for name in ("V", "W0", "W1") for axis in "xy"}
    assert registers == {"b": "b32", "%r0": "b32", "%r1": "b32", "%r2": "b32", "$b": "b32", **vectors, "%p": "pred", "q": "b128"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mov.b32 %r1, -5", (Register("%r1"), Integer(-5))),
        ("mov.b32 %r1, 0x1FU", (Register("%r1"), Integer(31))),
        ("mov.b32 %r1, 017", (Register("%r1"), Integer(15))),
        ("mov.b32 %r1, 0b101", (Register("%r1"), Integer(5))),
        ("mov.b64 %r1, 18446744073709551615", (Register("%r1"), Integer(2**64 - 1))),
        ("mov.f32 %f1, 0f3F800000", (Register("%f1"), Float(0x3F800000, 32))),
        ("mov.f64 %f1, 0d3FF0000000000001", (Register("%f1"), Float(0x3FF0000000000001, 64))),
        ("mov.f32 %f1, -1.5e3", (Register("%f1"), Float(struct.unpack("<Q", struct.pack("<d", -1500.0))[0], 64))),
        ("mov.u32 %r1, %tid.x", (Register("%r1"), Register("%tid.x"))),
        ("mov.u32 %r1, WARP_SZ", (Register("%r1"), Integer(32))),
        ("mov.u64 %rd1, x+4", (Register("%rd1"), Symbol("x", 4))),
        ("ld.global.b32 %r1, [%rd1]", (Register("%r1"), Address(Register("%rd1")))),
        ("ld.global.b32 %r1, [%rd1+-4]", (Register("%r1"), Address(Register("%rd1"), -4))),
        ("ld.global.b32 %r1, [%rd1+4*2+1]", (Register("%r1"), Address(Register("%rd1"), 9))),
        ("ld.global.b32 %r1, [x+8]", (Register("%r1"), Address(Symbol("x"), 8))),
        ("ld.local.b32 %r1, [16]", (Register("%r1"), Address(None, 16))),
        ("ld.global.v2.b32 {%r1, _}, [x]", (Vector((Register("%r1"), Sink())), Address(Symbol("x")))),
        ("setp.eq.and.b32 %p1|%p2, %r1, 1, !%p3",
         (Pair(Register("%p1"), Register("%p2")), Register("%r1"), Integer(1), Negated(Register("%p3")))),
        ("elect.sync _|%p1, -1", (Pair(Sink(), Register("%p1")), Integer(-1))),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, 0}], [%r3+8]",
         (Address(Register("%r1")), Address(Register("%rd1"), 0, Vector((Register("%r2"), Integer(0)))), Address(Register("%r3"), 8))),
        ("mma.x {%f1, %f2}, {%r1}, {0, 1}, 0x0",
         (Vector((Register("%f1"), Register("%f2"))), Vector((Register("%r1"),)), Vector((Integer(0), Integer(1))), Integer(0))),
        ("mov.v2 V, W", (Vector((Register("V.x"), Register("V.y"))), Vector((Register("W.x"), Register("W.y"))))),
        ("mov.f32 V.g, V.x", (Register("V.y"), Register("V.x"))),
        ("bar.sync 0", (Integer(0),)),
        ("ret", ()),
    ],
)  # fmt: skip
def test_operands(text, wanted):
    assert operands(f"{text};", ".reg .v2 .f32 V, W; .global .b32 x[4];") == wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7), ("(1+2)*3", 9), ("1<<4|1", 17), ("7&3^1", 2), ("-7/2", -3), ("-7 % 2", -1), ("!5", 0), ("~0", -1), ("1<2?5:6", 5),
        ("(2>1)&&(0||0)", 0), ("-1>>1", -1), ("(.u64)-1>>63", 1), ("0xFFFFFFFFFFFFFFFF", 2**64 - 1), ("0x7FFFFFFFFFFFFFFF+1", -(2**63)),
        ("3==3U", 1), ("-1U", 2**64 - 1), ("WARP_SZ*2", 64), ("1?2?3:4:5", 3), ("8-4-2", 2), ("(.s64)2.9", 2), ("5 % 3", 2),
    ],
)  # fmt: skip
def test_constant_expressions(text, value):
    assert operands(f"mov.b64 %rd1, {text};")[1] == Integer(value)


def test_constant_expressions_of_floating_point():
    (_, result) = operands("mov.f64 %rd1, 1 < 2 ? 1.5+2.0*3.0 : .5;")
    assert result == Float(struct.unpack("<Q", struct.pack("<d", 7.5))[0], 64)


@pytest.mark.parametrize(
    ("declared", "shape", "initial", "pointers"),
    [
        (".b8 v[4] = {1, 255, -1, 0x7f}", (4,), bytes([1, 255, 255, 127]), ()),
        (".u16 v = 513", (), b"\1\2", ()),
        (".b16 v[2][3] = {{1, 2}, {3}}", (2, 3), struct.pack("<4H", 1, 2, 0, 3), ()),
        (".b8 v[] = {1, 2, 3}", (3,), b"\1\2\3", ()),
        (".f32 v[4] = {0f3FC00000, 1.5, -2.0, 1e40}", (4,), struct.pack("<4f", 1.5, 1.5, -2, float("inf")), ()),
        (".f64 v[2] = {0d3FF0000000000000, 0f3FC00000}", (2,), struct.pack("<2d", 1, 1.5), ()),
        (".v2 .u32 v[2] = {{1, 2}, {3, 4}}", (2, 2), struct.pack("<4I", 1, 2, 3, 4), ()),
        (".u64 v[3] = {x, 7, generic(x)+8}", (3,), struct.pack("<3Q", 0, 7, 0),
         (Pointer(0, Symbol("x")), Pointer(16, Symbol("x", 8), generic=True))),
        (".u8 v[2] = {0xff(x), 0xff00(x)}", (2,), bytes(2), (Pointer(0, Symbol("x"), width=1), Pointer(1, Symbol("x"), width=1, shift=8))),
    ],
)  # fmt: skip
def test_variables_with_values(declared, shape, initial, pointers):
    variable = read_twice(f"{HEAD}.global .b32 x[4];\n.global {declared};\n").variables[1]
    assert (variable.shape, variable.initial, variable.pointers) == (shape, initial, pointers)


def test_variables():
    module = read_twice(
        f"{HEAD}.extern .shared .align 128 .b8 s[];\n.extern .global .u32 g;\n.global .u32 g = 3, h;\n{ENTRY}{{ .local .b32 x[2*3]; }}"
    )
    assert [(given.name, given.space, given.shape, given.alignment, given.extern) for given in module.variables] == [
        ("s", "shared", (None,), 128, True), ("g", "global", (), 4, False), ("h", "global", (), 4, False),
    ]  # fmt: skip
    assert module.functions["k"].variables[0].shape == (6,)


def test_scopes_tell_names_apart():
    function = body("""
        .reg .b32 r; .reg .pred p;
        L: { .reg .f32 r; .param .b32 q; mov.f32 r, 0f00000000; bra L; L: @p bra M; }
        { .reg .f64 r; .param .b32 q; L: mov.f64 r, 0d0000000000000000; st.param.b32 [q], 1; @!p bra L; }
        mov.b32 r, 1; bra L; M:
    """)
    assert function.registers == {"r": "b32", "p": "pred", "r$1": "f32", "r$2": "f64"}
    assert [variable.name for variable in function.variables] == ["q", "q$1"]
    assert function.labels == {"L": 0, "L$1": 2, "L$2": 3, "M": 8}
    targets = [statement.operands[0] for statement in function.statements if statement.name == "bra"]
    assert targets == [Symbol("L$1"), Symbol("M"), Symbol("L$2"), Symbol("L")]
    assert [statement.guard for statement in function.statements][2::3] == [Guard("p"), Guard("p", negated=True)]


def test_a_name_of_the_file_is_told_apart_from_one_within():
    module = read_twice(f"{HEAD}.global .b32 x;\n{ENTRY}{{ {{ .shared .b32 x; }} .reg .b64 r; mov.b64 r, x; }}")
    assert module.functions["k"].variables[0].name == "x$1"
    assert module.functions["k"].statements[0].operands[1] == Symbol("x")


def test_calls():
    text = f"""{HEAD}.func (.param .b32 o) f(.param .b32 i);
    .func g() {{ ret; }}
    {ENTRY}{{ .reg .b32 r; .reg .b64 p; .param .b32 x, y;
        P: .callprototype (.param .b32 _) _ (.param .b32 _); T: .calltargets f;
        call.uni (y), f, (x); call g; call (y), p, (x), P; call (y), p, (x), T; }}
    .func (.param .b32 o) f(.param .b32 i) {{ ret; }}"""
    module = read_twice(text)
    x, y, function = Vector((Symbol("x"),)), Vector((Symbol("y"),)), module.functions["k"]
    assert [statement.operands for statement in function.statements] == [
        (y, Symbol("f"), x), (Vector(()), Symbol("g"), Vector(())),
        (y, Register("p"), x, Symbol("P")), (y, Register("p"), x, Symbol("T")),
    ]  # fmt: skip
    assert function.call_targets == {"T": ("f",)}
    assert [given.kind for given in function.prototypes["P"].results] == ["b32"]
    assert module.functions["f"].defined
    assert [given.name for given in module.functions["f"].results] == ["o"]


def test_functions_that_are_declared_only():
    module = read_twice(f"{HEAD}.extern .func (.param .b32 r) vprintf(.param .b64 f) .noreturn;\n.entry k(.param .u64 a);\n")
    assert [(function.name, function.entry, function.defined) for function in module.functions.values()] == [
        ("vprintf", False, False), ("k", True, False),
    ]  # fmt: skip
    assert module.functions["vprintf"].directives == {"noreturn": ()}
    assert module.entries == {}


def test_lists_of_labels():
    text = f"{HEAD}{ENTRY}{{ .reg .b32 i; T: .branchtargets A, B; brx.idx i, T; A: ret; B: ret; }}"
    function = read_twice(text).functions["k"]
    assert function.branch_targets == {"T": ("A", "B")}
    assert function.labels == {"A": 1, "B": 2}


def test_a_function_by_another_name():
    module = read_twice(f"{HEAD}.func f() {{ ret; }}\n.func g();\n.alias g, f;\n")
    assert module.functions["g"].statements == module.functions["f"].statements


def test_spaces_within_an_opcode():
    statement = body(".reg .b32 r; @!%is_explicit_cluster ld .global .b32 r, [a];").statements[0]
    assert (statement.opcode, statement.name, statement.qualifiers) == ("ld.global.b32", "ld", ("global", "b32"))
    assert str(statement) == "@!%is_explicit_cluster ld.global.b32 r, [a];"


# ---- what is not PTX

ERRORS = [  # what stands in the body; the column of the mistake, from 1; what the message says
    ("add.s32 %r1, ;", 14, "expected a register, a constant, the name of a variable, a label, '{' or '[', found ';'"),
    ("add.s32 %r1 %r2;", 13, "expected ',' or ';', found '%r2'"),
    ("add.s32 %r1, %r9;", 14, "%r9 is neither a supported special register nor declared here"),
    ("mov.b32 %r1, here;", 14, "here is not declared here"),
    ("mov.u32 %r1, %tid.q;", 14, "%tid has .x, .y, .z and .w, but no .q"),
    ("bra INNER; { INNER: ret; }", 5, "INNER is not declared here"),
    (".reg .b32 %r1;", 11, "%r1 is declared twice; first as a register in line 6"),
    ("L: ret; L: ret;", 9, "L is declared twice; first as a label in line 7"),
    (".reg .q32 x;", 6, ".q32 is not a type of such a declaration"),
    (".reg .b32 x<0>;", 13, "the number of registers is 1 or more"),
    (".reg .b32 x<4000000000>;", 13, "a function has at most 1048576"),
    ("@%r1 ret;", 2, "%r1 is a register of .b32; a register of .pred is expected here"),
    ("@k ret;", 2, "k is a function; a register of .pred is expected here"),
    ("and.pred %p1, !%r1, %p1;", 16, "%r1 is a register of .b32"),
    ("ld.global.b32 %r1, [%f1];", 21, "%f1 is a register of .f32; an address has 32 or 64 bits"),
    ("L: ld.global.b32 %r1, [L];", 24, "L is a label; an address begins with a register or a variable"),
    ("mov.f32 %f1, %r1.x;", 14, "%r1 has no element .x: it is a register, and only vector registers (.v2, .v4) have elements"),
    ("mov.f32 %f1, V.w;", 14, "V has no element .w: its elements are x, y"),
    ("mov.b32 %r1, 12ab;", 14, "12ab is not a PTX number"),
    ("mov.b32 %r1, 0f123;", 14, "0f123 is not a PTX number"),
    ("mov.b64 %r1, 0x1FFFFFFFFFFFFFFFF;", 14, "does not fit 64 bits"),
    ("mov.b64 %r1, 1/0;", 15, "a division by zero"),
    ("mov.b64 %r1, 1<<64;", 15, "a shift of 64 bits by 64"),
    ("mov.b64 %r1, 1+1.5;", 15, "'+' takes two integers"),
    ("mov.b64 %r1, 1?1:1.5;", 15, "a condition is an integer"),
    ("mov.f32 %r1, -0f00000000;", 14, "'-' does not take a number written 0f..."),
    ("mov.b64 %r1, (.u64)(1.0/0.0);", 24, "a division by zero"),
    ("mov.b64 %r1, (.u64)(1e308*10.0);", 15, "infinity and NaN cannot become integers"),
    ("ld.b32 %r1, [%rd1+1.5];", 19, "expected an offset in bytes, found a floating-point number"),
    ("ld.b32 %r1, [%rd1;", 18, "expected '+', ',' or ']', found ';'"),
    ("mov.b32 {%r1, %r2, %rd1;", 24, "expected ',' or '}', found ';'"),
    ("mov.b32 %r1|5, 1;", 13, "expected a register, found '5'"),
    ("call nothing;", 6, "nothing is not declared here"),
    ("call a;", 6, "a is neither a function that is declared here nor a register"),
    ("T: .branchtargets k;", 19, "k is a function, not a label"),
    ("mov.b32 %r1, 1; §", 17, "'§' is not a character of PTX"),
    ("/* no end", 1, "this comment has no end"),
    ('.pragma "no end;', 9, "this string has no end"),
    (".shared .b32 s = 3;", 16, "only .global and .const variables"),
    (".shared .b32 s[];", 14, "the size of s is open"),
    (".shared .b32 s[2][];", 18, "only its first may be open"),
    (".shared .align 3 .b32 s;", 16, "an alignment is a power of two up to 1048576, not 3"),
    (".global .b8 s = 300;", 17, "300 does not fit a .b8"),
    (".global .b8 s[2] = {1,2,3};", 25, "there are more than 2 values for 2 elements"),
    (".global .b32 s = 1.5;", 18, "a .b32 variable is initialised with integers"),
    (".global .f32 s = {1.0};", 18, "expected a number or the name of a variable, found '{'"),
    (".global .f32 s = s;", 18, "a .f32 does not hold an address"),
    (".entry inner() { ret; }", 1, "expected an instruction, a label or a declaration"),
    ("ret", 5, "expected a register, a constant, the name of a variable, a label, '{' or '[', found '}'"),
    ("{ ret; ", None, "this bracket is not closed"),
    ("{" * 200 + "}" * 200, 64, "blocks are nested deeper than 64"),
    ("mov.b32 " + "{" * 60 + "}" * 60 + ";", 17, "vectors are nested deeper than 8"),
    ("mov.b32 %r1, " + "(" * 5000 + "1;", 79, "an expression is nested deeper than 64"),
    ("mov.b32 %r1, " + "-" * 5000 + "1;", 79, "an expression is nested deeper than 64"),
    ("mov.b32 %r1, " + "1?" * 5000 + "1;", None, "an expression is nested deeper than 64"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "column", "said"), ERRORS, ids=[said[:40] for _, _, said in ERRORS])
def test_an_error_says_where_and_what(text, column, said):
    declared = ".reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<4>; .reg .f32 %f<4>; .reg .v2 .f32 V;"
    with pytest.raises(PtxError) as caught:
        parse(f"{HEAD}{ENTRY}{{\n{declared}\n{text}\n}}\n")
    error = caught.value
    assert said in str(error).splitlines()[0]
    if column is not None:
        line = 7 + ("\n" in text) + (text == "ret")
        assert str(error).startswith(f"PTX, line {error.line}, column {error.column}: ")
        assert (error.line, error.column) == ((8, 1) if text == "ret" else (line, column))
        shown, mark = str(error).splitlines()[1:]
        assert len(shown) <= 124
        assert shown[mark.index("^") :].startswith(error.found.splitlines()[0] if error.found else "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1, column 1: expected .version at the beginning of the file, found the end of the text"),
        (".version nine", "line 1, column 10: expected a version, as 9.0, found 'nine'"),
        (".version 9.0 .entry", "line 1, column 14: expected .target, found '.entry'"),
        (f"{HEAD}.reg .b32 x;", "line 4, column 1: .reg is only declared within a function"),
        (f"{HEAD}.func f(){{ret;}} .func f(){{ret;}}", "line 4, column 23: f is defined twice; first in line 4"),
        (f"{HEAD}.func f(); .func (.param .b32 x) f(){{ret;}}", "line 4, column 34: f has other parameters or results in line 4"),
        (f"{HEAD}.entry k(.param .u64 a, .param .u64 a){{ret;}}", "line 4, column 37: a is declared twice"),
        (f"{HEAD}.global .u64 x; .global .u32 x;", "line 4, column 30: x is declared twice; first as a variable in line 4"),
        (f"{HEAD}.entry k() .maxfoo 3 {{ret;}}", "line 4, column 12: expected a directive of a function, '{' or ';', found '.maxfoo'"),
        (f"{HEAD}.section .debug {{", "line 4, column 17: this bracket is not closed"),
        (f"{HEAD}.alias a, b;", "line 4, column 8: a is not a function that is declared here"),
        (f"{HEAD}}}", "line 4, column 1: expected a directive, as .entry, .func or .global, found '}'"),
    ],
)  # fmt: skip
def test_errors_outside_functions(text, said):
    with pytest.raises(PtxError) as caught:
        parse(text)
    assert said in str(caught.value)


def test_an_error_can_be_sent_to_another_process():
    with pytest.raises(PtxError) as caught:
        parse("x")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.line, again.column, again.found) == (str(caught.value), 1, 1, "x")
    assert isinstance(again, ValueError)
