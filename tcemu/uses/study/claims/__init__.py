"""Published claims about low-precision sums, each reproduced by one command: `tcemu study NAME`.

`list_claims()` returns all claims by name and `get_claim(name)` one. `get_claim(name).reproduce()` returns its `Outcome`: for every
quantity the published number, this package's number over several seeds, the difference, and the reason of a difference.

To add a claim:

1. A file of this folder has a tuple CLAIMS of `Claim`s, and its name is in CLAIM_MODULES below. A claim's name is typed on the command
   line, as "deepseek-accumulation". All text of a claim is plain English, for a reader who has not read the source.
2. `quantities` lists the measured quantities, each with the number that the source publishes or None. A quantity on a line of a picture has
   a `series` (the line) and an `x` (the position on it). `target` of the claim, or of a quantity, is that of the constant with which it
   is measured.
3. `measure(seed, quick)` returns the value of each quantity by its name, for operands drawn from `seed`. With `quick` it may leave out
   quantities, or take fewer samples of the same thing; `reduced` describes the reduction. The meaning of a quantity stays the same.
4. Nothing is tuned: where our number differs from the source, `differs` says so and why.
5. `tcemu study NAME --out docs/studies` writes the whole form's JSON; `python docs/studies/write.py` makes the page and the picture
   from it.
   `python tests/renew_claims.py NAME` writes the quick form's figures, by which tests/uses/study/test_claims.py knows the spread over
   seeds.
"""

from difflib import get_close_matches
from functools import cache
from importlib import import_module

from tcemu.uses.study.claims.claim_types import Claim, Outcome

CLAIM_MODULES = (
    "fp8_sums",
    "wide_products",
    "narrow_sums",
    "block_rounding",
    "single_results",
    "long_context",
    "attention_errors",
)


@cache
def list_claims() -> dict[str, Claim]:
    """Return every claim by its name."""
    claims = [claim for module in CLAIM_MODULES for claim in import_module(f"{__name__}.{module}").CLAIMS]
    claims_by_name = {claim.name: claim for claim in claims}
    assert len(claims_by_name) == len(claims), "two claims have one name"
    return claims_by_name


def get_claim(name: str) -> Claim:
    """Return a claim.

    Args:
        name: Name of the claim, as `list_claims` has it.

    Raises:
        ValueError: There is no claim of this name.
    """
    known = list_claims()
    if name not in known:
        near = get_close_matches(str(name), known, n=2, cutoff=0.5)
        hint = f", did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"claim {name!r}{hint}; expected one of {', '.join(known)}")
    return known[name]


read_outcome = Outcome.from_json
