"""`tcemu demo`: handwritten digits classified with every product emulated, one line per format."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from math import frexp

import jax
import numpy as np

from tcemu.engine.architectures.lookup import require_product
from tcemu.engine.formats.number_formats import E4M3, Format
from tcemu.engine.isa.grammar import parse
from tcemu.operations.products.gemm import gemm

TARGET = "sm_90"
OPS = (  # one instruction per format of the multiplicands, all with float32 sums
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
)
SCALED_FORMATS = (E4M3,)  # formats whose range is too narrow for the unscaled numbers
Product = Callable[[np.ndarray, np.ndarray], np.ndarray]


def add_demo(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "demo",
        description=f"Classifies handwritten digits with a small neural network whose matrix products are those of {TARGET}, in four "
        "formats, and compares them with plain float32. Everything it needs ships with the package.",
    )
    parser.set_defaults(run=_run_demo)


@dataclass(frozen=True)
class Measurement:
    """Results of one way to multiply."""

    name: str
    logits: np.ndarray  # float32 [images, 10]
    seconds: float  # time of the second run
    compiling: float  # extra seconds of the first run


def power_of_two_scale(x: np.ndarray, fmt: Format) -> float:
    """The power of two that scales the largest magnitude of x just below the largest value of `fmt`; 1 for zeros."""
    largest = float(np.abs(x).max(initial=0.0))
    greatest = (2 - 2.0**-fmt.mantissa_bits * (2 if fmt.specials == "nan" else 1)) * 2.0**fmt.max_exponent
    return 2.0 ** (frexp(greatest / largest)[1] - 1) if largest else 1.0


def emulated_product(spelling: str) -> Product:
    """A function that multiplies float32 arrays [M, K] and [K, N] with one instruction's arithmetic."""
    op = require_product(parse(spelling))

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        by_a, by_b = (power_of_two_scale(x, fmt) if fmt in SCALED_FORMATS else 1.0 for x, fmt in ((a, op.a), (b, op.b)))
        d = gemm(a * np.float32(by_a), b * np.float32(by_b), op=op, target=TARGET)
        return np.asarray(d) * np.float32(1 / (by_a * by_b))

    return product


def plain_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product in float32 as XLA computes it on this machine."""
    return np.asarray(jax.numpy.matmul(a, b, precision="highest"))


def classify(data: dict[str, np.ndarray], product: Product, dtype: type = np.float32) -> np.ndarray:
    """The logits [images, 10] of the test images; biases and relu use plain arithmetic of `dtype`."""
    images = data["images"][data["first_test"] :].reshape(-1, 64).astype(dtype) / dtype(16)
    w1, b1, w2, b2 = (data[name].astype(dtype) for name in ("w1", "b1", "w2", "b2"))
    hidden = np.maximum(product(images, w1) + b1, dtype(0))
    return product(hidden, w2) + b2


def measure(name: str, data: dict[str, np.ndarray], product: Product) -> Measurement:
    """Classifies twice, since the first run also compiles."""
    times, logits = [], np.empty(0)
    for _ in range(2):
        began = time.perf_counter()
        logits = classify(data, product)
        times.append(time.perf_counter() - began)
    return Measurement(name, logits, times[1], max(0.0, times[0] - times[1]))


COLUMNS = (" right", "answers changed", "largest error", "outputs with other bits", "   time", "compilation")


def table_heading() -> str:
    return f"{'multiplied in':13}  " + "  ".join(COLUMNS)


def table_row(line: Measurement, first: Measurement, labels: np.ndarray, exact: np.ndarray) -> str:
    """One row of the table, compared with the measurement `first` and the float64 logits `exact`."""
    answers = line.logits.argmax(1)
    other = line.logits.view(np.uint32) != first.logits.view(np.uint32)
    cells = (
        f"{(answers == labels).mean():.2%}",
        f"{int((answers != first.logits.argmax(1)).sum())} of {len(labels)}",
        f"{np.abs(line.logits - exact).max():.2g}",
        f"{other.mean():.1%}",
        f"{line.seconds * 1e3:.0f} ms",
        f"{line.compiling:.1f} s",
    )
    return f"{line.name:13}  " + "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, COLUMNS, strict=True))


EXPLANATION = """
Each image gives 10 outputs, and the largest is the answer. The largest error is the furthest that any of the {count:,} outputs, which
reach {reach:.0f}, comes from the same network in float64; outputs with other bits are not plain float32's to the last bit.
f16 and tf32 keep 11 significant bits of each number that is multiplied, bf16 8 and e4m3 only 4, so the errors grow in that order;
all sums are float32. Before an e4m3 product each matrix is scaled by a power of two to fill the format's range, which ends at 448, and
the result is scaled back: both are exact. Bias and relu are plain float32 in every line. Time is that of a second run; compilation is
what the first run took longer."""


def load_digits() -> dict[str, np.ndarray]:
    """The arrays that tcemu/faces/data/README.md lists."""
    with (files("tcemu.faces.data") / "digits.npz").open("rb") as file, np.load(file) as archive:
        return dict(archive)


def _run_demo(args: argparse.Namespace) -> int:
    """Print the table, each line as soon as it is measured."""
    data = load_digits()
    labels = data["labels"][data["first_test"] :]
    exact = classify(data, np.matmul, np.float64)
    print(f"{len(labels)} images of handwritten digits, 8 x 8 pixels, that the network was not trained on. It has two layers, 64 to 64")
    print(f"and 64 to 10, and its matrix products are those of {TARGET}'s tensor cores, emulated bit for bit:\n")
    print(table_heading(), flush=True)
    first = measure("plain float32", data, plain_product)
    print(table_row(first, first, labels, exact), flush=True)
    for spelling in OPS:
        print(
            table_row(measure(str(require_product(parse(spelling)).a), data, emulated_product(spelling)), first, labels, exact), flush=True
        )
    print(EXPLANATION.format(count=exact.size, reach=np.abs(exact).max()))
    return 0
