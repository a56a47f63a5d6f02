"""Published claims about low-precision sums, each reproduced by one command: `tcemu study NAME`.

`published()` has them all by name, `claim(name)` one, and `claim(name).run()` gives its `Outcome`: for every quantity what the source
publishes, what this package finds over several seeds, the difference, and why it differs where it does.

How a claim is added:

1. A file of this folder has the tuple CLAIMS of one or more `Claim`s, and its name stands in MODULES below. A name is what is typed on the
   command line, as "deepseek-accumulation". All text of a claim is plain English, for a reader who has not read the source.
2. `quantities` lists what is measured, each with the number that the source publishes or None. A quantity that lies on a line of a picture
   has a `series` (which line) and an `x` (where on it).
3. `measure(seed, quick)` gives the value of each quantity by its name, for operands drawn from `seed`. With `quick` it may leave out
   quantities, or take fewer samples of the same thing; `reduced` says what. What a quantity means stays the same.
4. Nothing is tuned: where ours differs from the source, `differs` says so and why.
5. `tcemu study NAME --out docs/studies` writes the whole form's JSON; `python docs/studies/write.py` makes the page and the picture
   from it.
   `python tests/claims.py NAME` writes the quick form's figures, by which tests/test_claims.py knows the spread over seeds.
"""

from difflib import get_close_matches
from functools import cache
from importlib import import_module

from tcemu.study.claims.claim import Claim

MODULES = (
    "fp8_sums",
    "splitting",
    "narrow_sums",
    "block_scales",
    "registers",
    "long_context",
    "attention_errors",
)


@cache
def published() -> dict[str, Claim]:
    """Every claim by its name."""
    listed = [one for module in MODULES for one in import_module(f"{__name__}.{module}").CLAIMS]
    named = {one.name: one for one in listed}
    assert len(named) == len(listed), "two claims have one name"
    return named


def claim(name: str) -> Claim:
    """One claim. Raises ValueError for another name."""
    known = published()
    if name not in known:
        near = get_close_matches(str(name), known, n=2, cutoff=0.5)
        hint = f", did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"claim {name!r}{hint}; wanted one of {', '.join(known)}")
    return known[name]
