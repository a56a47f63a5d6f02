"""What `torch.compile` writes for small models on a GPU: its cache folder without machine code, and digests of each launch.

    python compiled_models.py record OUT [NAME...]     on a machine with a GPU: OUT/NAME.tar.xz and OUT/NAME.json a case

Each case runs in a process of its own. A launch has the digest of each tensor before and after, as the kernel reads its memory.
"""

import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np

KEPT = (".py", ".ptx", ".json", ".ttir", ".source", ".best_config")  # endings of the files that say what runs


def draw(seed, *shape):
    rng = np.random.Generator(np.random.Philox([5, seed]))
    return rng.integers(-(1 << 15), 1 << 15, shape, dtype=np.int32).astype(np.float32) * np.float32(2.0**-15)


def make(name, device):
    """Return a function and its operands; their bits are the same on every machine."""
    import model_operations as models
    import torch

    place = lambda seed, shape, dtype: torch.from_numpy(draw(seed, *shape)).to(dtype).to(device)
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    if name == "norm_silu":

        def norm_silu(x, w, g):
            mean = x.float().pow(2).mean(-1, keepdim=True)
            return torch.nn.functional.silu((g * (x.float() * torch.rsqrt(mean + 1e-6)).to(x.dtype)) @ w)

        return norm_silu, [place(0, (24, 256), bf16), place(1, (256, 96), bf16), place(2, (256,), bf16)]
    if name == "reductions":

        def reductions(x, y, z):
            norm = torch.nn.functional.layer_norm(z, z.shape[-1:])
            return x.sum(), y.softmax(-1), torch.nn.functional.gelu(norm), y.mean(0), z.transpose(0, 1).contiguous() * 2, x.exp().amax()

        return reductions, [place(0, (100_000,), f32), place(1, (37, 5000), bf16), place(2, (65, 768), f32)]
    if name == "more_reductions":

        def more_reductions(x, y, z):
            shifted = torch.nn.functional.rms_norm(y.float(), y.shape[-1:]).to(y.dtype) + y.mean(1, keepdim=True)
            return x.var(), y.log_softmax(0), shifted, z.cumsum(1), z.std(0), torch.erf(z).sum((0, 1)) / 1000, y.argmax(-1)

        return more_reductions, [place(3, (30_000,), f16), place(4, (50, 700), f16), place(5, (33, 1001), f32)]
    sizes = {
        "bert": (models.BERT, "eager", bf16, dict(hidden_size=384, num_hidden_layers=2, num_attention_heads=6, intermediate_size=1536)),
        "gemma3": (
            models.GEMMA,
            "sdpa",
            bf16,
            models.decoder(384, 1024, 2, 6, 2, head_dim=64, query_pre_attn_scalar=64, sliding_window=32),
        ),
        "qwen3": (models.QWEN, "sdpa", bf16, models.decoder(256, 704, 2, 4, 2, head_dim=64)),
        "gpt2": (models.GPT2, "eager", f16, dict(n_embd=256, n_layer=2, n_head=4, n_positions=1024, **models.NO_DROPOUT)),
        "llama": (models.LLAMA, "eager", f32, models.decoder(256, 704, 1, 4, 2)),
    }
    if name == "minilm":
        model, tokens = models.minilm("sdpa", f16, device), None
        given = torch.from_numpy(model.texts[2])[None].to(device)
        return lambda: model(input_ids=given)[0], []
    kind, attention, dtype, config = sizes[name]
    model, tokens = models.language_model(kind, attention, dtype, device, **config), models.ids(1, 40, device)
    return lambda: model(input_ids=tokens, **({} if name == "bert" else {"use_cache": False}))[0], []


NAMES = ("norm_silu", "reductions", "more_reductions", "qwen3", "gpt2", "llama", "gemma3", "bert", "minilm")


def digest(x):
    """Dtype, shape, strides, and the digest of the elements in the order of the shape."""
    import torch

    words = x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return [str(x.dtype).removeprefix("torch."), list(x.shape), list(x.stride()), hashlib.sha256(words.tobytes()).hexdigest()[:24]]


def describe(values):
    import torch

    return [digest(x) if isinstance(x, torch.Tensor) else x if isinstance(x, int | float | bool | None) else str(x)[:40] for x in values]


class LoggedKernel:
    """Stands in an output module for a kernel of inductor, and logs its launches."""

    def __init__(self, name, kernel, log):
        self.name, self.kernel, self.log = name, kernel, log

    def run(self, *args, **options):
        before = describe(args)
        self.kernel.run(*args, **options)
        launcher = self.kernel.launchers[0]
        row = {"kernel": self.name, "before": before, "after": describe(args), "options": [k for k in options if k != "stream"]}
        row |= {"config": str(getattr(launcher, "config", "")), "hash": getattr(launcher, "cache_hash", None)}
        self.log.append(row | {"regs": getattr(launcher, "n_regs", None)})

    def __getattr__(self, name):
        return getattr(self.kernel, name)


class LoggedLibrary:
    """Stands in an output module for `extern_kernels`."""

    def __init__(self, library, log):
        self.library, self.log = library, log

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def run(*args, **kwargs):
            before = describe(args)
            result = function(*args, **kwargs)
            outs = [x for x in [kwargs.get("out"), result] if hasattr(x, "dtype")][:1]
            self.log.append({"library": name, "before": before, "keywords": sorted(kwargs), "after": describe(outs)})
            return result

        return run


def log_module(module, log):
    """Let an output module of inductor log what it launches."""
    asserted = module.assert_size_stride

    def assert_size_stride(x, *args):
        log.append({"asserted": describe([x])[0], "by": str(args[2])[:80] if len(args) > 2 else ""})
        return asserted(x, *args)

    module.assert_size_stride = assert_size_stride
    for name, value in list(vars(module).items()):
        if hasattr(value, "run") and hasattr(value, "launchers"):
            setattr(module, name, LoggedKernel(name, value, log))
    module.extern_kernels = LoggedLibrary(module.extern_kernels, log)


def record_one(name, out):
    cache = pathlib.Path(out) / f"cache_{name}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.resolve())
    os.environ.pop("TRITON_CACHE_DIR", None)
    import torch
    import triton
    from torch._inductor.codecache import PyCodeCache

    function, operands = make(name, "cuda")
    compiled, began = torch.compile(function, dynamic=False), time.time()
    with torch.no_grad():
        compiled(*operands)
        seconds, log = round(time.time() - began, 1), []
        modules = [module for module in PyCodeCache.modules if hasattr(module, "extern_kernels")]
        for module in modules:
            log_module(module, log)
        found = compiled(*operands)
    results = describe(found if isinstance(found, tuple | list) else [found])
    with torch.no_grad():
        eager = function(*operands)
    facts = {
        "torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name(), "seconds": seconds,
        "modules": [module.__file__ for module in modules], "results": results, "log": log,
        "uncompiled": describe(eager if isinstance(eager, tuple | list) else [eager]),
    }  # fmt: skip
    (pathlib.Path(out) / f"{name}.json").write_text(json.dumps(facts))
    files = [path for path in sorted(cache.rglob("*")) if path.suffix in KEPT]
    with tarfile.open(pathlib.Path(out) / f"{name}.tar.xz", "w:xz") as archive:
        for path in files:
            data = path.read_bytes()
            entry = tarfile.TarInfo(str(path.relative_to(cache)))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    kinds = sorted({path.suffix for path in cache.rglob("*") if path.is_file()})
    print(name, seconds, "s to compile,", len(modules), "modules,", len(log), "rows,", len(files), "files kept of kinds", kinds, flush=True)


def main():
    command, out, *names = sys.argv[1:]
    pathlib.Path(out).mkdir(parents=True, exist_ok=True)
    if command == "one":
        return record_one(names[0], out)
    running = {
        name: subprocess.Popen([sys.executable, __file__, "one", out, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in names or NAMES
    }
    for name, process in running.items():
        try:
            print(process.communicate(timeout=max(1, 85 - time.time() + BEGAN))[0][-1500:], flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print(name, "out of time")
    return subprocess.run(["rm", "-rf", *(f"{out}/cache_{name}" for name in running)], check=False)


BEGAN = time.time()
if __name__ == "__main__":
    main()
