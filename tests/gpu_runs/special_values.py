"""What PyTorch's CUDA operators make of signed zeros, NaN, Inf, subnormals, Python's numbers, integers, ties and empty tensors.

    python special_values.py OUT        # on a GPU, 15 s: writes OUT/special_values.json.xz

Each case is a name, a function of tensors, and operands that follow from the name. A result is a digest of its words, of which all NaN are
one. `cases()` needs PyTorch alone.
"""

import hashlib
import json
import lzma
import sys
import zlib

import numpy as np
import torch
import torch.nn.functional as F

FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def specials(dtype):
    """Zeros, NaN, Inf, subnormals and some numbers."""
    finfo = torch.finfo(dtype)
    values = [
        0.0,
        -0.0,
        float("nan"),
        float("inf"),
        -float("inf"),
        finfo.tiny,
        -finfo.tiny,
        finfo.smallest_normal / 4,
        -finfo.smallest_normal / 4,
        1.0,
        -1.0,
        0.5,
        2.5,
        -2.5,
        3.0,
        6.0,
        -3.0,
        100.5,
        -100.5,
        finfo.max,
        -finfo.max,
        0.1,
        0.3,
        2147483648.0,
        -3e9,
        255.5,
        -1.5,
    ]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def pairs(dtype):
    x = specials(dtype)
    return x.repeat_interleave(len(x)), x.repeat(len(x))


def codes(dtype):
    """All codes of a 16-bit dtype; random ones of f32."""
    if dtype == torch.float32:
        return torch.from_numpy(np.random.default_rng(5).integers(0, 1 << 32, 1 << 14, np.uint32).view(np.float32).copy())
    return torch.arange(-(1 << 15), 1 << 15, 5, dtype=torch.int32).to(torch.int16).view(dtype)


def normal(name, shape, dtype):
    seed = zlib.crc32(name.encode())
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).to(dtype)


def cases():
    found = []
    add = lambda name, fn, *operands: found.append((name, fn, operands))
    for label, dtype in FLOATS.items():
        x, y = pairs(dtype)
        s, c = specials(dtype), codes(dtype)
        for name in (
            "maximum",
            "minimum",
            "fmax",
            "fmin",
            "add",
            "sub",
            "mul",
            "div",
            "atan2",
            "fmod",
            "remainder",
            "logaddexp",
            "pow",
            "eq",
            "lt",
        ):
            add(f"{label} {name} of specials", getattr(torch, name), x, y)
        for name in (
            "relu",
            "abs",
            "neg",
            "sign",
            "ceil",
            "floor",
            "trunc",
            "round",
            "frac",
            "sgn",
            "isnan",
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "sigmoid",
            "tanh",
            "erf",
            "sin",
            "cos",
            "exp2",
            "log2",
            "log1p",
            "expm1",
            "reciprocal",
            "positive",
            "square",
        ):
            add(f"{label} {name} of specials", getattr(torch, name), s)
        for name in (
            "relu",
            "relu6",
            "silu",
            "gelu",
            "hardswish",
            "hardsigmoid",
            "hardtanh",
            "elu",
            "leaky_relu",
            "softplus",
            "mish",
            "logsigmoid",
            "selu",
        ):
            add(f"{label} {name} of codes", getattr(F, name), c)
        for low, high in ((0, None), (None, 0), (0.0, -0.0), (-0.0, None), (0.1, 0.3), (-1, 6), (float("nan"), None)):
            add(f"{label} clamp {low} {high}", lambda v, low=low, high=high: v.clamp(low, high), s)
        add(
            f"{label} clamp tensors",
            lambda v, a, b: torch.clamp(v, a, b),
            s[:9].repeat(9),
            s[:9].repeat_interleave(9),
            s[:9].repeat_interleave(9).flip(0),
        )
        for number in (0.1, 0.3, 1.7, 0.501, 2.003, -0.5009, 2, 3, -2, -1.0, 0, 1, 0.5, 4, 2.5):
            add(f"{label} pow {number}", lambda v, n=number: v**n, c)
        for number in (2.0, 3, 0.1, 1.0, 0.3):
            add(f"{label} {number} to the power", lambda v, n=number: n**v, c)
        for number in (0.1, 3, -0.3, 0.7):
            for name in ("fmod", "remainder", "add", "sub", "mul", "div", "rsub"):
                add(f"{label} {name} {number}", lambda v, n=number, name=name: getattr(torch, name)(v, n), c)
            add(f"{label} number over {number}", lambda v, n=number: n / v, c)
            for name in ("eq", "lt", "ge", "ne"):
                add(f"{label} {name} {number}", lambda v, n=number, name=name: getattr(torch, name)(v, n), c)
            for alpha in (0.3, 2, -1.5):
                add(f"{label} add {number} alpha {alpha}", lambda v, n=number, a=alpha: torch.add(v, n, alpha=a), c)
                add(f"{label} sub {number} alpha {alpha}", lambda v, n=number, a=alpha: torch.sub(v, n, alpha=a), c)
                add(f"{label} rsub {number} alpha {alpha}", lambda v, n=number, a=alpha: torch.rsub(v, n, alpha=a), c)
        n = normal(label, (3, 4096), dtype)
        add(f"{label} addcmul", lambda a, b, d: torch.addcmul(a, b, d, value=0.3), *n)
        add(f"{label} addcdiv", lambda a, b, d: torch.addcdiv(a, b, d, value=0.3), *n)
        for w in (0.3, 0.7, 0.5, 0.1):
            add(f"{label} lerp {w}", lambda a, b, w=w: torch.lerp(a, b, w), n[0], n[1])
        add(f"{label} lerp tensor", torch.lerp, *n)
        for name in (
            "amax",
            "amin",
            "sum",
            "mean",
            "prod",
            "argmax",
            "argmin",
            "std",
            "var",
            "softmax",
            "log_softmax",
            "cumsum",
            "logsumexp",
        ):
            row = s[:9].repeat(9, 1).flatten()[torch.from_numpy(np.random.default_rng(3).permutation(81))].reshape(9, 9)
            row = torch.cat([row, s[:2].repeat(9)[torch.from_numpy(np.random.default_rng(4).permutation(18))].reshape(2, 9)])
            run = getattr(torch, name)
            add(f"{label} {name} of special rows", lambda v, run=run: run(v, 1), row)
            add(f"{label} {name} of special columns", lambda v, run=run: run(v, 0), row)
            zeros = torch.where(normal(name, (40, 700), torch.float32) > 0, 0.0, -0.0).to(dtype)
            add(f"{label} {name} of zeros", lambda v, run=run: run(v, 1), zeros)
            add(f"{label} {name} of zero columns", lambda v, run=run: run(v, 0), zeros)
            for shape, dim in (((0, 5), 1), ((5, 1), 1), ((1, 5), 0), ((3, 0, 2), 0), ((3, 0, 2), 2)):
                add(f"{label} {name} {shape} {dim}", lambda v, run=run, dim=dim: run(v, dim), torch.ones(shape, dtype=dtype))
            if name in ("sum", "mean", "prod", "std", "var", "cumsum", "softmax", "log_softmax", "logsumexp"):
                add(f"{label} {name} (5, 0) 1", lambda v, run=run: run(v, 1), torch.ones((5, 0), dtype=dtype))
        add(f"{label} max dim", lambda v: torch.max(v, 1)[0], zeros)
        add(f"{label} sum gaps", lambda v: v[:, ::2].sum(1), n)
        add(f"{label} sum expanded", lambda v: v[:, :1].expand(3, 300).sum(1), n)
        for shape in ((8,), (5, 8), (0, 8), (64, 1), (3, 0)):
            add(f"{label} layer_norm {shape}", lambda v: F.layer_norm(v, v.shape[-1:]), normal("ln", shape, dtype))
            add(f"{label} rms_norm {shape}", lambda v: F.rms_norm(v, v.shape[-1:]), normal("ln", shape, dtype))
        bad = normal("bad", (6, 8), dtype)
        bad[1, 3], bad[2, 4], bad[3], bad[4] = float("nan"), float("inf"), 0.0, torch.finfo(dtype).max
        add(f"{label} layer_norm of specials", lambda v: F.layer_norm(v, (8,)), bad)
        add(f"{label} rms_norm of specials", lambda v: F.rms_norm(v, (8,)), bad)
        target = torch.tensor([0, 1, 2, 3, 4, 5])
        add(f"{label} cross_entropy of specials", lambda v, t: F.cross_entropy(v, t, reduction="none"), bad, target)
        add(f"{label} cross_entropy all ignored", lambda v, t: F.cross_entropy(v, t), bad, torch.full((6,), -100))
        add(f"{label} cross_entropy empty", lambda v, t: F.cross_entropy(v, t), bad[:0], target[:0])
        for kind in (torch.int32, torch.int64, torch.int8, torch.uint8, torch.int16, torch.bool):
            add(f"{label} to {kind}", lambda v, kind=kind: v.to(kind), s)
        for other, to in FLOATS.items():
            add(f"{label} to {other}", lambda v, to=to: v.to(to), c)
        ties = torch.tensor([1, 2, 2, 3, 3, 3, 1, 0, -0.0, 0.0] * 9).to(dtype)
        for name in ("sort", "argsort"):
            add(f"{label} {name} ties", lambda v, name=name: getattr(torch, name)(v), ties)
        add(f"{label} topk ties", lambda v: torch.topk(v, 7), ties)
        add(f"{label} 0d sort", torch.sort, ties[0])
        add(f"{label} histc", lambda v: torch.histc(v.float(), 13, -2, 2), n)
        add(f"{label} unfold backward", lambda v: torch.ops.aten.unfold_backward(v.reshape(-1)[: 5 * 8].reshape(5, 8), [16], 0, 8, 2), n)
        add(f"{label} empty mm", torch.mm, n[:, :0].reshape(0, 3), n[:3, :4])
        add(f"{label} mm of K 0", torch.mm, n[:, :0], n[:0, :4])
        add(f"{label} addmm of K 0", lambda b, x, y: torch.addmm(b, x, y), n[0, :4], n[:, :0], n[:0, :4])
        add(f"{label} bmm of K 0", torch.bmm, n[:, :0].reshape(3, 5, 0), n[:, :0].reshape(3, 0, 4))
        add(f"{label} bmm of no batch", torch.bmm, n[:0, :4].reshape(0, 2, 2), n[:0, :4].reshape(0, 2, 2))
    i = torch.arange(1, 4001)
    add("int over 7", lambda v: v / 7, i)
    add("int over 0.3", lambda v: v / 0.3, i)
    add("int over int", lambda v: v / v.flip(0), i)
    add("int times 0.1", lambda v: v * 0.1, i)
    add("int plus 0.1 alpha 0.3", lambda v: torch.add(v, 0.1, alpha=0.3), i)
    add("large int over 3", lambda v: (v * 12345678901) / 3, i)
    for name in ("exp", "sin", "cos", "sqrt", "rsqrt", "log", "reciprocal", "tanh", "sigmoid"):
        add(f"int {name}", getattr(torch, name), i)
    add("int to the 0.5", lambda v: v**0.5, i)
    add("int to the 0.3", lambda v: v**0.3, i)
    add("2.0 to the int", lambda v: 2.0**v, i)
    add("0.3 to the int", lambda v: 0.3**v, i)
    add("int topk ties", lambda v: torch.topk(v % 7, 9), i)
    add("int sort ties", lambda v: torch.sort(v[:30] % 7), i)
    add("int long sort ties", lambda v: torch.sort(v % 7), i)
    add("int kthvalue", lambda v: torch.kthvalue(v % 7, 9), i)
    add("int median", lambda v: torch.median(v % 7, 0), i)
    add("int max dim", lambda v: torch.max((v % 7).reshape(40, 100), 1), i)
    add("int argmax", lambda v: torch.argmax(v % 7), i)
    add("linspace", lambda v: torch.linspace(0, 1, 1001, device=v.device), i)
    add("linspace 2", lambda v: torch.linspace(-3.3, 7.1, 100, device=v.device), i)
    add("logspace", lambda v: torch.logspace(0, 1, 101, device=v.device), i)
    add("hann", lambda v: torch.hann_window(300, device=v.device), i)
    add("arange 0.1", lambda v: torch.arange(0, 10, 0.1, device=v.device), i)
    return found


def digest(x):
    """The dtype, the shape and the words of a tensor; NaN stands for every NaN."""
    x = x.detach().cpu().contiguous()
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full((), float("nan"), dtype=x.dtype), x)
    words = x.view(WORDS.get(x.dtype, x.dtype)).numpy()
    return hashlib.blake2b(repr((str(x.dtype), words.shape)).encode() + words.tobytes(), digest_size=6).hexdigest()


def digests(result):
    """The digests of the tensors of a result."""
    return [digest(x) for x in (result if isinstance(result, tuple | list) else (result,)) if isinstance(x, torch.Tensor)]


def main(out):
    found = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "cases": {}}
    for name, fn, operands in cases():
        try:
            found["cases"][name] = digests(fn(*[x.cuda() for x in operands]))
        except Exception as error:
            found["cases"][name] = f"{type(error).__name__}: {error}"[:80]
    with lzma.open(f"{out}/special_values.json.xz", "wt") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
