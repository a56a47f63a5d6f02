"""How long does PyTorch wait for the first forward and backward pass of an emulated GPT? `python benchmarks/torch_model.py`

A GPT of `--layers`, of width 64 with 4 heads, 4 sequences of 64 tokens; with `--gpt2` the forward pass of GPT-2 small's shape alone, of one
sequence of 128 tokens. Each recipe runs in a process of its own; the recipe
"H100" is `emulate(model, gpu="H100")`. With `--again` a second process finds the programs of the first on disk. A second model of the same
shape, in the first process, must compile nothing.
"""

import json
import time
from contextlib import nullcontext
from tempfile import TemporaryDirectory

import torch
from harness import add_processes, arguments, describe_machine, finish, measure_in_a_process
from torch import nn

import tcemu
import tcemu.torch
from tcemu.base.compilation import compile_clock

GPUS = ("H100", "H200")  # every operation as PyTorch computes it there, of a model in bf16
WIDTH, HEADS, WORDS, BATCH, TOKENS = 64, 4, 256, 4, 64
GPT2_SMALL = (768, 12, 50257, 1, 128)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(self.embedding(words))) @ self.embedding.weight.mT


def step(model: nn.Module, words: torch.Tensor, forward_only: bool) -> float:
    """Seconds of a forward pass, and of a backward pass unless it is the forward pass alone."""
    began = time.perf_counter()
    if forward_only:
        with torch.no_grad():
            model(words)
        return time.perf_counter() - began
    logits = model(words)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten()).backward()
    return time.perf_counter() - began


def measure(args) -> dict:
    global WIDTH, HEADS, WORDS, BATCH, TOKENS
    if args.gpt2:
        (WIDTH, HEADS, WORDS, BATCH, TOKENS), args.layers = GPT2_SMALL, 12
    torch.manual_seed(0)
    words = torch.randint(WORDS, (BATCH, TOKENS))
    tcemu.cache_compilations()
    (recipe,), clock = args.recipes, compile_clock()
    as_on_gpu = recipe in GPUS
    models = [GPT(args.layers).to(torch.bfloat16 if as_on_gpu else torch.float32) for _ in range(2)]
    plain, cpu = min(step(models[0], words, args.gpt2) for _ in range(args.repeats + 1)), time.process_time()
    emulated = [tcemu.torch.emulate(model, **({"gpu": recipe} if as_on_gpu else {"policy": recipe})) for model in models]

    def run(number: int) -> float:
        with emulated[number] if as_on_gpu else nullcontext():
            return step(models[number], words, args.gpt2)

    first = run(0)
    line = {"recipe": recipe, "first_s": first, "first_cpu_s": time.process_time() - cpu, "programs": clock.programs}
    run(1)
    more = clock.programs - line["programs"]
    best = min(run(0) for _ in range(args.repeats))
    left = emulated[0].report().unknown if as_on_gpu else emulated[0].report(words).unchanged
    return line | {"best_s": best, "ratio": best / plain, "more_programs": more, "left": len(left)}


def main() -> int:
    parser = arguments(__doc__)
    add_processes(parser, "bf16", "fp8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--gpt2", action="store_true", help="the forward pass of GPT-2 small's shape, 128 tokens")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args)))
        return 0
    machine = describe_machine() | {"torch": torch.__version__}
    print(f"{'recipe':>10} {'process':>8} {'first s':>8} {'CPU s':>7} {'programs':>9} {'of 2nd model':>13} {'best s':>8} {'x plain':>8}")
    lines = []
    for name in args.recipes:
        with TemporaryDirectory() as cache:
            for process in ("first", "second")[: 1 + args.again]:
                line = measure_in_a_process(__file__, args, name, cache)
                lines.append(line | {"process": process})
                figures = f"{line['first_s']:>8.2f} {line['first_cpu_s']:>7.1f} {line['programs']:>9} {line['more_programs']:>13}"
                print(f"{name:>10} {process:>8} {figures} {line['best_s']:>8.4f} {line['ratio']:>8.1f}", flush=True)
    wrong = sum(line["left"] + line["more_programs"] for line in lines)
    return finish(args, machine, lines, wrong, "two models", "programs compiled twice or products left as they were")


if __name__ == "__main__":
    raise SystemExit(main())
