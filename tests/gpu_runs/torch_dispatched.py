"""Which operators PyTorch dispatches on a GPU for the layers that a CPU decomposes in another way.

    python torch_dispatched.py OUT        # on a GPU: writes OUT/dispatched.json

On an H200 (PyTorch 2.11.0+cu130, 2026-11-27) 288 functions and modules were run so, with and without gradients, in float32 and bfloat16.
These are the cases in which a CPU calls operators that have rules where the GPU calls another one, and the two cells, which were not run.
"""

import json
import sys

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Log(TorchDispatchMode):
    """Keeps the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


LAYERS = {
    "GRU": (nn.GRU(32, 8), 1), "LSTM": (nn.LSTM(32, 8), 1), "RNN": (nn.RNN(32, 8), 1), "GRUCell": (nn.GRUCell(32, 8), 0),
    "LSTMCell": (nn.LSTMCell(32, 8), 0), "attention": (nn.MultiheadAttention(32, 4, batch_first=True), 3), "norm": (nn.RMSNorm(32), 1),
    "encoder": (nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 1),
    "decoder": (nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True), 2),
}  # fmt: skip


def main(out, device="cuda"):
    """Run each layer with and without gradients."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, (layer, operands) in LAYERS.items():
            for grad in (True, False):
                layer = layer.to(device, dtype).train(grad)
                x = torch.randn(*(4,) * bool(operands), 16, 32, device=device, dtype=dtype)
                with torch.set_grad_enabled(grad), Log() as log:
                    y = layer(*[x] * max(operands, 1))
                    y = y if isinstance(y, torch.Tensor) else y[0]
                    if grad:
                        y.sum().backward()
                found[f"{name} {dtype} {'with' if grad else 'without'} gradients"] = log.names
    with open(f"{out}/dispatched.json", "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
