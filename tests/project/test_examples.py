"""The examples in the docstrings of public functions print what they show."""

import doctest
import inspect

import pytest
from support.public_names import is_error

import tcemu

PUBLIC = {name: value for name in tcemu.__all__ if callable(value := getattr(tcemu, name)) and not is_error(value)}
# instructions on memory and on groups of warps, and what only a larger program shows: docs/howto/kernels.md, attention.md, instructions.md
ON_PAGES = {
    "mma_sp", "wmma_load", "wmma_mma", "wmma_store", "wgmma", "ldmatrix", "stmatrix", "movmatrix", "checked", "cache_compilations",
    "attention", "ragged_dot",
}  # fmt: skip
WITH_EXAMPLES = sorted(name for name, value in PUBLIC.items() if ">>>" in (value.__doc__ or ""))


def test_every_function_has_an_example_here_or_on_a_page():
    assert set(WITH_EXAMPLES) | ON_PAGES == set(PUBLIC) and not set(WITH_EXAMPLES) & ON_PAGES


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_an_example_prints_what_it_shows(name):
    text = inspect.getdoc(PUBLIC[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test, out=said.append)
    assert len(test.examples) >= 2 and said == [], "".join(said)
