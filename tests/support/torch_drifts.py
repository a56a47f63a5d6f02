"""Small models of torch, and the drifts that are planted into their runs, by arithmetic in plain NumPy."""

from typing import Any

import numpy as np

from support.planted_drifts import BF16, F32, PRODUCTS, SUMS, gpu_function, rounded
from tcemu.drift import record


def models() -> dict[str, Any]:
    """Functions that return a model and its operand; every run of one gives the same bits."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)

        def forward(self, x: Any) -> Any:
            q, k, v = (part.reshape(len(x), 2, 12).transpose(0, 1) for part in self.qkv(x).chunk(3, -1))
            weights = torch.softmax(q @ k.transpose(1, 2) * 0.3, -1)
            return self.out((weights @ v).transpose(0, 1).reshape(len(x), 24))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(24), Attention()
            self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm(x))
            return x + self.down(torch.tanh(self.up(x)))

    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 3)
            self.up = nn.Parameter(torch.randn(3, 16, 20) / 4)
            self.down = nn.Parameter(torch.randn(3, 20, 16) / 4)

        def forward(self, x: Any) -> Any:
            shares = torch.sigmoid(self.gate(x))
            shares = shares / shares.sum(-1, keepdim=True)
            hidden = torch.bmm(x.expand(3, *x.shape), self.up)
            y = torch.bmm(torch.nn.functional.silu(hidden), self.down)
            return (y * shares.t().unsqueeze(-1)).sum(0)

    class ConvNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.dense = nn.Conv2d(2, 6, 3, padding=1), nn.Linear(6, 5)
            self.scale = nn.Parameter(1 + torch.randn(6, 1, 1) / 4)

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.conv(x) * self.scale + 0.1)
            return torch.exp(self.dense(y.mean((2, 3))))

    shapes = {"gpt": (Gpt, (6, 24)), "moe": (Moe, (8, 16)), "convnet": (ConvNet, (3, 2, 5, 5))}

    def build(kind: Any, shape: tuple[int, ...]) -> Any:
        torch.manual_seed(0)
        return kind(), torch.randn(shape)

    return {name: lambda kind=kind, shape=shape: build(kind, shape) for name, (kind, shape) in shapes.items()}


def record_model(name: str, path: Any, substitute: Any = None) -> Any:
    """Record a forward and a backward pass."""
    import torch

    torch.set_num_threads(1)
    model, x = models()[name]()
    with record(path, model, substitute=substitute):
        model(x).square().sum().backward()
    return path


def product_rows(operation: Any, operands: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, Any]:
    """Rows of A and of B for each output, and the bias, of a product of torch."""
    if operation.name == "aten.convolution":
        x, w, bias = operands
        padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
        places = [(n, i, j) for n in range(len(x)) for i in range(x.shape[2]) for j in range(x.shape[3])]
        rows = np.array([padded[n, :, i : i + 3, j : j + 3].transpose(1, 2, 0).reshape(-1) for n, i, j in places])
        columns = w.transpose(0, 2, 3, 1).reshape(len(w), -1)
        return np.repeat(rows, len(columns), 0), np.tile(columns, (len(rows), 1)), bias
    bias, (a, b) = (operands[0], operands[1:]) if operation.name == "aten.addmm" else (None, operands)
    a, b = (a, b) if a.ndim == 3 else (a[None], b[None])
    rows = [np.repeat(x, y.shape[1], 0) for x, y in zip(a, b, strict=True)]
    columns = [np.tile(y.T, (len(x), 1)) for x, y in zip(a, b, strict=True)]
    return np.concatenate(rows), np.concatenate(columns), bias


def plant_product(operation: Any, operands: list[np.ndarray], multiply: Any) -> np.ndarray:
    a, b, bias = product_rows(operation, operands)
    shape = operation.results[0].shape
    if operation.name != "aten.convolution":
        total = multiply(a, b).reshape(shape)
        return total if bias is None else total + bias
    n, channels, *spatial = shape
    return np.moveaxis(multiply(a, b).reshape(n, *spatial, channels), -1, 1) + bias[:, None, None]


def torch_plans(operation: Any) -> Any:
    """Yield (name, hypothesis, function from the operands and the result to its replacement) for one recorded operation."""
    name = operation.name.removeprefix("aten.")
    sizes = [tensor.shape for tensor in operation.operands]
    if name in ("mm", "bmm", "addmm", "convolution"):
        terms = sizes[-2][-1] if name != "convolution" else np.prod(sizes[1][1:])
        for how, (multiply, kind) in PRODUCTS.items():
            kind = "fma" if how == "pairwise" and terms <= 3 else kind  # three terms in pairs are a sequential sum of rounded products
            yield how, kind, lambda operands, result, multiply=multiply: plant_product(operation, operands, multiply)
    if name == "sum" and operation.attributes["args"][1:2] and len(sizes[0]) == 2 and operation.attributes["args"][1] == [0]:
        for how, (add, kind) in SUMS.items():
            yield how, kind, lambda operands, result, add=add: add(operands[0].T).reshape(result.shape)
    functions = {"exp": "exp", "sigmoid": "logistic", "rsqrt": "rsqrt"}
    if name in functions:
        yield "GPU function", "special functions", lambda operands, result: gpu_function(functions[name], operands[0])
    if operation.results[0].shape and name in ("exp", "tanh", "mul", "add", "div", "sigmoid", "silu", "tanh_backward", "sigmoid_backward"):
        for narrow in (BF16, np.float16):
            yield f"rounded to {np.dtype(narrow)}", "a rounding more", lambda operands, result, narrow=narrow: rounded(result, narrow)
    if name == "tanh_backward":  # grad · (1 - y·y), with one rounding of the difference
        yield "fma", "fma", lambda o, r: o[0] * F32(1.0 - o[1].astype(np.float64) ** 2)
    if name == "div" and len(sizes) == 2 and sizes[1]:
        yield "reciprocal", "reciprocal", lambda operands, result: operands[0] * (F32(1) / operands[1])
