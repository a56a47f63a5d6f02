"""What `torch.compile` writes for small models on a GPU: its cache folder without machine code, and digests of each launch.

    python compiled_models.py record OUT [NAME...]     on a machine with a GPU: OUT/NAME.tar.xz and OUT/NAME.json a case
    python compiled_models.py train OUT [NAME...]      the same of training: gradients and updated weights too
    python compiled_models.py compare OUT [NAME...]    on any machine: runs each case of OUT from its folder, and compares the words
    python compiled_models.py pack OUT NAME...         on any machine: OUT/packed.tar.xz for tests/golden, with what is read of each case

Each case runs in a process of its own. A launch has the digest of each tensor before and after, as the kernel reads its memory.
"""

import hashlib
import importlib
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


class Mlp:
    """Layers with norms, and the loss within the model or outside of it."""

    def __new__(cls, inputs, hidden, classes, inside=True, dropout=0.0):
        import torch

        class Mlp(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.last = (
                    torch.nn.Linear(inputs, hidden), torch.nn.Linear(hidden, hidden, bias=False), torch.nn.Linear(hidden, classes),
                )  # fmt: skip
                self.norm, self.rms = torch.nn.LayerNorm(hidden), torch.nn.RMSNorm(hidden, eps=1e-6)

            def forward(self, x, target):
                h = torch.nn.functional.gelu(self.norm(self.first(x)))
                h = torch.nn.functional.dropout(h, dropout, self.training)
                scores = self.last(h + torch.nn.functional.silu(self.second(self.rms(h))))
                return torch.nn.functional.cross_entropy(scores.float(), target) if inside else scores

        return Mlp()


class ConvNet:
    """Convolutions with batch norms, whose running moments a training step updates."""

    def __new__(cls, channels, classes):
        import torch

        class ConvNet(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Conv2d(3, channels, 3, padding=1, bias=False)
                self.second = torch.nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
                self.norm_1, self.norm_2 = torch.nn.BatchNorm2d(channels), torch.nn.BatchNorm2d(2 * channels)
                self.last = torch.nn.Linear(2 * channels, classes)

            def forward(self, x, target):
                h = torch.relu(self.norm_1(self.first(x)))
                h = torch.relu(self.norm_2(self.second(h)))
                return torch.nn.functional.cross_entropy(self.last(h.mean((2, 3))).float(), target)

        return ConvNet()


TRAINED = {  # what, attention, dtype, sizes, batch, tokens, seed, whether the optimizer is compiled too
    "mlp": ("mlp", "", "bfloat16", (64, 192, 16), 48, 1, 11, True),
    "mlp_dropout": ("mlp", "", "float16", (48, 160, 16, True, 0.25), 40, 1, 23, False),
    "mixed": ("mlp", "", "bfloat16", (64, 192, 16), 600, 1, 24, False),  # sums of rows and columns by one kernel
    "mlp_outside": ("mlp", "", "float32", (96, 128, 7, False), 33, 1, 12, False),
    "convnet": ("conv", "", "bfloat16", (16, 10), 8, 16, 14, False),
    "qwen3_sdpa": ("qwen3", "sdpa", "bfloat16", (256, 704, 2, 4, 2, 64), 1, 130, 15, False),
    "qwen3_eager": ("qwen3", "eager", "bfloat16", (256, 704, 2, 4, 2, 64), 2, 48, 16, True),
    "gpt2": ("gpt2", "sdpa", "bfloat16", dict(n_embd=256, n_layer=2, n_head=4, resid_pdrop=0.0), 2, 64, 17, True),
    "gpt2_dropout": ("gpt2", "eager", "float16", dict(n_embd=128, n_layer=2, n_head=2, resid_pdrop=0.1), 1, 96, 18, False),
    "gpt2_autocast": ("gpt2", "eager", "float32", dict(n_embd=256, n_layer=1, n_head=4, resid_pdrop=0.0), 2, 40, 19, False),
    "llama": ("llama", "eager", "float32", (256, 704, 1, 4, 2, 64), 1, 40, 20, False),
    "gemma3": ("gemma3", "sdpa", "bfloat16", (256, 704, 2, 4, 2, 64), 1, 70, 21, False),
    "vit": ("vit", "sdpa", "bfloat16", (128, 2, 2, 384, 64), 2, 64, 22, False),
    # other sizes and seeds, drawn after the rules were final
    "mlp_b": ("mlp", "", "bfloat16", (128, 256, 32), 96, 1, 31, True),
    "mlp_dropout_b": ("mlp", "", "bfloat16", (96, 224, 24, True, 0.1), 64, 1, 32, False),
    "mlp_outside_b": ("mlp", "", "float32", (64, 96, 16, False), 50, 1, 33, True),
    "mixed_b": ("mlp", "", "float16", (64, 256, 16), 300, 1, 34, False),
    "convnet_b": ("conv", "", "float16", (24, 12), 6, 20, 35, False),
    "qwen3_sdpa_b": ("qwen3", "sdpa", "bfloat16", (384, 1024, 2, 6, 2, 64), 1, 90, 36, False),
    "qwen3_eager_b": ("qwen3", "eager", "float16", (192, 512, 2, 3, 1, 64), 1, 33, 37, False),
    "gpt2_b": ("gpt2", "sdpa", "float16", dict(n_embd=192, n_layer=2, n_head=3, resid_pdrop=0.0), 1, 150, 38, False),
    "gpt2_dropout_b": ("gpt2", "eager", "bfloat16", dict(n_embd=192, n_layer=2, n_head=3, resid_pdrop=0.2), 2, 50, 39, False),
    "gpt2_sdpa_dropout": ("gpt2", "sdpa", "bfloat16", dict(n_embd=128, n_layer=1, n_head=2, resid_pdrop=0.1), 1, 64, 40, False),
    "llama_b": ("llama", "eager", "float32", (192, 512, 2, 3, 3, 64), 1, 25, 41, False),
    "gemma3_b": ("gemma3", "sdpa", "bfloat16", (320, 768, 2, 4, 2, 64), 1, 48, 42, False),
    "vit_b": ("vit", "sdpa", "float16", (192, 2, 3, 512, 96), 1, 96, 43, False),
}  # fmt: skip


def fill(model, dtype, device, seed):
    """Give parameters the same bits on every machine: uniform numbers, about 1 in norms, smaller ones in wider products."""
    import torch

    with torch.no_grad():
        for number, (name, p) in enumerate(model.named_parameters()):
            value = torch.from_numpy(draw(1000 * seed + number, *p.shape))
            scale = 2.0 ** round(0.5 * np.log2(3 / p[0].numel())) if p.ndim > 1 else 0.125
            p.copy_(value * scale + (1 if p.ndim == 1 and name.endswith("weight") else 0))
    return model.to(dtype).to(device).train()


def make_training(name, device):
    """Return a model in training mode, and a function that computes its loss by a given form of the model."""
    import torch

    what, attention, dtype, sizes, batch, tokens, seed, _ = TRAINED[name]
    dtype, rng = getattr(torch, dtype), np.random.Generator(np.random.Philox([7, seed]))
    labels = lambda count: torch.from_numpy(rng.integers(0, count, (batch,))).to(device)
    inputs = lambda *shape: torch.from_numpy(draw(1000 * seed + 999, *shape)).to(dtype).to(device)
    pictures = lambda: inputs(batch, 3, tokens, tokens)
    if what in ("mlp", "conv"):
        model = fill((Mlp if what == "mlp" else ConvNet)(*sizes), dtype, device, seed)
        x, target = pictures() if what == "conv" else inputs(batch, sizes[0]), labels(sizes[1 if what == "conv" else 2])
        outside = lambda scores: scores if scores.ndim == 0 else torch.nn.functional.cross_entropy(scores.float(), target)
        return model, lambda run: outside(run(x, target))
    import model_operations as models

    if what == "vit":
        hidden, layers, heads, inner, size = sizes
        config = models.tf.ViTConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner, image_size=size,
            patch_size=16, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            problem_type="single_label_classification",  # else the first forward sets it, and the second one compiles again
        )  # fmt: skip
        config._attn_implementation = attention
        model, x, target = fill(models.tf.ViTForImageClassification(config), dtype, device, seed), pictures(), labels(10)
        return model, lambda run: run(pixel_values=x, labels=target).loss
    if what == "gpt2":
        drop = sizes["resid_pdrop"]
        kind, config = models.GPT2, {**sizes, "n_positions": 256, "attn_pdrop": drop, "embd_pdrop": drop}
    else:
        kind, config = {"qwen3": models.QWEN, "llama": models.LLAMA, "gemma3": models.GEMMA}[what], models.decoder(*sizes[:5])
        config |= {} if what == "llama" else {"head_dim": sizes[5]}
        config |= dict(query_pre_attn_scalar=64, sliding_window=32) if what == "gemma3" else {}
    model = fill(models.language_model(kind, attention, dtype, device, **config), dtype, device, seed)
    model.loss_type = "ForCausalLM"  # else GPT-2 warns while it is captured
    given = torch.from_numpy(rng.integers(0, 320, (batch, tokens))).to(device)
    autocast = lambda: torch.autocast(device, torch.bfloat16, enabled=name.startswith("gpt2_autocast"))

    def loss(run):
        with autocast():
            return run(input_ids=given, labels=given, use_cache=False).loss

    return model, loss


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

    def __init__(self, name, kernel, log, place):
        self.name, self.kernel, self.log, self.place = name, kernel, log, place

    def run(self, *args, **options):
        before = describe(args)
        self.kernel.run(*args, **options)
        launcher = self.kernel.launchers[0]
        row = {
            "kernel": self.name,
            "module": self.place,
            "before": before,
            "after": describe(args),
            "options": [k for k in options if k != "stream"],
        }
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
            setattr(module, name, LoggedKernel(name, value, log, pathlib.Path(module.__file__).name))
    module.extern_kernels = LoggedLibrary(module.extern_kernels, log)


def record_one(name, out):
    cache = pathlib.Path(out) / f"cache_{name}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.resolve())
    os.environ.pop("TRITON_CACHE_DIR", None)
    import torch
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
        **versions(), "seconds": seconds, "modules": [module.__file__ for module in modules], "results": results, "log": log,
        "uncompiled": describe(eager if isinstance(eager, tuple | list) else [eager]),
    }  # fmt: skip
    keep(name, out, cache, facts)


def versions():
    import torch

    try:
        import triton
    except ImportError:
        triton = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": torch.__version__, "triton": getattr(triton, "__version__", ""), "gpu": gpu}


def keep(name, out, cache, facts):
    """Write the digests and the cache folder of a case."""
    (pathlib.Path(out) / f"{name}.json").write_text(json.dumps(facts))
    everything = [path for path in sorted(cache.rglob("*")) if path.is_file()]
    files = [path for path in everything if path.suffix in KEPT]
    with tarfile.open(pathlib.Path(out) / f"{name}.tar.xz", "w:xz") as archive:
        for path in files:
            data = path.read_bytes()
            entry = tarfile.TarInfo(str(path.relative_to(cache)))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    kinds = sorted({path.suffix for path in everything})
    rows, modules = len(facts["log"]), len(facts["modules"])
    print(name, facts["seconds"], "s to compile,", modules, "modules,", rows, "rows,", len(files), "files kept of kinds", kinds, flush=True)


def described(named):
    """Digests of named tensors, and their first words."""
    import torch

    words = lambda x: x.detach().reshape(-1)[:6].float().cpu().tolist()
    return {name: [*digest(x), words(x)] for name, x in named if isinstance(x, torch.Tensor)}


def train_one(name, out):
    """Record a training step: forward and backward compiled, AdamW as PyTorch's lists of tensors, and compiled where the table says so."""
    cache = pathlib.Path(out) / f"cache_{name}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.resolve())
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.pop("TRITON_CACHE_DIR", None)
    import torch
    from torch._inductor.codecache import PyCodeCache

    if name.startswith("mixed"):  # else from 5,242,880 elements on
        importlib.import_module("torch._inductor.config").triton.mix_order_reduction_non_strict_mode = True
    partitions, fx = [], importlib.import_module("torch._inductor.compile_fx")
    partition = fx.min_cut_rematerialization_partition

    def note_partition(*args, **kwargs):
        found = partition(*args, **kwargs)
        names = lambda module: [[x.name for x in module.graph.nodes if x.op == "placeholder"], str(module.graph.output_node().args[0])]
        partitions.append([kwargs.get("num_fwd_outputs"), *map(names, found)])
        return found

    fx.min_cut_rematerialization_partition = note_partition
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, loss_of = make_training(name, device)
    begin = {key: x.clone() for key, x in model.state_dict().items()}
    compiled, began = torch.compile(model, dynamic=False, fullgraph=True), time.time()
    loss_of(compiled).backward()
    facts, logged = {"seconds": round(time.time() - began, 1), **versions(), "partitions": partitions, "log": []}, set()

    def log_new_modules():
        for module in PyCodeCache.modules:
            if hasattr(module, "extern_kernels") and module.__file__ not in logged:
                logged.add(module.__file__)
                log_module(module, facts["log"])
        facts["modules"] = sorted(logged)

    def restart():
        model.load_state_dict(begin)
        torch.manual_seed(TRAINED[name][6])

    log_new_modules()
    model.zero_grad()
    restart()
    loss = loss_of(compiled)
    facts["forward_rows"] = len(facts["log"])
    loss.backward()
    facts["loss"], facts["gradients"] = [*digest(loss), loss.item()], described((key, p.grad) for key, p in model.named_parameters())
    facts["buffers"] = described(model.named_buffers())
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    facts["updated"] = described(model.named_parameters())
    keep(name, out, cache, facts)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    restart()
    loss = loss_of(model)
    loss.backward()
    facts["uncompiled"] = {"loss": [*digest(loss), loss.item()], **described((key, p.grad) for key, p in model.named_parameters())}
    restart()
    if TRAINED[name][7]:
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step, began = torch.compile(optimizer.step, dynamic=False), time.time()
        step()
        facts["optimizer_seconds"] = round(time.time() - began, 1)
        facts["log"].append("optimizer")
        log_new_modules()
        restart()
        for state in optimizer.state.values():
            for x in state.values():
                x.zero_()
        step()
        named = {id(p): key for key, p in model.named_parameters()}
        facts["updated_compiled"] = described(model.named_parameters())
        facts["state"] = described((f"{named[id(p)]} {key}", x) for p, state in optimizer.state.items() for key, x in state.items())
    keep(name, out, cache, facts)


# ---- the comparison


class LogComparison:
    """Compares what each launch and product leaves with the rows of a log, in order."""

    def __init__(self, log):
        self.rows, self.left = log, log[:]
        self.equal = self.total = self.words = self.products = 0
        self.differ = []

    def __call__(self, part):
        if part.launch is None and not part.name.startswith("extern_kernels."):
            return
        name = part.name.removeprefix("extern_kernels.")
        while self.left and (not isinstance(self.left[0], dict) or name not in (self.left[0].get("kernel"), self.left[0].get("library"))):
            row = self.left.pop(0)
            if isinstance(row, dict) and ("kernel" in row or "library" in row):
                self.differ.append((name, "in place of", row.get("kernel") or row["library"]))
        if not self.left:
            return self.differ.append((name, "has no row"))
        row = self.left.pop(0)
        given = part.operands if part.launch is not None else part.operands[-1:]
        operands, expected = ([x for x in xs if isinstance(x, list) or hasattr(x, "dtype")] for xs in (given, row["after"]))
        self.products += part.launch is None
        for number, (x, [dtype, shape, _, sha]) in enumerate(zip(operands, expected, strict=True)):
            found = digest(x)
            self.total, self.words = self.total + 1, self.words + x.numel()
            self.equal += (same := found[0] == dtype and found[1] == shape and found[3] == sha)
            if not same:
                known = [] if part.launch is None else row["before"][: len(expected)]
                self.differ.append((name, number, found[:2], "operands differ" * (found[3] != sha and known == expected)))

    def text(self):
        rows = sum(isinstance(x, dict) and ("kernel" in x or "library" in x) for x in self.left)
        first = "; ".join(map(str, self.differ[:3]))
        return f"{self.equal} of {self.total} tensors with {self.words:,} words equal, {rows} rows left. {first}"


def compare_one(name, out):
    """Run a recorded case on this machine, and print how many of the GPU's words it gives."""
    import tempfile

    import torch

    import tcemu

    facts = json.loads((pathlib.Path(out) / f"{name}.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(pathlib.Path(out) / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        graphs = tcemu.inductor.read(folder)
        gpu, log = facts["gpu"].removeprefix("NVIDIA ").split()[0], LogComparison(facts["log"])
        same = lambda found, expected: f"{sum(found[key][3] == expected[key][3] for key in expected)} of {len(expected)}"
        began, training = time.time(), name in TRAINED and "gradients" in facts
        if training:
            model, loss_of = make_training(name, "cpu")
        else:
            function, operands = make(name, "cpu")
            model = function if isinstance(function, torch.nn.Module) else Wrapped(function)
        with tcemu.torch.emulate(model, gpu=gpu, compiled=graphs, unknown="leave") as emulated:
            note = emulated._add_launch
            emulated._add_launch = lambda part: (log(part), note(part))
            if not training:
                with torch.no_grad():
                    found = emulated(*operands)
                results = describe(found if isinstance(found, tuple | list) else [found])
                print(
                    name,
                    sum(a[3] == b[3] for a, b in zip(results, facts["results"], strict=True)),
                    "of",
                    len(results),
                    "results;",
                    log.text(),
                )
            else:
                torch.manual_seed(TRAINED[name][6])
                loss = loss_of(emulated)
                print(
                    name, "loss", digest(loss)[3] == facts["loss"][3], "forward:", log.text(), round(time.time() - began), "s", flush=True
                )
                loss.backward()
                gradients = described((key, p.grad) for key, p in model.named_parameters())
                print(name, "gradients:", same(gradients, facts["gradients"]), log.text(), round(time.time() - began), "s", flush=True)
                print(name, "buffers:", same(described(model.named_buffers()), facts["buffers"]))
                print("   differ:", [key for key, x in gradients.items() if x[3] != facts["gradients"][key][3]][:8])
                begin = {key: x.clone() for key, x in model.state_dict().items()}
                torch.optim.AdamW(model.parameters(), lr=1e-3).step()
                print(name, "updated:", same(described(model.named_parameters()), facts["updated"]), flush=True)
                if "updated_compiled" in facts:
                    with torch.no_grad():
                        model.load_state_dict(begin)
                    emulated.compile(torch.optim.AdamW(model.parameters(), lr=1e-3).step)()
                    print(
                        name, "updated by compiled AdamW:", same(described(model.named_parameters()), facts["updated_compiled"]), log.text()
                    )
            unknown = emulated.report().unknown
        print("   unknown:", [(line.operator, line.operands, line.evidence[:90]) for line in unknown][:8], round(time.time() - began), "s")


def pack(out, names):
    """Write one archive with the files that are read of some cases, and their digests without the log."""
    import lzma
    import tempfile

    import tcemu

    data = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=data, mode="w") as archive:
        for name in names:
            with tarfile.open(pathlib.Path(out) / f"{name}.tar.xz") as recorded:
                recorded.extractall(pathlib.Path(folder) / name, filter="data")
            graphs = tcemu.inductor.read(pathlib.Path(folder) / name)
            used = {graph.path for graph in graphs}
            sources = {path.read_text().strip(): path for path in graphs.folder.glob("*/*.py")}
            for kernel in (kernel for graph in graphs for kernel in graph.kernels.values()):
                chosen = [path for path in graphs.folder.glob("*/*.best_config") if kernel.ptx.parent.name in path.read_text()]
                used |= {sources[kernel.source.strip()], *chosen, *(kernel.ptx.with_suffix(end) for end in (".ptx", ".json"))}
                used |= set() if chosen else {kernel.ptx.with_suffix(".ttir")}
            for path in sorted(used):
                archive.add(
                    path, f"{name}/{path.relative_to(graphs.folder)}", filter=lambda entry: entry.replace(mtime=0, uid=0, gid=0, deep=False)
                )
            facts = json.loads((pathlib.Path(out) / f"{name}.json").read_text())
            seen = [x for row in facts["log"] if "kernel" in row for x in row["before"] if isinstance(x, list) and x[0] == "int64"]
            facts["integers"] = [x for i, x in enumerate(seen) if x not in seen[:i]]  # among them seeds of dropout
            text = json.dumps({key: x for key, x in facts.items() if key not in ("log", "partitions", "modules")}).encode()
            entry = tarfile.TarInfo(f"{name}.json")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    (pathlib.Path(out) / "packed.tar.xz").write_bytes(found := lzma.compress(data.getvalue(), preset=9))
    print(len(found), "bytes")


class Wrapped:
    """A module that calls a function."""

    def __new__(cls, function):
        import torch

        class Wrapped(torch.nn.Module):
            def forward(self, *args):
                return function(*args)

        return Wrapped()


def main():
    command, out, *names = sys.argv[1:]
    pathlib.Path(out).mkdir(parents=True, exist_ok=True)
    if command == "pack":
        return pack(out, names)
    if command == "compare":
        known = names or [path.stem for path in sorted(pathlib.Path(out).glob("*.json"))]
        return [compare_one(name, out) for name in known]
    if command in ONE:
        return ONE[command](names[0], out)
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, f"{command}_one", out, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in names or (TRAINED if command == "train" else NAMES)
    }
    for name, process in running.items():
        try:
            print(process.communicate(timeout=max(1, 85 - time.time() + BEGAN))[0][-1500:], flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print(name, "out of time")
    return subprocess.run(["rm", "-rf", *(f"{out}/cache_{name}" for name in running)], check=False)


ONE = {"record_one": record_one, "train_one": train_one, "compare_one": compare_one}
BEGAN = time.time()
if __name__ == "__main__":
    main()
