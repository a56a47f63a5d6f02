"""1,000 PTX files with mistakes: each is parsed, linked and run to its end or to a named error, and none hangs."""

import re
import time
import warnings
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from support.ptx_mutations import mutate
from support.sampling import sample_cases

from tcemu import NotModelled, UndefinedBehaviour, Unsupported
from tcemu.kernels.ptx.linker.linked_kernel import link
from tcemu.ptx import Misaligned, OutOfBounds, PtxError, StepLimit, Trapped, parse, run

FOLDER = Path(__file__).parents[2]
LARGEST = 60_000  # characters of a file that is mutated
NAMED = (PtxError, Unsupported, NotModelled, UndefinedBehaviour, OutOfBounds, Misaligned, Trapped, StepLimit)
STEPS, SECONDS = 300, 300
COUNTS = ("cases", "words")  # parameters of 64 bits that are no pointers
FILES, BATCH = 1000, 50


@cache
def texts():
    """Return the files that are mutated."""
    found = [path.read_text() for path in sorted(FOLDER.glob("*kernels/**/*.ptx"))]
    return [text for text in found if len(text) <= LARGEST]


def make_file(number):
    """Return a file with mistakes."""
    return mutate(texts()[number % len(texts())], number)


def check_file(text):
    """Return the entries of a text that parses and links, or the named error."""
    try:
        module = parse(text)
        assert parse(str(module)) == module
        with jax.enable_x64(True):
            for entry in module.entries.values():
                link(module, entry, module.target, checked=True)
    except NAMED as error:
        return error
    return module


def launch_entry(module):
    """Run the first entry on zeros and small numbers, for few statements."""
    entry = next(iter(module.entries.values()))
    bits = {parameter.name: int(re.sub(r"\D", "", parameter.kind.partition("x")[0])) for parameter in entry.parameters}
    args = []
    for parameter in entry.parameters:
        if parameter.shape:
            args.append(bytes(bits[parameter.name] // 8 * int(np.prod([size or 0 for size in parameter.shape]))))
        else:
            pointer = bits[parameter.name] == 64 and parameter.name not in COUNTS
            args.append(np.zeros(1024, np.uint32) if pointer else 3)
    threads = entry.directives.get("reqntid") or entry.directives.get("maxntid") or (32,)
    block = [min(size, 128) for size in threads[:1]]
    try:
        run(module, entry=entry.name, grid=1, block=block, args=args, target=module.target, shared_bytes=4096, step_limit=STEPS)
    except NAMED as error:
        return error
    except ValueError as error:  # of the launch's own arguments, which are not the file's
        assert re.match(r"(block|target|args|entry): |.* (holds|unknown target)", str(error)), error
        return error
    return None


def test_mistakes_differ_and_come_again():
    """Most files with mistakes are refused with a line; the others are PTX in spite of them, and are run."""
    assert make_file(17) == make_file(17)
    results = [check_file(make_file(number)) for number in range(0, FILES, 50)]
    refused = [result for result in results if isinstance(result, Exception)]
    assert 2 < len(refused) < len(results)
    assert all(re.search(r"line \d+", str(error)) for error in refused)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "add.s32 %rd1, %r1, %r2;",
            "line 5, column 53: add.s32: operand 1 is %rd1, a register of .b64; here the instruction takes",
        ),
        ("add.s32 %p1, %r1, %r2;", "%p1, a register of .pred; here the instruction takes a register of 32 bits"),
        ("selp.b32 %r1, %r1, %r2, %r2;", "operand 4 is %r2, a register of .b32; here the instruction takes a predicate"),
        ("cvt.u64.u32 %r1, %r2;", "%r1, a register of .b32; here the instruction takes a register of 64 bits"),
        ("cvt.u16.u32 %r1, %rd1;", ""),
    ],
)
def test_registers_of_other_sizes_are_refused_before_anything_runs(statement, said):
    head = ".version 8.0\n.target sm_80\n.address_size 64\n.entry k() {\n"
    result = check_file(f"{head}.reg .b32 %r<3>; .reg .b64 %rd<2>; .reg .pred %p<2>;{statement} ret; }}")
    assert said in str(result) if said else not isinstance(result, Exception)


@pytest.mark.parametrize("batch", sample_cases(range(FILES // BATCH), ()))
def test_a_file_with_mistakes_is_refused_by_name(batch):
    for number in range(BATCH * batch, BATCH * (batch + 1)):
        began = time.monotonic()
        check_file(make_file(number))
        assert time.monotonic() - began < SECONDS, number


@pytest.mark.parametrize("batch", sample_cases(range(FILES // BATCH), ()))
def test_a_file_with_mistakes_runs_to_its_end_or_to_a_named_error(batch):
    _run_some(range(BATCH * batch, BATCH * (batch + 1)))


@pytest.mark.parametrize("step", sample_cases((40, 100), (100,)))
def test_some_files_with_mistakes_run(step):
    _run_some(range(0, 400, step))


def _run_some(numbers):
    for number in numbers:
        module = check_file(make_file(number))
        began = time.monotonic()
        if not isinstance(module, Exception) and module.entries:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                launch_entry(module)
        assert time.monotonic() - began < SECONDS, number
