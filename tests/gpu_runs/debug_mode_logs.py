"""Logs of PyTorch's DebugMode of a small model, with hashes of all tensors.

python tests/gpu_runs/debug_mode_logs.py tests/golden/debug_mode_h200.json.xz      on a machine with a GPU
"""

import json
import lzma
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import nn

WIDTH, HEADS, WORDS = 128, 2, 96


class Layer(nn.Module):
    """Products, a norm, attention, GELU and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, words):
        x = self.embedding(words)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return self.head(x + self.down(nn.functional.gelu(self.up(x))).softmax(-1))


def make_layer(dtype, device="cpu"):
    rng, model = np.random.Generator(np.random.Philox(3)), Layer().to(dtype).to(device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = rng.integers(-(1 << 12), 1 << 12, tuple(weight.shape)).astype(np.float32) * np.float32(2.0**-15)
            weight.copy_(torch.from_numpy(value + (name == "norm.weight")).to(dtype))
    return model


def draw_words(device="cpu"):
    return torch.from_numpy(np.random.Generator(np.random.Philox(9)).integers(0, WORDS, (2, 40))).to(device)


def forward(model, words):
    with torch.no_grad():
        model(words)


def train(model, words):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    nn.functional.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


HASHES = {"hash_fn": ["norm", "hash_tensor"], "hash_inputs": True}
RUNS = {  # dtype, run, options of DebugMode and of its hashes
    "forward_bf16": (torch.bfloat16, forward, {"record_nn_module": True}, HASHES),
    "forward_f16": (torch.float16, forward, {"record_nn_module": True, "record_ids": True}, HASHES),
    "step_bf16": (torch.bfloat16, train, {"record_nn_module": True}, HASHES),
    "plain_bf16": (torch.bfloat16, forward, {}, {}),
}


def main(path):
    from torch.utils._debug_mode import DebugMode

    logs = {}
    for name, (dtype, run, options, hashes) in RUNS.items():
        model, words = make_layer(dtype, "cuda"), draw_words("cuda")
        with DebugMode(**options) as mode, DebugMode.log_tensor_hashes(**hashes):
            run(model, words)
        logs[name] = mode.debug_string()
    facts = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "date": str(date.today()), "logs": logs}
    Path(path).write_bytes(lzma.compress(json.dumps(facts).encode(), preset=9))


if __name__ == "__main__":
    main(sys.argv[1])
