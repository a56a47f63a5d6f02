"""Numbers that PyTorch draws on a GPU: exponential, normal, integers, multinomial, and the indices of extremes among equal elements.

    python tests/gpu_runs/random_draws.py OUT

writes OUT/random_draws.json: for each call digest and first words of the result, and the generator's offset after it; and random_words.npz,
all words of the smaller ones. tests/golden/torch_draws_h200.json.xz is the first without words. Operands are made by `operands`, so that a
test can make them again.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

SIZES = ((1,), (5,), (37, 29), (152064,), (1081344,), (3, 400009))  # the fifth is what a launch draws at a time on 132 multiprocessors
FLOATS, WIDE = ("float32", "bfloat16", "float16"), 2**28
INTEGERS = (
    ("int64", 0, 10), ("int64", -5, 100), ("int64", 0, WIDE - 1), ("int64", 0, WIDE), ("int64", -7, 2**40), ("int64", -(2**62), 2**62),
    ("int32", 0, 2**31 - 1), ("int32", 3, 4), ("int16", -100, 100), ("uint8", 0, 256), ("float32", 0, 1000), ("bfloat16", 0, 100),
)  # fmt: skip
DRAWS = ((1, 0), (1, 1), (3, 0))  # of multinomial: number, and whether with replacement
ROWS = ((1000,), (2, 1000), (1, 151936), (7, 50257), (64, 33))
TIES = ((5,), (1000,), (33, 257), (3, 40000), (2, 3, 130))
FIRST, SMALL = 16, 160_000  # words that are kept; elements of a result that is kept whole


def list_calls():
    """Return the calls: name, shape, dtype and numbers."""
    calls = [("exponential", size, dtype, (rate,)) for size in SIZES for dtype in FLOATS for rate in (1.0, 0.7, 3.0)]
    calls += [("normal", size, dtype, given) for size in SIZES for dtype in FLOATS for given in ((0.0, 1.0), (2.5, 0.3))]
    calls += [("randn", size, dtype, ()) for size in SIZES[:4] for dtype in FLOATS]
    calls += [("randn_like", (40, 50), dtype, ()) for dtype in FLOATS]  # of a transposed operand
    calls += [("normal of tensors", (40, 50), dtype, (kind,)) for dtype in FLOATS for kind in (0, 1, 2)]
    calls += [("randint", size, dtype, (low, high)) for size in SIZES for dtype, low, high in INTEGERS]
    calls += [("randint_like", (40, 50), "int64", (-3, 11)), ("random", (999,), "int64", (5,)), ("random", (999,), "float32", (7,))]
    calls += [("random", (999,), dtype, ()) for dtype in (*FLOATS, "int64", "int32", "int16", "uint8")]
    calls += [("multinomial", rows, dtype, given) for rows in ROWS for dtype in FLOATS for given in DRAWS]
    calls += [("multinomial", (40, 50), "float32", (1, 2))]  # of transposed probabilities
    calls += [(name, shape, dtype, (axis,)) for name in ("argmax", "argmin", "max", "min") for shape in TIES for dtype in FLOATS
              for axis in ((None, -1, 0) if name[0] == "a" else (-1, 0))]  # fmt: skip
    return calls


def operands(number, shape, name):
    """Return an operand f32: for extremes a few values that repeat, for multinomial probabilities, some of them 0."""
    draw = np.random.Generator(np.random.PCG64(number))
    if name.startswith(("argm", "max", "min")):
        x = draw.integers(-4, 5, shape).astype(np.float32)
        x = np.where(x == 0, draw.choice(np.float32([0.0, -0.0]), shape), x)
        return np.where(draw.random(shape) < 0.001, np.float32(np.nan), x)
    x = np.exp(draw.normal(size=shape) * 2).astype(np.float32)
    x = np.where(draw.random(shape) < 0.3, np.float32(0), x)
    x[..., 0] = np.maximum(x[..., 0], np.float32(1e-3))
    return (x / x.sum(-1, keepdims=True)).astype(np.float32)


def run(torch, number, call, device="cuda"):
    """Return the tensors that a call gives."""
    name, shape, dtype, given = call
    kind = getattr(torch, dtype)
    empty = lambda: torch.empty(shape, dtype=kind, device=device)
    if name == "exponential":
        return [empty().exponential_(*given)]
    if name == "normal":
        return [empty().normal_(*given)]
    if name == "randn":
        return [torch.randn(shape, dtype=kind, device=device)]
    if name in ("randn_like", "randint_like"):
        like = torch.empty(shape[::-1], dtype=kind, device=device).T
        return [torch.randn_like(like) if name == "randn_like" else torch.randint_like(like, *given)]
    if name == "normal of tensors":
        mean, std = (torch.from_numpy(operands(number + i, shape, name)).to(device, kind) for i in (0, 1))
        return [torch.normal(*((mean, std), (mean, 0.5), (1.5, std))[given[0]])]
    if name == "randint":
        return [torch.randint(*given, shape, dtype=kind, device=device)]
    if name == "random":
        return [empty().random_(*given)]
    x = torch.from_numpy(operands(number, shape if given[-1] != 2 else shape[::-1], name)).to(device, kind)
    if name == "multinomial":
        count, other = given
        return [torch.multinomial(x.T if other == 2 else x, count, replacement=other == 1)]
    found = getattr(torch, name)(x) if given[0] is None else getattr(torch, name)(x, given[0])
    return list(found) if isinstance(found, tuple) else [found]


def words(torch, x):
    """Return the words of a tensor in the order of its indices."""
    x = x.contiguous().cpu()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def main(out):
    import torch

    torch.cuda.init()
    generator, found, whole = torch.cuda.default_generators[0], [], {}
    for number, call in enumerate(list_calls()):
        torch.cuda.manual_seed(1000 + number)
        torch.rand(3, device="cuda")  # the offset is 4 when the call begins
        try:
            results = [words(torch, x) for x in run(torch, number, call)]
        except (RuntimeError, NotImplementedError, TypeError) as error:
            found.append({"error": str(error).splitlines()[0][:120]})
            continue
        whole |= {f"{number}_{i}": x for i, x in enumerate(results) if x.size <= SMALL}
        digest = [hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16] for x in results]
        first = [np.ascontiguousarray(x).reshape(-1)[:FIRST].view(f"u{x.itemsize}").tolist() for x in results]
        found.append({"digest": digest, "first": first, "offset": generator.get_offset()})
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "calls": found}
    Path(out, "random_draws.json").write_text(json.dumps(facts))
    np.savez_compressed(Path(out, "random_words.npz"), **whole)
    print(len(found), "calls,", sum("error" in x for x in found), "errors")


if __name__ == "__main__":
    main(sys.argv[1])
