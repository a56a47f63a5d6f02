"""Which order do the libraries of a GPU add in, and are their words replayed? `python benchmarks/replay_gpu.py --out FOLDER`: a survey.

For torch's and JAX's matrix products it fingerprints the shapes of a list, then a random sample (m, n, k log-uniform in 1..8192, every
other one aligned), replays each recipe on fresh operands and counts the words that differ. A line a shape is printed. FOLDER/survey.jsonl
gets a line of JSON a shape, with the recipe, the kernels' names, and some words of the GPU. `--resume` leaves out the shapes whose order is
there. `--held-out` takes the shapes on which predicted orders are tested instead, `--study` those of `replay_products.study_shapes`, with
few things about each. `--part I OF` takes a part of the shapes, for several machines or calls. A shape that fails is a line too. Without a
GPU, `--stand-in` takes the same functions on the CPU: a dry run of that CPU. `replay_distil.py` makes profiles of a survey.
"""

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import numpy as np
from replay_distil import lines_by_shape
from replay_products import FORMS, SURVEYS, TORCH, held_out_shapes, products, shapes, study_shapes

from tcemu.operations.products.library.kernel_json import to_dict
from tcemu.operations.products.library.kernel_recipe import Conditions, KernelRecipe
from tcemu.uses.replay.black_box import BlackBox
from tcemu.uses.replay.cublaslt_heuristic import query_heuristic
from tcemu.uses.replay.drawn_matrices import epilogue_kinds
from tcemu.uses.replay.fingerprinting import fingerprint
from tcemu.uses.replay.order_probes import ask_pairs, draw_windows, max_window_terms
from tcemu.uses.replay.recipe_results import answer_sample, ask_sample, count_mismatches, draw_sample

FILE = "survey.jsonl"
WORDS = 16  # rows and columns of the words that are kept


def machine(device: str) -> dict[str, Any]:
    """What a recipe holds for."""
    said: dict[str, Any] = {"jax": jax.__version__, "numpy": np.__version__, "device": device}
    try:
        import torch  # pyright: ignore[reportMissingImports]

        said |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        if device == "cuda":
            import ctypes

            about = torch.cuda.get_device_properties(0)
            said |= {"gpu": about.name, "sm_count": about.multi_processor_count}
            torch.mm(*(torch.ones((16, 16), device=device) for _ in range(2)))
            loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt.so" in line}
            for path in sorted(loaded):
                library = ctypes.CDLL(path)
                library.cublasLtGetVersion.restype = ctypes.c_size_t
                said["cublaslt"] = int(library.cublasLtGetVersion())
    except Exception as error:
        said["unknown"] = f"{type(error).__name__}: {error}"
    return said


def kernels(fn: Callable, given: list, besides: dict[str, Any]) -> list[str]:
    """The names of the GPU kernels that one call of a torch function runs; none where that cannot be asked."""
    try:
        from torch.profiler import ProfilerActivity, profile  # pyright: ignore[reportMissingImports]

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            fn(*given, **besides)
            import torch  # pyright: ignore[reportMissingImports]

            torch.cuda.synchronize()
        return sorted({event.key for event in found.key_averages() if "Mem" not in event.key and not event.key.startswith("cuda")})
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def proposed(name: str, shape: tuple[int, int, int]) -> list[Any]:
    """What cuBLASLt proposes for a survey's product, or why it does not. It is asked without scales and bias."""
    survey = SURVEYS[name]
    dtypes = ("tf32", "tf32") if name == "torch-tf32" else survey.dtypes
    try:
        return query_heuristic(*shape, operand_dtype=dtypes, fast_accumulation=survey.fast).records()
    except (RuntimeError, ValueError) as error:
        return [str(error)]


def words_of(box: BlackBox, seed: int, how: str | None, totals_by: KernelRecipe | None) -> dict[str, Any]:
    """A few hundred words of the box, with what brings its operands back: `tcemu.uses.replay.recipe_results.drawn`."""
    asked = answer_sample(box, draw_sample(box.shape, box.operand_formats, box.form, "flat", seed, how, totals_by, WORDS))
    rows, columns = len(asked.a), asked.b.shape[1]
    given = [asked.a, asked.b, *(x for x in asked.epilogue if x is not None)]
    kept = {
        "kind": "flat", "seed": seed, "rows": rows, "columns": columns, "out": str(box.result_format),
        "crc": [zlib.crc32(np.ascontiguousarray(x).tobytes()) for x in given],
        "codes": base64.b64encode(np.ascontiguousarray(asked.answer[:rows, :columns]).tobytes()).decode(),
    }  # fmt: skip
    more = {name: base64.b64encode(x.tobytes()).decode() for name, x in asked.epilogue._asdict().items() if x is not None}
    return kept | ({"how": how, "besides": more} if more else {})


def staircase(box: BlackBox) -> dict[str, Any]:
    """For what is undetermined: which windows survive beside pairs (0, j) and (j, j + 1), to be read later."""
    m, n, k = box.shape
    by_rows = m >= n
    pairs_at_most, windows_at_most = (m, n) if by_rows else (n, m)
    count = min(pairs_at_most, 64, k // 4)
    kept = {}
    steps = sorted({max(1, k * x // count) for x in range(1, count)} - {k})
    for name, pairs in (("from 0", [(0, j) for j in steps]), ("neighbours", [(j, j + 1) for j in steps if j + 1 < k])):
        free = np.setdiff1d(np.arange(k), [place for pair in pairs for place in pair])
        windows = draw_windows(np.random.default_rng(0), free, k, min(windows_at_most, 64), max_window_terms(box))
        asked = ask_pairs(box, pairs, windows, by_rows=by_rows)
        sizes, starts = windows.sum(1), windows.argmax(1)
        kept[name] = {"pairs": pairs, "starts": starts.tolist(), "sizes": sizes.tolist(), "lost": (sizes - asked.counts).tolist()}
    return kept


def surveyed(
    name: str, shape: tuple[int, int, int], fn: Callable, known: dict[str, Any], device: str, *, brief: bool = False
) -> dict[str, Any]:
    """One shape as a line of JSON: a failure is told, not raised. `brief` leaves out findings, words and probes for later."""
    m, n, k = shape
    survey = SURVEYS[name]
    framework = survey.framework
    line: dict[str, Any] = {"survey": name, "m": m, "n": n, "k": k}
    start = time.perf_counter()
    try:
        version = f"torch {known.get('torch')}, CUDA {known.get('cuda')}, cuBLASLt {known.get('cublaslt')}"
        version = version if framework == "torch" else f"jax {known['jax']}, algorithm 0"
        conditions = Conditions(library=name, version=version, gpu=known.get("gpu"), sm_count=known.get("sm_count"))
        where = device if framework == "torch" else ("gpu" if device == "cuda" else "cpu")
        found = fingerprint(
            fn, m, n, k, operand_dtype=survey.dtypes, form=survey.form, framework=framework, device=where, conditions=conditions
        )
        line |= {"calls": found.calls, "recipe": to_dict(found.recipe) if found.recipe else None, "why": found.reason}
        if not brief:
            line |= {"findings": [str(f) for f in found.findings], "survivors": [to_dict(s) for s in found.survivors[:4]]}
        box = BlackBox(fn, shape, survey.held, framework, where, 64, survey.form)
        known_by = found.recipe or next(iter(found.survivors), None)
        hows = (None,) if survey.form.is_plain else epilogue_kinds(survey.form) if known_by is not None else (None,)
        if not brief:
            line["words"] = words_of(box, 7, hows[0], known_by)
            line["more_words"] = [words_of(box, 7, how, known_by) for how in hows[1:]]
        if found.recipe is not None:
            how = hows[-1] if survey.form.is_plain else "mild"
            wrong = [count_mismatches(found.recipe, ask_sample(box, kind, 999, how, found.recipe)) for kind in ("flat", "cancelling")]
            line |= {"fresh": 2 * m * n, "wrong": sum(wrong)}
        elif k >= 16 and m * n > 1 and not brief:
            line["staircase"] = staircase(box)
        if framework == "torch" and device == "cuda":
            import torch  # pyright: ignore[reportMissingImports]

            a, b = (
                torch.ones(size, device=device).to(getattr(torch, TORCH[dtype]))
                for size, dtype in zip(((m, k), (k, n)), survey.dtypes, strict=True)
            )
            line["kernels"] = kernels(fn, [a, b], box.epilogue_arguments())
            line["proposed"] = proposed(name, shape)
    except Exception as error:
        line |= {"error": f"{type(error).__name__}: {error}"[:500], "at": traceback.format_exc().splitlines()[-4:]}
    return line | {"seconds": round(time.perf_counter() - start, 2)}


def said(line: dict[str, Any]) -> str:
    """A line for people."""
    head = f"{line['survey']:>10} {line['m']:>5} x {line['n']:>6} x {line['k']:>6} {line['seconds']:6.1f} s  "
    if "error" in line:
        return head + "FAILED " + line["error"][:120]
    if line["recipe"] is None:
        return head + "undetermined: " + line["why"][:70] + " " + ",".join(line.get("kernels", []))[:90]
    recipe = line["recipe"]
    edges = recipe["slices"]["edges"]
    cut = f"{len(edges) - 1} of {edges[1]}" if edges else f"dealt {recipe['slices']['dealt']}"
    ((kind, unit),) = recipe["unit"].items()
    own = f"{unit['op'].split('.')[0]} residue {unit['residue']} restart {unit['restart']}" if kind == "steps" else str(list(unit.values()))
    formed = recipe["conditions"]["scales"] or recipe["conditions"]["bias"]
    epilogue = f", epilogue {list(recipe['epilogue'].values())}" if formed else ""
    return head + f"{line['wrong']} of {line['fresh']} words differ; slices {cut}, {own}, merge {list(recipe['merge'].values())}" + epilogue


def worker(args: argparse.Namespace) -> int:
    """Every so many-th shape, until the time is up."""
    device = "cpu" if args.stand_in else "cuda"
    known, fns = machine(device), products(device)
    path = args.out / FILE
    done = set(lines_of(path)) if args.resume else set()
    append(path, {"machine": known, "date": time.strftime("%Y-%m-%d")})
    part, parts = args.part
    questions = list(study_shapes(args.count)) if args.study else held_out_shapes() if args.held_out else shapes(args.count, args.seed)
    questions = [shape for shape in questions if max(shape[1] * shape[3], shape[3] * shape[2], shape[1] * shape[2]) <= args.largest]
    for name, m, n, k in questions[part::parts][args.worker :: args.processes]:
        if (name, m, n, k) in done or name not in fns or name not in args.only:
            continue
        if time.time() > args.until:
            break
        line = surveyed(name, (m, n, k), fns[name], known, device, brief=args.study)
        append(path, line)
        print(said(line), flush=True)
    return 0


def append(path: Path, line: dict[str, Any]) -> None:
    """One line of JSON at the end of a file that several processes write, in one piece."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def lines_of(path: Path) -> list[tuple]:
    """The shapes that a file has; a last line that was cut off is none."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "survey" in line and line.get("recipe") and line["wrong"] == 0:
            found.append((line["survey"], line["m"], line["n"], line["k"]))
    return found


def summary(out: Path) -> None:
    """How many were found, and replayed without a difference, by survey."""
    lines = lines_by_shape([out / FILE])
    for name in SURVEYS:
        own = [line for line in lines.values() if line["survey"] == name]
        found = [line for line in own if line.get("recipe")]
        right = [line for line in found if line["wrong"] == 0]
        failed = sum("error" in line for line in own)
        print(f"{name:>10}: {len(own)} shapes, {len(found)} found, {len(right)} of them replayed with 0 words different, {failed} failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the lines of JSON")
    parser.add_argument("--seconds", type=float, default=440, help="after which no shape is begun")
    parser.add_argument("--count", type=int, default=400, help="shapes of the random sample, of each survey")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--processes", type=int, default=8, help="that share the GPU")
    parser.add_argument("--only", nargs="+", default=list(SURVEYS), choices=list(SURVEYS))
    parser.add_argument("--forms", dest="only", action="store_const", const=list(FORMS), help="two formats, scales and biases alone")
    parser.add_argument("--held-out", action="store_true", help="the shapes that test the predicted orders, in place of list and sample")
    parser.add_argument("--study", action="store_true", help="the shapes for rules, in place of list and sample; --count rounds of six")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "OF"), help="every OF-th shape, from the I-th on")
    parser.add_argument("--largest", type=int, default=1 << 27, help="elements of a matrix")
    parser.add_argument("--resume", action="store_true", help="leave out the shapes whose order is in the folder")
    parser.add_argument("--stand-in", action="store_true", help="the CPU in place of the GPU")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker is not None:
        return worker(args)
    if not args.resume and (args.out / FILE).exists():
        parser.error(f"{args.out / FILE} is there already; give --resume, or another folder")
    until = time.time() + args.seconds
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "tcemu-replay-cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    words = [sys.executable, __file__, *sys.argv[1:], "--until", str(until)]
    running = [subprocess.Popen([*words, "--worker", str(number)]) for number in range(args.processes)]
    statuses = [process.wait() for process in running]
    summary(args.out)
    return max(statuses, default=0)


if __name__ == "__main__":
    sys.exit(main())
