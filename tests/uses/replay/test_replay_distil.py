"""Surveys become profiles: `benchmarks/replay_distil.py` on lines that are written out here. And the documents' figures."""

import importlib.util
import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tcemu.formats import F16, F32
from tcemu.operations.products.library.kernel_json import to_dict
from tcemu.operations.products.library.kernel_recipe import Conditions, KernelRecipe, Slices, Steps
from tcemu.uses.replay.kernel_profiles import list_profiles, read_profile

ROOT = Path(__file__).parents[3]
WGMMA = "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
CHAIN = KernelRecipe(F16, F16, F32, Steps(WGMMA, "sm_90a"), Slices.single(64))  # pyright: ignore[reportArgumentType]
MACHINE = {"gpu": "NVIDIA H200", "sm_count": 132, "torch": "2.11"}


@pytest.fixture(scope="module")
def script():
    """The script as a module; the folder of the benchmarks is on the path while it is read."""
    spec = importlib.util.spec_from_file_location("replay_distil", ROOT / "benchmarks" / "replay_distil.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


def line(m, n, *, slices=1, version="torch 2.11", survey="torch-f16", **changes):
    """One shape that was replayed."""
    known = Conditions(m=m, n=n, library=survey, version=version, gpu="NVIDIA H200", sm_count=132, evidence="32 held-out outputs")
    recipe = to_dict(replace(CHAIN, slices=Slices.even(64, slices, 32), conditions=known))
    held = {
        "survey": survey,
        "m": m,
        "n": n,
        "k": 64,
        "recipe": recipe,
        "fresh": 2 * m * n,
        "wrong": 0,
        "why": "",
        "words": {"codes": "AA"},
    }
    return held | changes


def survey(path, *lines, machine=None, date="2026-11-22"):
    head = {"machine": MACHINE if machine is None else machine, "date": date}
    path.write_text("".join(json.dumps(one) + "\n" for one in (head, *lines)))
    return path


def run(script, monkeypatch, folder, *surveys):
    monkeypatch.setattr(sys, "argv", ["replay_distil.py", *map(str, surveys), "--out", str(folder)])
    return script.main()


def read_file(folder, name="torch-f16"):
    return read_profile((folder / f"{name}-NVIDIA-H200.json.xz").read_bytes())


NONE = {"recipe": None, "kernels": ["void splitKreduce_kernel<32>", "void cutlass::Kernel2<cutlass_80_gemm_align1>(x)"]}


def test_a_survey_becomes_a_profile(script, monkeypatch, tmp_path, capsys):
    undetermined = line(4, 5, why="2 orders that are not one give the same bits", **NONE)
    refused = {"survey": "torch-f16", "m": 4, "n": 6, "k": 64, "error": "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when"}
    lines = [line(8, 4), line(8, 8), line(4, 4, slices=2, more_words=[{"codes": "BB"}]), line(5, 5, wrong=3), undetermined, refused]
    path = survey(tmp_path / "survey.jsonl", *lines)
    path.write_text(path.read_text() + '{"survey": "torch-f16", "m": 1')  # cut off, as by a kill
    assert run(script, monkeypatch, tmp_path / "out", path) == 0
    made = read_file(tmp_path / "out")
    assert made.shapes == {(4, 4, 64): (0, 32), (8, 4, 64): (1, 64), (8, 8, 64): (1, 128)} and len(made.recipes) == 2
    assert (made.version, made.gpu, made.sm_count, made.date) == ("torch 2.11", "NVIDIA H200", 132, "2026-11-22")
    found = made.kernel_recipe((4, 4, 64))
    assert (
        found.slices.edges == (0, 32, 64) and found.conditions.m == 4 and found.conditions.evidence.startswith("32 outputs on 2026-11-22")
    )
    words = json.loads(lzma.decompress((tmp_path / "out" / "words.json.xz").read_bytes()))["words"]
    assert [(w["m"], w["n"], w["codes"], w.get("more_words")) for w in words] == [
        (4, 4, "AA", [{"codes": "BB"}]), (8, 4, "AA", None), (8, 8, "AA", None)
    ]  # fmt: skip
    assert (tmp_path / "out" / "undetermined.md").read_text().splitlines()[2:] == [
        "| torch-f16 | 4 x 5 x 64 | several orders give the same bits | cutlass_80_gemm_align1, splitKreduce |",
        "| torch-f16 | 4 x 6 x 64 | cuBLASLt refuses the product |  |",
        "| torch-f16 | 5 x 5 x 64 | fresh operands refute the order |  |",
    ]
    said = capsys.readouterr().out
    assert "| torch-f16 | 1 of 1 | 2 of 4 | 224 |" in said and "3 of 5 shapes, 224 outputs; 2 undetermined, 1 more that" in said


def test_shapes_are_added_and_the_last_line_counts(script, monkeypatch, tmp_path, capsys):
    first = survey(tmp_path / "first.jsonl", line(8, 4), line(8, 8), line(16, 8), line(4, 5, why="no order among", **NONE))
    again = line(8, 4, slices=2, fresh=7)
    second = [line(8, 4), again, line(4, 5), line(4, 4), line(8, 8, why="no order among", **NONE), line(16, 8, wrong=1)]
    assert run(script, monkeypatch, tmp_path, first) == 0
    table = tmp_path / "undetermined.md"
    table.write_text("A page.\n\n" + table.read_text())
    (tmp_path / "second").mkdir()
    for _ in range(2):  # the second time changes nothing
        assert run(script, monkeypatch, tmp_path, survey(tmp_path / "second.jsonl", *second, date="2026-11-24")) == 0
        made = read_file(tmp_path)
        assert {shape: outputs for shape, (_, outputs) in made.shapes.items()} == {
            (4, 4, 64): 32, (4, 5, 64): 40, (8, 4, 64): 7, (8, 8, 64): 128
        }  # fmt: skip
        assert len(made.kernel_recipe((8, 4, 64)).slices.edges) == 3 and len(made.kernel_recipe((8, 8, 64)).slices.edges) == 2
        assert made.date == "2026-11-22 to 2026-11-24"
        text = table.read_text()
        assert text.startswith("A page.\n\n| product") and text.endswith(
            "| torch-f16 | 16 x 8 x 64 | fresh operands refute the order |  |\n"
        )
        assert text.count("\n| torch-f16") == 1
    other = survey(tmp_path / "other.jsonl", line(3, 3, survey="torch-bf16"))
    before = (tmp_path / "torch-f16-NVIDIA-H200.json.xz").read_bytes()
    assert run(script, monkeypatch, tmp_path, other) == 0 and (tmp_path / "torch-f16-NVIDIA-H200.json.xz").read_bytes() == before
    assert "torch-f16-NVIDIA-H200.json.xz: as it was" in capsys.readouterr().out and len(read_file(tmp_path, "torch-bf16").shapes) == 1


@pytest.mark.parametrize(
    ("lines", "machine", "said"),
    [
        ([line(4, 4, version="torch 2.12")], None, "one version of a library, not torch 2.11 and torch 2.12"),
        ([line(4, 4)], MACHINE | {"sm_count": 114}, "the lines are of two machines"),
        ([line(4, 4)], {}, "the lines are of two machines"),
    ],
)
def test_what_does_not_belong_together_is_refused(lines, machine, said, script, monkeypatch, tmp_path, capsys):
    first = survey(tmp_path / "first.jsonl", line(8, 4))
    assert run(script, monkeypatch, tmp_path, first) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    second = survey(tmp_path / "second.jsonl", *lines, machine=machine)
    with pytest.raises(SystemExit):
        run(script, monkeypatch, tmp_path, first, second)
    assert said in capsys.readouterr().err and {path: path.read_bytes() for path in before} == before


def test_a_profile_of_another_gpu_and_lines_of_none_are_refused(script, monkeypatch, tmp_path, capsys):
    other = script.profile("torch-f16", {"machine": MACHINE | {"gpu": "H100"}, "date": "2026-11-22"}, {("torch-f16", 8, 4, 64): line(8, 4)})
    (tmp_path / "torch-f16-NVIDIA-H200.json.xz").write_bytes(lzma.compress(json.dumps(other).encode()))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    for path, said in (
        (survey(tmp_path / "one.jsonl", line(8, 4)), "the profile is of torch-f16 on H100"),
        (empty, "these are no surveys"),
    ):
        with pytest.raises(SystemExit):
            run(script, monkeypatch, tmp_path, path)
        assert said in capsys.readouterr().err


def test_the_documents_have_the_figures_of_what_is_shipped(script):
    """The page's table, and the sums wherever they stand, are what the command prints of the profiles and of what is missing."""
    data = ROOT / "docs" / "data"
    profiles = [p for p in list_profiles() if p.gpu == "NVIDIA H200"]
    found = {(p.library, *shape) for p in profiles for shape in p.shapes}
    outputs = {p.library: sum(count for _, count in p.shapes.values()) for p in profiles}
    others = [count for p in list_profiles() if p not in profiles for _, count in p.shapes.values()]
    rows = script.undetermined({}, (data / "replay_undetermined.md").read_text(), found)
    *table, _, _ = script.counted(found, outputs, rows)
    assert "\n".join(table) == (data / "replay_survey.md").read_text().rstrip()
    refused = sum(script.REFUSED in row for row in rows)
    missing, compared = len(rows) - refused, f"{sum(outputs.values()):,}"
    for page, figures in (
        (
            "howto/replay_h200.md",
            (
                f"{len(found):,} recipes",
                f"{compared} outputs",
                f"{missing} shapes are undetermined",
                f"The {missing} of {len(found) + missing:,} shapes",
            ),
        ),
        ("verified.md", (f"{len(found):,} shapes of cuBLAS", f"of {compared} ")),
        ("howto/replay_predicted.md", (f"{len(others):,} shapes", f"{sum(others):,} outputs")),
    ):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert [figure for figure in figures if figure not in text] == [], page
