"""Could matrix products of exponent classes compute a step of e4m3? Ranks, and how often nothing is truncated.

`python benchmarks/exponent_classes.py`. A step of exponent E adds T(a, b) = a b / 2^(E - 13), truncated. A method that multiplies R
functions of a by R functions of b, and adds the R sums with weights that depend on E, needs R >= the rank of T's table:
docs/concepts/tensor_core_steps.md says what follows.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from harness import arguments, describe_machine, finish

from tcemu.formats import E4M3

FRACTION_BITS, TERMS, PRIME = 13, 32, 2_147_483_629
TILES = {"one output": (1, 1), "16 x 8": (16, 8), "64 x 32": (64, 32)}


class Factors(NamedTuple):
    """Codes of e4m3 taken apart."""

    significand: np.ndarray  # with sign; the value is significand * 2^(exponent - 3)
    exponent: np.ndarray
    low_bit: np.ndarray  # exponent of the lowest bit that is not zero


def take_apart(codes: np.ndarray) -> Factors:
    codes = codes.astype(np.int64)
    field, fraction = codes >> 3 & 15, codes & 7
    size = np.where(field == 0, fraction, fraction | 8)
    exponent = np.maximum(field, 1) - 7
    low_bit = exponent - 3 + np.log2(np.maximum(size & -size, 1)).astype(np.int64)
    return Factors(np.where(codes & 128, -size, size), exponent, low_bit)


def rank(table: np.ndarray, prime: int) -> int:
    """The rank modulo a prime: no more than that of the integers. Modulo 2: no more than sums that wrap at a power of two need."""
    rows, found = table % prime, 0
    for column in range(rows.shape[1]):
        pivots = np.flatnonzero(rows[found:, column])
        if len(pivots) == 0:
            continue
        rows[[found, found + pivots[0]]] = rows[[found + pivots[0], found]]
        rows[found] = rows[found] * pow(int(rows[found, column]), -1, prime) % prime
        below = rows[found + 1 :]
        rows[found + 1 :] = (below - below[:, column : column + 1] * rows[found] % prime) % prime
        found += 1
        if found == len(rows):
            break
    return found


def truncated_table(unit: int, binades: int = 15) -> np.ndarray:
    """T of all magnitudes in the upper binades of both factors. unit: exponent."""
    x = take_apart(np.arange(1, 127))
    x = Factors(*(v[x.exponent > E4M3.max_exponent - binades] for v in x))
    left = x.exponent[:, None] + x.exponent - 6 - unit
    product = x.significand[:, None] * x.significand
    return np.where(left >= 0, product << np.maximum(left, 0), product >> np.minimum(np.maximum(-left, 0), 63))


def to_codes(values: np.ndarray) -> np.ndarray:
    """e4m3 under one scale, the largest magnitude at 448."""
    return (values * (448 / np.abs(values).max())).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def laws(rng: np.random.Generator, size: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Operands that people have: A [size, k] and B [k, size]."""
    normal = lambda *shape: rng.normal(size=shape)
    channels = np.exp(rng.normal(size=(1, k)))  # of activations
    return {
        "normal by normal": (normal(size, k), normal(k, size)),
        "activations by weights": (rng.standard_t(4, (size, k)) * channels, normal(k, size)),
        "probabilities by values": (rng.dirichlet(np.full(k, 0.05), size), normal(k, size)),
        "uniform bits": tuple(np.ldexp(normal(*shape), rng.integers(-15, 1, shape)) for shape in ((size, k), (k, size))),
    }


class Frequencies(NamedTuple):
    """Of the steps of one product."""

    cut: float  # products of which bits are truncated
    nothing_cut: dict[str, float]  # tiles of a step in which no product is truncated
    exponents: dict[str, float]  # different exponents in a tile of a step


def in_tiles(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The elements of each tile as a row."""
    return matrix.reshape(len(matrix) // rows, rows, -1, columns).swapaxes(1, 2).reshape(-1, rows * columns)


def frequencies(a: np.ndarray, b: np.ndarray) -> Frequencies:
    """What the steps along K truncate, with the accumulator that they have by then."""
    x, y = take_apart(to_codes(a)), take_apart(to_codes(b))
    total = np.zeros((len(a), b.shape[1]))  # the accumulator, without the truncation of earlier steps: its exponent is what counts
    cut, nothing, exponents = [], {name: [] for name in TILES}, {name: [] for name in TILES}
    for k in range(0, a.shape[1], TERMS):
        at = slice(k, k + TERMS)
        product = x.significand[:, at, None] * y.significand[at]
        up = x.exponent[:, at, None] + y.exponent[at]
        top = np.where(product != 0, up, -99).max(axis=1)
        top = np.maximum(top, np.where(total != 0, np.frexp(total)[1] - 1, -99))
        low = x.low_bit[:, at, None] + y.low_bit[at]
        is_cut = (product != 0) & (low < (top - FRACTION_BITS)[:, None])
        cut.append(is_cut.mean())
        for name, (rows, columns) in TILES.items():
            nothing[name].append(1 - in_tiles(is_cut.any(axis=1), rows, columns).any(axis=1).mean())
            exponents[name].append(np.mean([len(np.unique(one)) for one in in_tiles(top, rows, columns)]))
        total += np.ldexp(product.astype(float), up - 6).sum(axis=1)
    mean = lambda found: {name: float(np.mean(values)) for name, values in found.items()}
    return Frequencies(float(np.mean(cut)), mean(nothing), mean(exponents))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=int, default=64, help="rows and columns of D, whole tiles")
    parser.add_argument("--k", type=int, default=4096)
    args = parser.parse_args()
    lines = []
    print("rank of the table of truncated products, of magnitudes in the upper binades of e4m3")
    for binades in (15, 10, 7, 4):
        tables = {top: truncated_table(top - FRACTION_BITS, binades) for top in range(-12, 31)}
        ranks = {name: {top: rank(table, prime) for top, table in tables.items()} for name, prime in (("rational", PRIME), ("modulo 2", 2))}
        most = {name: max(found.values()) for name, found in ranks.items()}
        sizes, at = len(tables[0]), {top: found for top, found in ranks["rational"].items() if top in (10, 16, 20)}
        print(f"{binades:3} binades: at most {most['rational']} of {sizes}, modulo 2 {most['modulo 2']}; by exponent of the step: {at}")
        lines.append({"binades": binades, "magnitudes": sizes, "ranks": ranks})
    print(f"\n{'operands':26} {'products cut':>12}  steps in which nothing is cut, by tile; different exponents in a tile")
    for law, (a, b) in laws(np.random.default_rng(0), args.size, args.k).items():
        found = frequencies(a, b)
        tiles = ", ".join(f"{name} {found.nothing_cut[name]:.2%} ({found.exponents[name]:.1f})" for name in TILES)
        print(f"{law:26} {found.cut:>12.1%}  {tiles}")
        lines.append({"law": law, **found._asdict()})
    return finish(args, describe_machine(), lines, 0, "no product: ranks and frequencies alone")


if __name__ == "__main__":
    raise SystemExit(main())
