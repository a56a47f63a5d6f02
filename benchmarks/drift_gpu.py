"""Record runs of small models on an NVIDIA GPU, to be located on any machine: `python benchmarks/drift_gpu.py --out FOLDER`.

The script needs torch, JAX and ml_dtypes, and nothing of tcemu but the file of the recorder. Each part writes two or more records of one
computation under two settings. All records of a GPU have less than 14 MB together, and half of that in xz.

gpt         a GPT of two layers in bf16, forward and backward: operation by operation, and with its elementwise parts compiled
fp8         one of its layers with products of FP8 (torch._scaled_mm), forward: quantised operation by operation, and compiled
products    single products under two settings: TF32 on and off, reduced precision on and off, f16 sums, fast sums of FP8, another batch
jax         the GPT in JAX, forward: operation by operation, and as one program
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import numpy as np

RECORDER = Path(__file__).parents[1] / "tcemu" / "uses" / "drift" / "recorder.py"
SPEC = importlib.util.spec_from_file_location("recorder", RECORDER)
assert SPEC is not None and SPEC.loader is not None
recorder = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(recorder)
record = recorder.record

TOKENS, WIDTH, HEADS, INNER, WORDS, LAYERS = 32, 128, 2, 192, 128, 2


def torch_model(device: str) -> tuple[Any, Any, Callable, type]:
    """Return the GPT in bf16, its words, a function that compiles its elementwise modules, and its layer of FP8 products."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH) + 0.1 * torch.randn(WIDTH))

        def forward(self, x: Any) -> Any:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight

    class Weights(nn.Module):  # softmax of scaled and masked scores
        def forward(self, scores: Any, mask: Any) -> Any:
            return torch.softmax(scores * (WIDTH // HEADS) ** -0.5 + mask, -1)

    class Gate(nn.Module):
        def forward(self, gate: Any, up: Any) -> Any:
            return functional.silu(gate) * up

    class SquaredRelu(nn.Module):
        def forward(self, gate: Any, up: Any) -> Any:
            return torch.relu(gate).square() + up

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.weights = Weights()

        def forward(self, x: Any, mask: Any) -> Any:
            q, k, v = (part(x).view(TOKENS, HEADS, -1).transpose(0, 1) for part in (self.q, self.k, self.v))
            mixed = self.weights(q @ k.transpose(1, 2), mask) @ v
            return self.out(mixed.transpose(0, 1).reshape(TOKENS, WIDTH))

    class Layer(nn.Module):
        def __init__(self, gate: nn.Module) -> None:
            super().__init__()
            self.norm1, self.norm2, self.attention, self.activation = Norm(), Norm(), Attention(), gate
            self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
            self.down = nn.Linear(INNER, WIDTH)

        def forward(self, x: Any, mask: Any) -> Any:
            x = x + self.attention(self.norm1(x), mask)
            h = self.norm2(x)
            return x + self.down(self.activation(self.gate(h), self.up(h)))

    class Loss(nn.Module):
        def forward(self, logits: Any, words: Any) -> Any:
            return functional.nll_loss(torch.log_softmax(logits.float(), -1), words)

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList([Layer(Gate()), Layer(SquaredRelu())])
            self.norm, self.head, self.loss = Norm(), nn.Linear(WIDTH, WORDS, bias=False), Loss()

        def forward(self, words: Any) -> Any:
            x = self.embedding(words[:-1])
            mask = torch.full((TOKENS, TOKENS), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
            for layer in self.layers:
                x = layer(x, mask)
            return self.loss(self.head(self.norm(x)), words[1:])

    class Quantize(nn.Module):  # one scale for a row, and the elements in e4m3
        def forward(self, x: Any) -> Any:
            wide = x.float()
            scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
            return (wide / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale

    class Fp8Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantize, self.activation = Quantize(), Gate()
            self.weights = nn.ParameterDict({name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in SHAPES.items()})

        def product(self, x: Any, name: str) -> Any:
            codes, scale = self.quantize(x)
            weights, of_weights = self.quantize(self.weights[name])
            return torch._scaled_mm(codes, weights.t(), scale, of_weights.t(), out_dtype=torch.bfloat16, use_fast_accum=False)

        def forward(self, x: Any) -> Any:
            return x + self.product(self.activation(self.product(x, "gate"), self.product(x, "up")), "down")

    torch.manual_seed(0)
    model = Gpt().bfloat16().to(device)
    words = torch.randint(0, WORDS, (TOKENS + 1,), device=device)

    def compile_parts(module: nn.Module) -> None:
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Norm | Weights | Gate | SquaredRelu | Loss | Quantize):
                    setattr(parent, name, torch.compile(child))

    return model, words, compile_parts, Fp8Layer


SHAPES = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}


def gpt(folder: Path, device: str) -> None:
    """Record a training step of the GPT: operation by operation, then with compiled parts."""
    model, words, compile_parts, _ = torch_model(device)
    with record(folder / "gpt_eager.drift", model):
        model(words).backward()
    model.zero_grad(set_to_none=True)
    compile_parts(model)
    model(words).backward()  # compiles
    model.zero_grad(set_to_none=True)
    with record(folder / "gpt_compiled.drift", model, compiled=True):
        model(words).backward()


def fp8(folder: Path, device: str) -> None:
    """Record the layer of FP8 products."""
    import torch

    _, _, compile_parts, layer = torch_model(device)
    torch.manual_seed(1)
    model = layer().bfloat16().to(device)
    x = torch.randn(TOKENS, WIDTH, device=device).bfloat16()
    with torch.no_grad():
        with record(folder / "fp8_eager.drift", model):
            model(x)
        compile_parts(model)
        model(x)
        with record(folder / "fp8_compiled.drift", model, compiled=True):
            model(x)


def products(folder: Path, device: str) -> None:
    """Record single products, each under two settings of torch."""
    import torch

    torch.manual_seed(2)
    draw = lambda m, n, k, dtype: (torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype))
    switches = torch.backends.cuda.matmul
    both: list[tuple[str, tuple, str, Any, Any]] = [
        ("tf32", draw(64, 64, 256, torch.float32), "allow_tf32", False, True),
        ("reduced_bf16", draw(32, 32, 2048, torch.bfloat16), "allow_bf16_reduced_precision_reduction", False, True),
        ("f16_sums", draw(64, 64, 512, torch.float16), "allow_fp16_accumulation", False, True),
    ]
    for name, (a, b), switch, off, on in both:
        for value in (off, on):
            before = getattr(switches, switch)
            setattr(switches, switch, value)
            with record(folder / f"{name}_{'on' if value else 'off'}.drift"):
                torch.mm(a, b)
            setattr(switches, switch, before)
    a, b = draw(32, 64, 1024, torch.float32)
    codes, other = (x.to(torch.float8_e4m3fn) for x in (a, b.t().contiguous()))
    for name, shape in (("tensor", ((1, 1), (1, 1))), ("rows", ((32, 1), (1, 64)))):
        scales = [torch.rand(size, device=device) + 0.5 for size in shape]
        scales = [scale.reshape(()) if name == "tensor" else scale for scale in scales]
        for fast in (False, True):
            with record(folder / f"fp8_{name}_{'fast' if fast else 'exact'}.drift"):
                torch._scaled_mm(codes, other.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    a, b = draw(32, 64, 1024, torch.bfloat16)
    for batch in (1, 32):
        with record(folder / f"batch_{batch}.drift"):
            torch.mm(a[:batch], b)


def with_jax(folder: Path, device: str) -> None:
    """Record the loss of the GPT in JAX: operation by operation, and as one program."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, jnp.bfloat16)
    layer = lambda: {name: draw(WIDTH, WIDTH) for name in "qkvo"} | {"up": draw(WIDTH, INNER), "down": draw(INNER, WIDTH)}
    params = {"embedding": draw(WORDS, WIDTH) * jnp.bfloat16(16), "head": draw(WIDTH, WORDS), "layers": [layer() for _ in range(LAYERS)]}
    words = jnp.asarray(rng.integers(0, WORDS, TOKENS + 1))

    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def loss(params: dict[str, Any], words: Any) -> Any:
        x = params["embedding"][words[:-1]]
        for number, w in enumerate(params["layers"]):
            with jax.named_scope(f"layer{number}/attention"):
                h = norm(x)
                q, k, v = ((h @ w[name]).reshape(TOKENS, HEADS, -1).swapaxes(0, 1) for name in "qkv")
                scores = (q @ k.swapaxes(1, 2)).astype(jnp.float32) * np.float32((WIDTH // HEADS) ** -0.5)
                scores = jnp.where(np.tri(TOKENS, dtype=bool), scores, -1e30)
                mixed = (jax.nn.softmax(scores).astype(x.dtype) @ v).swapaxes(0, 1).reshape(TOKENS, WIDTH)
                x = x + mixed @ w["o"]
            with jax.named_scope(f"layer{number}/mlp"):
                x = x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]
        with jax.named_scope("loss"):
            logits = jax.nn.log_softmax((norm(x) @ params["head"]).astype(jnp.float32))
            return -jnp.take_along_axis(logits, words[1:, None], 1).mean()

    record(loss, folder / "jax_eager.drift")(params, words)
    record(loss, folder / "jax_compiled.drift", compiled=True)(params, words)


def machine(device: str) -> dict[str, str]:
    """Return the versions and the device that made the records."""
    import jax
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "device": gpu, "torch": torch.__version__, "cuda": str(torch.version.cuda), "jax": jax.__version__,
        "jax device": jax.devices()[0].device_kind, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


PARTS: dict[str, Callable[[Path, str], None]] = {"gpt": gpt, "fp8": fp8, "products": products, "jax": with_jax}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a folder without records")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="cuda", help="torch's device")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.parts:
        began = time.perf_counter()
        try:
            PARTS[name](args.out, args.device)
        except Exception:  # the other parts still run
            traceback.print_exc()
            failed += 1
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    (args.out / "machine.json").write_text(json.dumps(machine(args.device), indent=1) + "\n")
    total = 0
    for path in sorted(args.out.glob("*.drift")):
        total += path.stat().st_size
        print(f"{path.stat().st_size:>10,} {path.name}")
    print(f"{total:>10,} bytes together; {failed} parts failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
