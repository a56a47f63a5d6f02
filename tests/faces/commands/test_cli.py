"""The command line in this process: every message of a user's error, and whole runs."""

import copy
import io
import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.base.progress import REPORT_INTERVAL
from tcemu.cli import main
from tcemu.faces.commands import gemm_command as command
from tcemu.faces.commands import gemm_command as products
from tcemu.operations.products.gemm import gemm

F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
OPS = {
    F16: 2e-2,
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16": 2e-2,
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": 2e-2,
    "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64": 2e-13,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with A [20, 35], B [35, 9] and C [20, 9] of normal float32."""
    rng = np.random.default_rng(0)
    for name, shape in (("A", (20, 35)), ("B", (35, 9)), ("C", (20, 9))):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=shape).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arrays(*names: str) -> list[np.ndarray]:
    return [np.load(f"{name}.npy") for name in names]


def figures(out: str) -> dict[str, list[float]]:
    """The printed table, line by line."""
    found = {}
    for line in out.splitlines():
        for name, label in command.ERROR_KINDS.items():
            if line.startswith(label):
                found[name] = [float(x) for x in line[len(label) :].split()]
    return found


FAULTS = {
    "missing": (["X.npy", "B.npy"], r"A: X\.npy cannot be read: No such file"),
    "folder": (["A.npy", "."], r"B: \. cannot be read: Is a directory"),
    "empty file": (["empty.npy", "B.npy"], r"A: empty\.npy is not a \.npy file"),
    "text": (["text.npy", "B.npy"], r"A: text\.npy is not a \.npy file; numpy\.save writes one"),
    "archive": (["two.npz", "B.npy"], r"A: two\.npz is an \.npz archive.*one array"),
    "objects": (["objects.npy", "B.npy"], r"A: objects\.npy holds Python objects, which are never loaded"),
    "cut short": (["A.npy", "short.npy"], r"B: short\.npy is damaged"),
    "bfloat16": (["raw.npy", "B.npy"], r"A: raw\.npy holds raw bytes \(.V2\).*save x\.astype\(numpy\.float32\)"),
    "complex": (["complex.npy", "B.npy"], r"A: complex\.npy holds complex128; .*floats"),
    "words": (["words.npy", "B.npy"], r"A: words\.npy holds <U3; .*floats"),
    "longdouble": (["long.npy", "B.npy"], r"A: long\.npy holds float128; .*floats"),
    "record": (["record.npy", "B.npy"], r"A: record\.npy holds \[\('x', '<f4'\)\]; .*floats"),
    "wide integers": (["wide.npy", "B.npy"], r"A: wide\.npy holds integers beyond 2\^53"),
    "vector": (["A.npy", "vector.npy"], r"B: got shape \[35\].*matrix"),
    "K": (["A.npy", "C.npy"], r"A is .* \[20, 35\] and B is .* \[20, 9\]: K is 35 in A and 20 in B; they must be equal$"),
    "K transposed": (["A.npy", "A.npy"], r"K is 35 in A and 20 in B; .*; B transposed would fit"),
    "leading axes": (["batch2.npy", "batch3.npy"], r"the batch axes of A, \[2\], and of B, \[3\], do not broadcast"),
    "C": (["A.npy", "B.npy", "-c", "A.npy"], r"C: .*\[20, 35\].*\[20, 9\]"),
    "no folder": (["A.npy", "B.npy", "-o", "no/D.npy"], r"D: the folder no does not exist"),
    "folder for a file": (["A.npy", "B.npy", "-o", "."], r"D: \. is a folder; name a file in it"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_said_in_one_line(fault, folder, capsys):
    words, message = FAULTS[fault]
    (folder / "empty.npy").touch()
    (folder / "text.npy").write_text("1 2 3\n")
    np.savez("two.npz", a=np.ones(2))
    np.save("objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    (folder / "short.npy").write_bytes((folder / "B.npy").read_bytes()[:-8])
    np.save("raw.npy", np.ones((4, 4), ml_dtypes.bfloat16))
    np.save("complex.npy", np.ones((4, 4), complex))
    np.save("words.npy", np.array([["abc"]]))
    np.save("long.npy", np.ones((4, 4), np.longdouble))
    np.save("record.npy", np.zeros((4, 4), [("x", "<f4")]))
    np.save("wide.npy", np.full((4, 4), 2**53 + 1))
    np.save("vector.npy", np.ones(35))
    np.save("batch2.npy", np.ones((2, 4, 5)))
    np.save("batch3.npy", np.ones((3, 5, 4)))
    assert main(["gemm", *words, "--op", F16]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tcemu gemm: ")
    assert error.count("\n") == 1
    assert re.search(message, error.strip()), error


@pytest.mark.parametrize(
    ("op", "target", "message"),
    [
        ("mma.sync.aligned.m16n8k17.row.col.f32.f16.f16.f32", "sm_90a", "m16n8k17"),
        ("matmul", "sm_90a", "matmul"),
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32", "sm_90a", "sm_90a"),
        (F16, "sm_91", "sm_91"),
    ],
)
def test_an_instruction_that_is_not_there(op, target, message, folder, capsys):
    assert main(["gemm", "A.npy", "B.npy", "--op", op, "--target", target]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error


@pytest.mark.parametrize("words", [[], ["gem"], ["gemm", "A.npy"], ["gemm", "A.npy", "B.npy"], ["demo", "now"]])
def test_words_that_are_no_command(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: tcemu" in capsys.readouterr().err


@pytest.mark.parametrize("op", sample_cases(OPS, 8))
def test_a_product_from_files_to_a_file(op, folder, capsys):
    assert main(["gemm", "A.npy", "B.npy", "-c", "C.npy", "--op", op, "--target", "sm_90a", "-o", "D"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    a, b, c = arrays("A", "B", "C")
    d, wanted = np.load("D"), np.asarray(gemm(a, b, c, op=op, target="sm_90a"))
    assert d.dtype == wanted.dtype
    assert d.tobytes() == wanted.tobytes()
    exact = [[sum((Fraction(float(x)) * Fraction(float(y)) for x, y in zip(r, s, strict=True)), Fraction()) for s in b.T] for r in a]
    exact = [[x + Fraction(float(y)) for x, y in zip(r, s, strict=True)] for r, s in zip(exact, c, strict=True)]
    errors = np.array([[abs(Fraction(float(x)) - y) for x, y in zip(r, s, strict=True)] for r, s in zip(d, exact, strict=True)], float)
    largest, mean, *_ = figures(out)["emulated"]
    assert f"{largest:.3g} {mean:.3g}" == f"{errors.max():.3g} {errors.mean():.3g}"
    assert 0 < errors.max() < OPS[op]
    assert out.splitlines()[0] == f"{op} on sm_90a" and "The arithmetic is known by silicon: " in out.splitlines()[-2]
    assert "D [20, 9]" in out
    assert "6,300 multiply-accumulates" in out


@pytest.mark.full
def test_the_report_knows_a_copied_f64(folder, capsys, monkeypatch):
    """float64 cannot judge it: all figures come from rational arithmetic."""
    words = ["gemm", "A.npy", "B.npy", "--op", "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"]
    assert main(words) == 0
    own, real = capsys.readouterr().out, products.check
    monkeypatch.setattr(products, "check", lambda *asked: copy.deepcopy(real(*asked)))
    assert main(words) == 0
    without_times = lambda text: re.sub(r"[\d.]+ s\b", "", text)
    assert without_times(capsys.readouterr().out) == without_times(own)


@pytest.mark.full
def test_inputs_that_need_no_rounding_have_no_rounding_error(folder, capsys):
    for name in ("A", "B"):
        np.save(f"{name}.npy", np.load(f"{name}.npy").astype(np.float16))
    assert main(["gemm", "A.npy", "B.npy", "--op", F16]) == 0
    found = figures(capsys.readouterr().out)
    assert found["inputs"] == [0] * 6
    assert found["emulated"] == found["arithmetic"]
    assert found["emulated"][0] > 0


def test_nan_and_infinity_are_counted_and_left_out(folder, capsys):
    a, b = arrays("A", "B")
    a[18, 3], a[19, 4] = np.nan, np.inf
    np.save("A.npy", a)
    assert main(["gemm", "A.npy", "B.npy", "--op", F16, "-o", "D.npy"]) == 0
    out = capsys.readouterr().out
    assert "18 of 180 outputs are not finite and left out of the figures." in out
    assert "D: 9 NaN, 9 infinite; exact: 9 NaN, 9 infinite; plain float32: 9 NaN, 9 infinite." in out
    errors = np.abs(np.load("D.npy")[:18] - a[:18].astype(float) @ b.astype(float))
    largest, mean, *_ = figures(out)["emulated"]
    assert f"{largest:.3g} {mean:.3g}" == f"{errors.max():.3g} {errors.mean():.3g}"


def test_an_overflow_is_counted(folder, capsys):
    np.save("A.npy", np.full((2, 35), 300, np.float32))
    np.save("B.npy", np.full((35, 3), 300, np.float32))
    assert main(["gemm", "A.npy", "B.npy", "--op", "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"]) == 0
    out = capsys.readouterr().out
    assert "6 of 6 outputs are not finite" in out
    assert "D: 0 NaN, 6 infinite; exact: 0 NaN, 0 infinite; plain float32: 0 NaN, 0 infinite." in out
    assert figures(out) == {}


# ---- recipes, saturation and what-ifs


def test_inputs_out_of_range_are_counted_and_saturate(folder, capsys):
    """Of e4m3 they become NaN, of f16 Inf, of e2m1, which has neither, the largest; infinities that were there before do not count."""
    a = arrays("A")[0]
    a[3, :2], a[4, 1], a[5, 0] = 70000, -460, np.inf
    np.save("A.npy", a)
    for op, largest, count, became in (("f16", "65504", 2, "Inf"), ("e4m3", "448", 2, "NaN"), ("e2m1", "6", 3, "the largest")):
        target = [] if op != "e2m1" else ["--target", "RTX 5090"]
        assert main(["gemm", "A.npy", "B.npy", "--op", op, *target]) == 0
        assert f"{count} of 700 elements of A lie beyond {op}, whose largest is {largest}, and became {became}" in capsys.readouterr().out
    words = ["gemm", "A.npy", "B.npy", "--op", "e4m3", "-o", "D.npy"]
    assert main([*words, "--saturate"]) == 0
    out = capsys.readouterr().out
    assert "2 of 700 elements of A lie beyond e4m3, whose largest is 448, and became the largest; scale it down" in out
    np.testing.assert_array_equal(np.load("D.npy"), gemm(a, arrays("B")[0], op="e4m3", target="sm_90a", saturate=True))
    clipped = a.copy()
    clipped[3, :2] = 448
    np.save("A.npy", clipped)
    assert main([*words, "--overwrite"]) == 0
    assert "lie beyond" not in capsys.readouterr().out  # -460 rounds to -448, and what is infinite already is not counted


def test_a_what_if(folder, capsys):
    words = ["gemm", "A.npy", "B.npy", "--op", "f16", "-o", "D.npy", "--overwrite"]
    a, b = arrays("A", "B")
    assert main([*words, "--what-if", "fraction_bits=10,terms=4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{F16} on sm_90a with fraction_bits=10,terms=4\n") and out.endswith("a what-if: no GPU is known to have it.\n")
    model = tcemu.get_model(F16, "sm_90a").replace(fraction_bits=10, terms=4)
    np.testing.assert_array_equal(np.load("D.npy"), gemm(a, b, op=F16, target="sm_90a", model=model))
    assert main([*words, "--what-if", "bits=10"]) == 2
    assert "--what-if bits=10: unknown field 'bits'; the fields are terms, " in capsys.readouterr().err


@pytest.mark.parametrize("name", sample_cases(["deepseek", "mxfp8", "bf16 on A100", "fp8"], ["bf16 on A100"]))
def test_a_recipe_from_files_to_a_file(name, folder, capsys, monkeypatch):
    """D has the bits of matmul, whole, whatever the blocks of rows; the parts of its error are those of `compare`."""
    monkeypatch.setattr(command, "BLOCK_MACS", 1)
    a, b, c = arrays("A", "B", "C")
    assert main(["gemm", "A.npy", "B.npy", "-c", "C.npy", "--recipe", name, "-o", "D.npy"]) == 0
    out = capsys.readouterr().out
    recipe = tcemu.get_recipe(name)
    np.testing.assert_array_equal(np.load("D.npy"), tcemu.matmul(a, b, c, recipe=recipe))
    assert out.splitlines()[:3] == repr(recipe).splitlines()[:3]
    assert f"The arithmetic is known by {recipe.evidence['D'].level}: " in out
    assert main(["gemm", "A.npy", "B.npy", "--recipe", name]) == 0
    found = figures(capsys.readouterr().out)
    (row,) = tcemu.compare(lambda a, b: a @ b, [recipe], (a, b), results=False)
    assert found["emulated"][0] == pytest.approx(row.largest_error, rel=5e-3)
    squares = found["inputs"][1], found["arithmetic"][1]
    assert (squares[0] > squares[1]) == (row.operand_error > row.sum_error)


@pytest.mark.full
def test_a_recipe_of_integers_and_of_doubles(folder, capsys):
    """Whole numbers are taken as they are; a double is rounded once."""
    a, b = np.arange(-20, 20).reshape(4, 10), np.arange(30.0).reshape(10, 3) + 1e-12
    np.save("A.npy", a)
    np.save("B.npy", b)
    assert main(["gemm", "A.npy", "B.npy", "--recipe", "f16", "-o", "D.npy"]) == 0
    np.testing.assert_array_equal(np.load("D.npy"), a @ np.rint(b))
    assert figures(capsys.readouterr().out)["arithmetic"] == [0] * 6


@pytest.mark.full
def test_a_recipe_says_what_its_quantisers_lose(folder, capsys):
    a = arrays("A")[0]
    a[0, 0], a[0, 1] = 1e6, 1e-9
    np.save("A.npy", a)
    assert main(["gemm", "A.npy", "B.npy", "--recipe", "f16"]) == 0
    out = capsys.readouterr().out
    assert "1 of 700 elements of A lie beyond what their scale and f16 reach and became Inf. --saturate takes the largest instead." in out
    assert "1 of 700 elements of A are too small for f16 at their scale and became 0." in out
    assert main(["gemm", "A.npy", "B.npy", "--recipe", "f16", "--saturate", "-o", "D.npy"]) == 0
    assert "reach and became the largest." in capsys.readouterr().out and np.isfinite(np.load("D.npy")).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "fp9"], "did you mean 'fp8'"),
        (["--recipe", "fp8", "--rounding", "RZ"], "--rounding: the recipe"),
        (["--recipe", "fp8", "--target", "A100"], "The recipe works on sm_89"),
        (["--recipe", "fp8 on H100", "--target", "L4"], "target='sm_89'"),
        (["--recipe", "bf16", "--what-if", "terms=0"], "--what-if terms=0: "),
    ],
)
def test_a_recipe_that_cannot_be(words, said, folder, capsys):
    assert main(["gemm", "A.npy", "B.npy", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and said in error and error.count("\n") == 1


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"tcemu {tcemu.__version__}\n"


def test_an_instruction_or_a_recipe(folder, capsys):
    for words in (["--op", F16, "--recipe", "bf16"], []):
        with pytest.raises(SystemExit) as stopped:
            main(["gemm", "A.npy", "B.npy", *words])
        assert stopped.value.code == 2 and "--recipe" in capsys.readouterr().err


def test_integers_are_exact(folder, capsys):
    rng = np.random.default_rng(3)
    a, b = rng.integers(-128, 128, (5, 40)), rng.integers(-128, 128, (40, 6))
    np.save("A.npy", a)
    np.save("B.npy", b)
    assert main(["gemm", "A.npy", "B.npy", "--op", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "-o", "D.npy"]) == 0
    out = capsys.readouterr().out
    assert np.array_equal(np.load("D.npy"), a @ b)
    assert "A [5, 40] int64 · B [40, 6] int64" in out
    assert "which rounds nowhere on these inputs" in out
    assert set(figures(out)) == set(command.ERROR_KINDS)
    assert all(x == 0 for line in figures(out).values() for x in line)


@pytest.mark.parametrize("shape", sample_cases([(0, 5, 4), (3, 0, 4), (3, 5, 0)], 3))
def test_empty_matrices(shape, folder, capsys):
    m, k, n = shape
    np.save("A.npy", np.ones((m, k), np.float32))
    np.save("B.npy", np.ones((k, n), np.float32))
    np.save("C.npy", np.full((m, n), 7, np.float32))
    assert main(["gemm", "A.npy", "B.npy", "-c", "C.npy", "--op", F16, "-o", "D.npy"]) == 0
    d = np.load("D.npy")
    assert d.dtype == np.float32
    assert np.array_equal(d, np.full((m, n), 7))
    assert ("D is empty" in capsys.readouterr().out) == (m * n == 0)


@pytest.mark.full
def test_blocks_of_rows_change_nothing(folder, capsys, monkeypatch):
    words = ["gemm", "A.npy", "B.npy", "-c", "C.npy", "--op", F16, "-o", "D.npy"]
    assert main(words) == 0
    whole, found = np.load("D.npy"), figures(capsys.readouterr().out)
    monkeypatch.setattr(command, "BLOCK_MACS", 8 * 35 * 9)  # blocks of eight, eight and four rows
    assert command.block_rows(whole.shape, 35) == 8
    assert main([*words, "--overwrite"]) == 0
    assert np.load("D.npy").tobytes() == whole.tobytes()
    again = figures(capsys.readouterr().out)
    for name in ("emulated", "inputs", "arithmetic"):
        assert again[name] == pytest.approx(found[name], rel=2e-3)  # three digits are printed


@pytest.mark.parametrize(
    ("shape", "k", "rows"),
    [((2048, 2048), 2048, 64), ((4, 2048, 2048), 2048, 16), ((3, 5), 7, 3), ((0, 5), 7, 1), ((5, 0), 7, 5), ((10**6, 10**6), 10**6, 1)],
)
def test_the_rows_of_a_block(shape, k, rows):
    assert command.block_rows(shape, k) == rows


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_is_one_line_rewritten():
    progress = command.RowProgress(8, Terminal())
    progress.report(4)
    progress.report(8)
    assert re.fullmatch(r"\rtcemu gemm: 4 of 8 rows, 0 s\rtcemu gemm: 8 of 8 rows, 0 s\n", progress.stream.getvalue())


def test_progress_says_what_it_waits_for_before_the_first_block():
    progress = command.RowProgress(8, Terminal())
    for done in (0, 4):
        progress.compiling(done)
        progress.report(done + 4)
    assert progress.stream.getvalue() == (
        "tcemu gemm: compiling the product\rtcemu gemm: 4 of 8 rows, 0 s     \rtcemu gemm: 8 of 8 rows, 0 s\n"
    )
    elsewhere = command.RowProgress(8, io.StringIO())
    elsewhere.compiling(0)
    assert elsewhere.stream.getvalue() == ""


def test_progress_elsewhere_is_a_line_now_and_then():
    progress = command.RowProgress(8, io.StringIO())
    progress.report(2)
    assert progress.stream.getvalue() == ""
    progress.started -= REPORT_INTERVAL + 0.2
    progress.report(4)
    progress.report(6)
    assert progress.stream.getvalue() == "tcemu gemm: 4 of 8 rows, 10 s\n"
