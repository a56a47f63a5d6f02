"""What people try first and get wrong: each is refused with what would work, or simply works."""

import contextlib
import re

import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.cli import main, parser
from tcemu.engine.isa.legality import targets
from tcemu.engine.isa.short_names import short_names

RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((4, 64), np.float32), RNG.standard_normal((64, 4), np.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "B.npy", B)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: list[str], capsys) -> tuple[int, str, str]:
    """The exit status, output and errors of a command; argparse's exit is one."""
    try:
        status = main(words)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


# ---- every short name, in every command that takes an instruction

COMMANDS_OF_INSTRUCTIONS = {  # command -> words for a short name and a target; those that compile are sampled in the usual run
    "check": lambda name, target: ["check", name, "--target", target],
    "show": lambda name, target: ["show", name, "--fragments"],
    "explain": lambda name, target: ["explain", name, "--random", "0", "--target", target],
    "gemm": lambda name, target: ["gemm", "A.npy", "B.npy", "--op", name, "--target", target],
    "fuzz": lambda name, target: ["fuzz", name, "--left", target, "--right", target, "--cases", "1", "--quiet"],
    "infer": lambda name, target: ["infer", name, "--target", target, "--cases", "4"],
}
REFUSALS = {
    "gemm": r"multiplies dense matrices|--recipe (mxfp8|mxfp4|nvfp4)",
    "fuzz": "its operands lie in memory",
    "infer": "range of its operands is too small|its operands lie in memory",
}
COMPILING = ("gemm", "fuzz", "infer")
QUICK = {"gemm": ("e4m3 wgmma", "f16 sparse"), "fuzz": ("s8",), "infer": ("s8",)}


@pytest.mark.parametrize("command", ["explain", *(pytest.param(name, marks=pytest.mark.full) for name in ("check", "show"))])
def test_every_listed_name_is_taken(command, folder, capsys):
    assert main(["list", "--short"]) == 0
    listed = dict(re.findall(r"^(\S[^\n]*?) +(sm_\w+) +\S+$", capsys.readouterr().out, re.MULTILINE))
    assert set(listed) == set(short_names())
    for name in listed:
        status, out, err = run(COMMANDS_OF_INSTRUCTIONS[command](name, targets(name)[-1]), capsys)
        assert (status, err) == (0, "") and str(tcemu.check(name, targets(name)[-1])) in out


NAMES_BY_COMMAND = [(command, name) for command in COMPILING for name in short_names()]


@pytest.mark.parametrize("pair", sample_cases(NAMES_BY_COMMAND, [pair for pair in NAMES_BY_COMMAND if pair[1] in QUICK[pair[0]]]))
def test_every_listed_name_computes_or_is_refused(pair, folder, capsys):
    command, name = pair
    status, out, err = run(COMMANDS_OF_INSTRUCTIONS[command](name, targets(name)[0]), capsys)
    assert "Traceback" not in err
    if status == 2:
        assert re.search(REFUSALS[command], err) and err.count("\n") == 1
    else:
        assert status == 0 and str(tcemu.check(name, targets(name)[0])) in out


# ---- words that are nearly right

MISTAKES = {  # words of a command -> what the error says
    "gem A.npy B.npy --op f16": "did you mean 'gemm'?",
    "lst --gpus": "did you mean 'list'?",
    "explan f16": "did you mean 'explain'?",
    "gemm A.npy B.npy --op f16 --taget H100": "unrecognized arguments: --taget H100 (did you mean --target?)",
    "gemm A.npy B.npy --op f16 --what-if fraction_bit=13": "unknown field 'fraction_bit', did you mean 'fraction_bits'?",
    "gemm A.npy B.npy --op f16 --what-if 13": "'13' is no FIELD=VALUE",
    "explain f16 --a 1 --b 1 --what-if term=8": "did you mean 'terms'?",
    "gemm A.npy B.npy --op f16 -o D.csv": "D: D.csv is no name of a .npy file, which is written; name it D.npy",
    "gemm A.npy B.npy --op f16 -o D.npz": "name it D.npy",
    "show f16 --svg D.png": "D.png is no name of a .svg file",
    "gemm A.npy B.npy --op deepseek": "'deepseek' is a recipe: --recipe deepseek",
    "gemm A.npy B.npy --op fp8": "'fp8' is a recipe: --recipe fp8",
    "gemm A.npy B.npy --op bf16 --target T4": "tcemu gemm: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 needs sm_80 or later",
    "gemm A.npy B.npy --op mxf8 --target B200": "--recipe mxfp8 finds block scales",
    "gemm A.npy B.npy --op nvf4 --target B200": "--recipe nvfp4 finds block scales",
    "gemm A.npy B.npy --op nvf4 --target sm_120a": "--recipe nvfp4 finds block scales",
    "gemm A.npy B.npy --recipe e4m3": "'e4m3' is an instruction: op='e4m3'",
    "gemm A.npy B.npy --recipe bf16_ --target H100": "did you mean 'bf16'",
    "list --family mma": "--family needs --target",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_told_what_would_work(words, folder, capsys):
    status, out, err = run(words.split(), capsys)
    assert status == 2 and out == "" and MISTAKES[words] in " ".join(err.split())


def test_words_in_either_case(folder, capsys):
    small, large = (run(["gemm", "A.npy", "B.npy", "--op", "f16", "--rounding", word], capsys)[1] for word in ("rz", "RZ"))
    table = lambda text: [line for line in text.splitlines() if "from" in line or "of it" in line]
    assert table(small) == table(large) != []


def test_a_product_is_written_where_its_name_says(folder, capsys):
    for name in ("D.npy", "D"):
        assert run(["gemm", "A.npy", "B.npy", "--op", "f16", "-o", name], capsys)[0] == 0
        assert np.load(name).shape == (4, 4)


def test_list_alone_is_an_overview(capsys):
    status, out, _ = run(["list"], capsys)
    assert status == 0 and "sm_75    Turing     T4" in out and "tcemu list --target H100" in out and "--short" in out


def test_the_table_of_evidence_stands_in_columns(capsys):
    _, out, _ = run(["list", "--evidence"], capsys)
    head, *rows = out.split("\n\n")[0].splitlines()[1:]
    assert all(re.match(r"\S.*?  +[\d,-]+", row) and len(row) == len(head) for row in rows)
    assert "sm_103f/a, sm_110f/a" in out


def test_the_example_of_run_runs_anywhere(folder, capsys):
    """The words of its help, in a folder without any file."""
    epilog = next(
        action.choices["run"].epilog
        for action in parser("run")._actions
        if hasattr(action, "choices") and action.choices and "run" in action.choices
    )
    words = epilog.removeprefix("example: tcemu ").split()
    status, out, err = run(words, capsys)
    assert (status, err) == (0, "") and "axpy.ptx is the example that tcemu brings along" in out
    result = np.load("results/arg2.npy")
    assert result.shape == (1024,) and (result == 2.5).all()
    (folder / "axpy.ptx").write_text("nothing")
    assert "axpy.ptx" in run([*words, "--overwrite"], capsys)[2]  # one's own file comes first


# ---- the same in Python


def test_a_number_beyond_its_format_is_named(capsys):
    status, out, _ = run(["explain", "e4m3", "--a", "500", "-1000", "--b", "1", "1"], capsys)
    assert status == 0 and "a_row[0] = 500 lies beyond e4m3, whose largest is 448, and became nan" in out and "saturate" in out
    assert "a_row[1] = -1000" in out
    status, out, _ = run(["explain", "e4m3", "--a", "500", "--b", "1", "--saturate"], capsys)
    assert "and became 448" in out and "D       43e00000 = 448" in out
    explained = tcemu.explain("e4m3", [500.0], [1], target="H100", saturate=True)
    assert explained.value == 448 and explained.to_dict()["out_of_range"] == list(explained.out_of_range) != []
    assert tcemu.explain("f16", [1e6], [1], target="H100").out_of_range[0].endswith("and became inf")
    assert tcemu.explain("s8", [300], [1], target="H100").out_of_range[0].endswith("and became 127")
    assert tcemu.explain("f16", [float("inf")], [1], target="H100").out_of_range == ()


def test_a_model_is_given_in_words():
    changed = tcemu.get_model("f16", "H100").replace(fraction_bits=13)
    expected = tcemu.gemm(A, B, op="f16", target="H100", model=changed)
    assert np.array_equal(tcemu.gemm(A, B, op="f16", target="H100", model="fraction_bits=13"), expected)
    recipe = tcemu.get_recipe("f16 on H100", model="fraction_bits=13")
    assert recipe.model == changed and recipe == tcemu.get_recipe("f16 on H100", model=changed)
    words, model = (tcemu.explain("f16", A[0], B[:, 0], target="H100", model=one) for one in ("fraction_bits=13", changed))
    assert words.to_dict() == model.to_dict()
    assert len(tcemu.explain("f16", [1], [1], target="H100", model=[None, "terms=8"]).explanations) == 2
    with pytest.raises(ValueError, match="unknown field 'fraction_bit', did you mean 'fraction_bits'"):
        tcemu.gemm(A, B, op="f16", target="H100", model="fraction_bit=13")


def test_arguments_in_the_wrong_order_are_refused():
    fn = lambda w, x: x @ w
    with pytest.raises(TypeError, match=r"emulate\('bf16', <function.*the function comes first: emulate\(fn, 'bf16'\)"):
        tcemu.emulate("bf16", fn)
    with pytest.raises(TypeError, match="fn: got 3"):
        tcemu.emulate(3, "bf16")
    with pytest.raises(TypeError, match="the function comes first"):
        tcemu.compare("bf16", fn, (B, A))
    with pytest.raises(TypeError, match=r"inputs: got float32\[64, 4\]; expected the arguments of fn as a tuple, such as \(weights, x\)"):
        tcemu.compare(fn, ["bf16 on H100"], B)
    with pytest.raises(TypeError, match="inputs: got dict"):
        tcemu.compare(fn, ["bf16 on H100"], {"w": B, "x": A})
    for nothing in ([], {}, ""):
        with pytest.raises(ValueError, match=r"policies: got .*; expected at least one recipe"):
            tcemu.compare(fn, nothing, (B, A))


def test_a_comparison_of_no_product_says_so():
    assert str(tcemu.compare(lambda x: x + 1, "bf16 on H100", (A,))).startswith("no product is replaced by these policies")


def test_recipes_and_instructions_are_told_apart():
    with pytest.raises(tcemu.Unsupported, match=r"'deepseek' is a recipe: tcemu.matmul\(a, b, recipe='deepseek'\)"):
        tcemu.gemm(A, B, op="deepseek", target="H100")
    with pytest.raises(tcemu.Unsupported, match=r"^mma.sync.*sm_75, which has no mma of bf16"):  # an instruction too, which a T4 lacks
        tcemu.gemm(A, B, op="bf16", target="T4")
    with pytest.raises(ValueError, match=r"'e4m3 wgmma' is an instruction: op='e4m3 wgmma', as tcemu.gemm takes"):
        tcemu.matmul(A, B, recipe="e4m3 wgmma")
    for written in ("fp16", "float16", "half", "Float16 on H100"):
        assert tcemu.get_recipe(written) == tcemu.get_recipe("f16")
    assert tcemu.get_recipe("bfloat16") == tcemu.get_recipe("bf16")


@pytest.mark.parametrize("words", [["\x1b[31mred"], ["check", "\x1b[31mred", "--target", "H100"], ["list", "--target", "\x9b31mred"]])
def test_codes_for_the_terminal_in_an_argument_are_escaped(words, capsys):
    with contextlib.suppress(SystemExit):
        main(words)
    printed = "".join(capsys.readouterr())
    assert "31mred" in printed and not {"\x1b", "\x9b"} & set(printed), printed
