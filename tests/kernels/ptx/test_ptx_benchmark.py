"""benchmarks/ptx.py runs its kernels, and their results are right."""

import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("kernel", ["mma.sync", pytest.param("tcgen05", marks=pytest.mark.full)])
def test_the_benchmark_of_a_kernel_finds_no_wrong_word(kernel, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["ptx.py", "--kernel", kernel, "--small"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "ptx.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "0 mismatches" in text
    assert re.search(rf"^ *{kernel.split('.')[0]} +[1-9]\d* times", text, re.MULTILINE)
