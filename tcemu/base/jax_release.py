"""The releases of JAX that the package was tried with, checked when a part of the package that uses JAX is imported."""

import re
import warnings

import jax

OLDEST, BOUND = (0, 10, 1), (0, 13)  # the first release that was tried, and the first series that was not, as pyproject.toml has them


def check_release(name: str) -> None:
    """Check a release of JAX, as "0.10.2".

    Raises:
        ImportError: It is older than the oldest that works.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", name)[:3])
    oldest, bound = (".".join(map(str, release)) for release in (OLDEST, BOUND))
    installed, remedy = f"below {bound}, and JAX {name} is installed", f"pip install 'jax>={oldest},<{bound}'"
    if numbers < OLDEST:
        raise ImportError(f"tcemu needs JAX {oldest} or later, {installed}: {remedy}")
    if numbers >= BOUND:
        tried = f"tcemu was tried with JAX {oldest} or later, {installed}"
        warnings.warn(f"{tried}: {remedy}. tests/base/test_jax_internals.py tells what has changed", stacklevel=2)


check_release(jax.__version__)
