"""Two training steps of a small transformer in plain PyTorch, operation by operation: digests of every result.

    python torch_training_step.py FILE      on a machine with a GPU

Writes {dtype: {"words": digest of each float result in order, "names": operators}} as JSON.
`tests/faces/pytorch/test_torch_on_gpu.py` predicts the same digests on a CPU.
"""

import hashlib
import json
import sys

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HIDDEN, HEADS, HEAD, INNER, VOCABULARY, BATCH, TOKENS = 128, 2, 64, 192, 64, 2, 24
SKIPPED = (
    "empty",
    "detach",
    "_unsafe_view",
    "new_empty",
    "_local_scalar_dense",
    "lift_fresh",
    "_to_copy",
    "clone",
    "copy_",
    "scalar_tensor",
    "ones",
    "zeros",
    "full",
    "where",
)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda m, n, bias=False: torch.nn.Linear(m, n, bias=bias)
        self.norm1, self.norm2 = torch.nn.Parameter(torch.ones(HIDDEN)), torch.nn.LayerNorm(HIDDEN)
        self.qkv, self.out = linear(HIDDEN, 3 * HEADS * HEAD), linear(HEADS * HEAD, HIDDEN, True)
        self.gate, self.up, self.down = linear(HIDDEN, INNER), linear(HIDDEN, INNER), linear(INNER, HIDDEN)

    def forward(self, x):
        h = x.float()
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.norm1
        q, k, v = self.qkv(h).view(BATCH, TOKENS, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * HEAD**-0.5
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1, dtype=torch.float32).to(x.dtype)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(BATCH, TOKENS, -1))
        h = self.norm2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = torch.nn.Embedding(VOCABULARY, HIDDEN), Block(), torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids):
        return self.head(self.block(self.table(ids)))


def make(dtype, device="cpu"):
    model, rng = Model(), np.random.Generator(np.random.Philox(5))
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = rng.integers(-(1 << 12), 1 << 12, tuple(p.shape)).astype(np.float32) * np.float32(2.0 ** -(12 if p.ndim == 1 else 15))
            p.copy_(torch.from_numpy(value) + float("norm" in name and not name.endswith("bias")))
    ids = torch.from_numpy(rng.integers(0, VOCABULARY, (BATCH, TOKENS)))
    return model.to(dtype).to(device), ids.to(device)


def train(model, ids, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss


class Digests(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.words = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(SKIPPED):
            written = [x for x, a in zip(args, func._schema.arguments, strict=False) if a.alias_info is not None and a.alias_info.is_write]
            for x in pytree.tree_leaves(written if not func._schema.returns else result):
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                    raw = x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
                    self.names.append(name)
                    self.words.append(hashlib.sha256(raw).hexdigest()[:12])
        return result


if __name__ == "__main__":
    found = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model, ids = make(dtype, "cuda" if torch.cuda.is_available() else "cpu")
        with Digests() as digests:
            train(model, ids)
        found[str(dtype).removeprefix("torch.")] = {"names": digests.names, "words": digests.words}
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
    print(found["torch"], found["gpu"], len(digests.words))
