"""The README is short, every block of it runs when it is pasted alone and prints what stands below it, and its table is true."""

import re
from codeop import compile_command

import pytest
from support import pages

import tcemu
from tcemu.engine.isa.targets import resolve_target

README = (pages.ROOT / "README.md").read_text()
BLOCKS = pages.blocks(README)
RUN = [block for block in BLOCKS if block.runs]
MOST_WORDS = 700
F16 = ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32")


def test_it_is_short():
    assert len(README.split()) <= MOST_WORDS


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.code.splitlines()[-1][:30])
def test_a_block_that_is_pasted_alone_prints_what_is_shown(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [(_, out)] = pages.run_page([block])
    assert pages.comparable(out) == pages.comparable(pages.shown_text(block, README))
    assert out


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.code.splitlines()[-1][:30])
def test_the_prompt_takes_it_line_by_line(block):
    """Python's interactive prompt ends a loop at an empty line alone."""
    waiting: list[str] = []
    for line in [*block.code.splitlines(), ""]:
        waiting.append(line)
        if compile_command("\n".join(waiting), symbol="single") is not None:
            waiting.clear()
    assert waiting == []


def test_there_are_four_of_them():
    """A model, two GPUs, an explanation, registers."""
    assert [block.language for block in RUN] == ["python"] * 4
    assert all(f"tcemu.{name}(" in block.code for block, name in zip(RUN, ("emulate", "gemm", "explain", "mma"), strict=True))


def test_the_two_commands():
    """The first is what a user runs, the second what .ci/run runs, which finds it by its beginning."""
    assert [line for block in BLOCKS for line in block.others] == [
        "python3 -m venv .venv && .venv/bin/pip install '.[cpu]' && .venv/bin/tcemu demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest -n 2 --dist loadfile",
    ]


def test_the_table_of_gpus_is_what_the_package_says():
    rows = re.findall(r"^\| (\w[^|]*) \| `(sm_\w+)` \| (\w+) \|$", README, re.MULTILINE)
    assert len(rows) >= 8
    for names, target, level in rows:
        for name in names.split(", "):
            assert resolve_target(name) == target
        ops = [op for op in F16 if target in tcemu.targets(op)]
        assert tcemu.evidence(ops[0], target).level == level


@pytest.mark.parametrize(
    ("text", "other", "same"), [("9.1 s  x", "12 s x", True), ("9.1 ms", "9.1 s", False), ("0.1 ulps", "0.2 ulps", False)]
)
def test_only_times_are_forgiven(text, other, same):
    assert (pages.comparable(text) == pages.comparable(other)) == same
