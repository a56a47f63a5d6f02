"""Exponential and normal numbers, integers and multinomial draws of PyTorch on a GPU: the words of an H200."""

import hashlib
import json
import lzma
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gpu_runs.random_draws import list_calls, operands

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.distributions import integer_width, to_exponential, to_integers, to_normal
from tcemu.operations.functional.torch_cuda.random_numbers import GpuGenerator, draw_elements
from tcemu.uses.replay.aten_operations import OPERATIONS, Call, bind_arguments

RECORDED = json.loads(lzma.decompress((Path(__file__).parents[2] / "golden/torch_draws_h200.json.xz").read_bytes()))["calls"]
SEED, OFFSET = 1000, 4  # of the first call; each call has the next seed
USUAL = 2000  # elements up to which a call is in the usual run
DRAWS = {number: call for number, call in enumerate(list_calls()) if not call[0].startswith(("arg", "max", "min"))}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)


def generator_of(number):
    generator = GpuGenerator()
    generator.manual_seed(SEED + number, OFFSET)
    return generator


def compute(name, generator, dtypes, *args, **kwargs):
    arguments = bind_arguments(OPERATIONS[name], args, kwargs)
    return OPERATIONS[name].compute(Call(name, arguments, dtypes, "H200", generator=generator)).results[0]


def draw(number, generator):
    """Return the result of a call of the recording."""
    name, shape, dtype, given = DRAWS[number]
    dtype = dtype_of(dtype)
    like = np.empty(shape[::-1], dtype).T if name.endswith("_like") else np.empty(shape, dtype)
    if name in ("randn", "randint"):
        return compute(name, generator, (dtype,), *given, list(shape))
    if name == "normal of tensors":
        mean, std = (operands(number + i, shape, name).astype(dtype) for i in (0, 1))
        return compute("normal", generator, (dtype,), *((mean, std), (mean, 0.5), (1.5, std))[given[0]])
    if name == "multinomial":
        count, other = given
        x = operands(number, shape[::-1], name).astype(dtype).T if other == 2 else operands(number, shape, name).astype(dtype)
        return compute(name, generator, (np.dtype(np.int64),), x, count, other == 1)
    return compute("normal_" if name == "normal" else name, generator, (dtype,), like, *given)


REPEATED = ("randint", (3, 400009), "int32", (0, 2**31 - 1))  # its threads draw more than once; in the usual run too


def marked(number):
    is_usual = np.prod(DRAWS[number][1]) <= USUAL or DRAWS[number] == REPEATED
    return number if is_usual else pytest.param(number, marks=pytest.mark.full)


@pytest.mark.parametrize("number", [marked(number) for number in DRAWS])
def test_draws_have_the_words_of_an_h200_and_move_its_offset(number):
    generator = generator_of(number)
    found = draw(number, generator)
    assert [hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()[:16]] == RECORDED[number]["digest"]
    assert generator.offset == RECORDED[number]["offset"]


def test_numbers_have_their_distributions():
    words = lambda transform, each=4: draw_elements(7, 0, 1 << 15, transform, each=each)
    exponential, normal = words(lambda x: to_exponential(x, 2.0)), words(to_normal)
    assert exponential.min() > 0 and abs(exponential.mean() - 0.5) < 2e-2 and abs(exponential.var() - 0.25) < 3e-2
    assert abs(normal.mean()) < 3e-2 and abs(normal.var() - 1) < 3e-2 and np.isfinite(normal).all()
    for low, span in ((-3, 5), (10, 1 << 40)):
        each = integer_width(span)
        found = words(lambda x, low=low, span=span, each=each: to_integers(x, low, span, each), each)
        assert found.min() >= low and found.max() < low + span and abs((found - low).mean() / (span - 1) - 0.5) < 3e-2


def test_an_exponential_number_is_never_zero():
    """The largest words give 1, whose logarithm is 0; PyTorch takes half an epsilon in its place."""
    assert to_exponential(np.full((1, 4), 0xFFFFFFFF, np.uint32), 1.0).tolist() == [[2.0**-24] * 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [((np.float32([0.5, 0.5]), 2, True), "with replacement"), ((np.float32([0, 0]), 1), "probabilities"),
     ((np.float32([np.nan, 1]), 1), "probabilities"), ((np.float64([0.5, 0.5]), 1), "float64")],
)  # fmt: skip
def test_multinomial_refuses_what_has_no_rule(given, message):
    generator = generator_of(0)
    with pytest.raises(NotModelled, match=message):
        compute("multinomial", generator, (np.dtype(np.int64),), *given)
    assert generator.offset == OFFSET


def test_two_numbers_alone_have_no_rule():
    with pytest.raises(NotModelled, match="overload"):
        compute("normal", generator_of(0), (np.dtype(np.float32),), 0.0, 1.0)
