"""`tcemu check`, `tcemu list`, `tcemu show`."""

import pytest

from tcemu.cli import main

MMA = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"


def run(*words: str) -> int:
    return main(list(words))


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((MMA, "--target", "sm_90a"), 0, f"{MMA} is an instruction of sm_90a, from PTX ISA 8.4 on.\n"),
        (("mma.aligned.sync.row.col.m16n8k32.f32.e4m3.e4m3.f32", "--target", "sm_89"), 0, f"{MMA} is an instruction of sm_89"),
        ((MMA, "--target", "sm_80"), 1, "needs sm_89 or later; the target is sm_80"),
        ((MMA, "--target", "sm_90", "--isa", "8.3"), 1, "needs PTX ISA 8.4 or newer; the version is 8.3"),
        ((MMA, "--target", "sm_90", "--isa", "new"), 1, "isa: expected a PTX ISA version such as '8.7', got 'new'"),
        ((MMA + ".", "--target", "sm_90"), 1, "unknown qualifier '.'"),
        ((MMA, "--target", "sm_101a"), 2, "sm_101a is sm_110a since PTX ISA 9.0"),
        (("", "--target", "sm_90"), 1, "an empty string: unknown instruction"),
    ],
)
def test_check(capsys, words, status, said):
    assert run("check", *words) == status
    assert said in capsys.readouterr()[status == 2]  # that it cannot be asked is said on standard error


def test_list(capsys):
    assert run("list", "--target", "sm_120a", "--family", "mma", "--isa", "9.0", "--all-spellings") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == len(set(lines)) == 222 and err == "222 spellings\n"
    assert MMA in lines
    assert run("list", "--target", "sm_90", "--family", "wgmma") == 0
    assert capsys.readouterr() == ("", "0 instructions\n")
    assert run("list", "--target", "sm_99") == 2
    assert "unknown target 'sm_99'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("list", "--target", "sm_90", "--family", "nma")


def test_show(capsys):
    assert run("show", "wgmma.mma_async.sp.sync.aligned.m64n24k32.f32.f16.f16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        "wgmma.mma_async.sp.sync.aligned.m64n24k32.f32.f16.f16",
        "  family     wgmma.sp, PTX ISA 9.7.15.6.3",
        "  fields     m 64, n 24, k 32, d f32, a f16, b f16, sparse",
        "  operands   d, a_desc, b_desc, sp_meta, sp_sel, scale_d, imm_scale_a, imm_scale_b, imm_trans_a, imm_trans_b",
        "  operands   d, a, b_desc, sp_meta, sp_sel, scale_d, imm_scale_a, imm_scale_b, imm_trans_b",
        "  d          64 x 24 f32, 12 32-bit registers a lane",
        "  sp_meta    64 x 8 4-bit fields, 1 32-bit register a lane",
        "  sp_sel     one of 0, 1",
        "  a          64 x 16 f16, 4 32-bit registers a lane",
        "  legal on   sm_90a, from PTX ISA 8.2",
    ]
    assert lines[-1].startswith("  arithmetic ") and lines[-1].endswith(" (sm_90a)")
    assert run("show", "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64") == 0
    known = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  arithmetic ")]
    assert any("sm_90, sm_90a" in line and "silicon: " in line for line in known)
    assert run("show", "movmatrix.sync.aligned.m8n8.trans.b16") == 0
    assert "arithmetic" not in capsys.readouterr().out
    assert run("show", "wgmma.mma_async") == 1
    assert "missing qualifier" in capsys.readouterr().err
