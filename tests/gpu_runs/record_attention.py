"""Words of PyTorch's attention operators on a GPU: outputs, log-sum-exps and gradients by backend, inputs by seeds of CPU generators.

    python record_attention.py OUT

writes OUT/attention.npz (the first words: arrays `N_o`, `N_lse`, `N_dq`, `N_dk`, `N_dv` of case N) and OUT/attention.json (each case, its
kernels or its error).
"""

import json
import sys

import numpy as np
import torch

A = torch.ops.aten
# (batch, heads, key heads, queries, keys, head size)
SHAPES = {
    "efficient": [
        (1, 2, 2, 48, 48, 64),
        (1, 2, 2, 200, 200, 64),
        (1, 2, 2, 130, 300, 128),
        (1, 2, 2, 80, 300, 160),
        (1, 2, 2, 64, 257, 256),
        (1, 2, 2, 77, 77, 40),
    ],
    "cudnn": [
        (1, 2, 2, 48, 48, 64),
        (1, 2, 2, 200, 200, 64),
        (1, 2, 2, 130, 304, 128),
        (1, 2, 2, 80, 300, 160),
        (1, 2, 2, 64, 257, 256),
        (1, 2, 2, 77, 77, 40),
        (2, 4, 2, 200, 200, 64),
        (1, 2, 2, 200, 200, 192),
    ],
    "flash": [
        (1, 2, 2, 48, 48, 64),
        (1, 2, 2, 130, 304, 128),
        (1, 2, 2, 80, 300, 160),
        (1, 2, 2, 64, 257, 256),
        (1, 2, 2, 77, 77, 40),
        (2, 4, 2, 200, 200, 64),
        (1, 8, 2, 1, 700, 64),
        (1, 2, 2, 200, 200, 192),
        (40, 8, 8, 150, 150, 256),
    ],
}
LARGE = [
    (8, 16, 16, 1024, 1024, 64),
    (8, 16, 16, 1024, 1024, 128),
    (32, 32, 8, 512, 512, 128),
    (4, 12, 12, 128, 128, 64),
    (64, 32, 32, 1, 2048, 128),
]


def cases():
    for kind, shapes in SHAPES.items():
        for shape in shapes:
            for causal in (False, True):
                for dtype in ("bfloat16", "float16"):
                    for bias in (None, "float", "bool")[: 1 if kind == "flash" else 3]:
                        if not (causal and (bias or shape[3] != shape[4])) and (bias is None or shape[4] % 8 == 0):
                            for size in (1, 40) if shape[3] == 48 and not bias else (1,):
                                yield kind, shape, causal, dtype, bias, size
    for shape in LARGE:
        for causal in (False, True):
            yield "cudnn", shape, causal, "bfloat16", None, 1
            yield "flash", shape, causal, "bfloat16", None, 1


def run(kind, q, k, v, bias, causal):
    if kind == "cudnn":
        return A._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False)
    if kind == "efficient":
        return A._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)
    return A._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)


def backward(grad, operands, out):
    return torch.autograd.grad(out, operands, grad, retain_graph=True)


def words(t, most=8192):
    t = t.detach().contiguous().cpu().reshape(-1)[:most]
    return t.view(torch.int16).numpy() if t.element_size() == 2 else t.numpy()


def kernels(f):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        f()
        torch.cuda.synchronize()
    return [e.key[:200] for e in p.key_averages() if not e.key.startswith("cuda") and "Memset" not in e.key and "Activity" not in e.key]


def record_case(number, case, device):
    """The entry of a case, and its words by name."""
    kind, (b, h, hk, s, sk, d), causal, dtype, bias, size = case
    g = torch.Generator().manual_seed(number)

    def make(*shape):
        return torch.randn(*shape, generator=g).to(getattr(torch, dtype)).to(device)

    q, k, v, grad = make(b, h, s, d) * size, make(b, hk, sk, d), make(b, hk, sk, d), make(b, h, s, d)
    mask = make(b, h, s, sk) if bias else None
    if bias == "bool":
        zero, hidden = (torch.full((), value, dtype=mask.dtype, device=device) for value in (0.0, float("-inf")))
        mask = torch.where(mask > -1, zero, hidden)
    operands = [x.requires_grad_() for x in (q, k, v)]
    r = run(kind, q, k, v, mask, causal)
    entry = {"lse": list(r[1].shape), "kernels": kernels(lambda: run(kind, q, k, v, mask, causal))}
    found = {f"{number}_o": words(r[0]), f"{number}_lse": words(r[1])}
    large = b * h * s * sk > 1 << 21
    if not (large and hk != h):
        results = [backward(grad, operands, r[0]) for _ in range(3)]
        entry["repeats"] = [all(torch.equal(results[0][i], other[i]) for other in results[1:]) for i in range(3)]
        entry["backward"] = kernels(lambda: backward(grad, operands, r[0]))
        if not large:
            found |= {f"{number}_{name}": words(t) for name, t in zip(("dq", "dk", "dv"), results[0], strict=True)}
    return entry, found


def main(out):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    got, entries = {}, []
    for number, case in enumerate(cases()):
        try:
            entry, found = record_case(number, case, device)
            got |= found
        except (RuntimeError, NotImplementedError) as error:  # a backend that does not take the case, or too little memory
            entry = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        entries.append({"case": case} | entry)
    np.savez_compressed(f"{out}/attention.npz", **got)
    with open(f"{out}/attention.json", "w") as file:
        json.dump(entries, file)
    print(len(entries), "cases", sum("error" in e for e in entries), "errors", torch.__version__)


if __name__ == "__main__":
    main(sys.argv[1])
