"""`python tests/ptx_kernels/compile.py [FILE ...]` makes ptx/ from sources/ with nvcc 13.0; `--triton` with Triton 3.6.

`--functional` makes functional.json.xz with Triton 3.9.0, `--block-norms` block_norms.json.xz with NVRTC 13.5. None of it needs a GPU.
"""

import json
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
H, F, I, E = "*fp16", "*fp32", "i32", "*fp8e4nv"  # noqa: E741
TILES = {f"{name}": "tensordesc<fp16[64,64]>" for name in "abd"}
TRITON = {  # kernel -> types of its parameters, constants, architectures
    "triton_matmul": ({"a": H, "b": H, "d": H, "m": I, "n": I, "k": I}, {"M": 64, "N": 64, "K": 32}, (80, 90)),
    "triton_matmul_fp8": ({"a": E, "b": E, "scales": F, "d": "*bf16", "n": I, "k": I}, {"M": 64, "N": 32, "K": 64}, (90,)),
    "triton_matmul_tma": ({**TILES, "k": I}, {"M": 64, "N": 64, "K": 64}, (90,)),
    "triton_softmax": ({"x": F, "y": F, "columns": I}, {"SIZE": 256}, (80, 90)),
    "triton_layer_norm": ({"x": H, "gain": F, "bias": F, "y": H, "columns": I, "epsilon": "fp32"}, {"SIZE": 256}, (80, 90)),
    "triton_attention": (
        {"q": H, "k": H, "v": H, "out": H, "length": I, "scale": "fp32"}, {"M": 64, "N": 32, "D": 64, "CAUSAL": True}, (80, 90)),
}  # fmt: skip


def write_texts(name: str, texts: dict[str, str]) -> None:
    """Write NAME.ptx, and a separate text of sm_90a only where more than the line `.target` differs."""
    first, *others = texts.values()
    (FOLDER / "ptx").mkdir(exist_ok=True)
    if "sm_80" not in texts:
        (FOLDER / "ptx" / f"{name}.sm_90a.ptx").write_text(first)
        return
    (FOLDER / "ptx" / f"{name}.ptx").write_text(first)
    for text in others:
        if text != first.replace(".target sm_80", ".target sm_90a"):
            (FOLDER / "ptx" / f"{name}.sm_90a.ptx").write_text(text)


def compile_with_nvcc(source: Path) -> None:
    """Compile a source. Its comment lines `// use_fast_math`, `// sm_90a only` and `// CUTLASS` select options.

    The environment variable CUTLASS names the folder of CUTLASS's headers (`include`).
    """
    lines = source.read_text().splitlines()
    more = ["--use_fast_math"] if "// use_fast_math" in lines else []
    if "// CUTLASS" in lines:
        more += [f"-I{os.environ['CUTLASS']}", "--expt-relaxed-constexpr", "-DNDEBUG"]
    texts = {}
    for target in ("sm_90a",) if "// sm_90a only" in lines else ("sm_80", "sm_90a"):
        with tempfile.NamedTemporaryFile(suffix=".ptx") as made:
            command = ["nvcc", "-ptx", f"-arch={target}", "-std=c++17", *more, source.name, "-o", made.name]
            subprocess.run(command, cwd=source.parent, check=True, timeout=100)
            texts[target] = Path(made.name).read_text()
    write_texts(source.stem, texts)


def compile_with_triton() -> None:
    """Compile the Triton kernels. Only the layer norm keeps line information, whose sections are larger than the kernels."""
    sys.path.insert(0, str(FOLDER / "sources"))
    import triton
    import triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, (types, constants, architectures) in TRITON.items():
        os.environ["TRITON_DISABLE_LINE_INFO"] = "0" if name == "triton_layer_norm" else "1"
        aligned = [i for i, (key, kind) in enumerate(types.items()) if kind[0] == "*" or ("matmul" in name and key in "mnk")]
        source = ASTSource(
            getattr(triton_kernels, name), types | dict.fromkeys(constants, "constexpr"), constants,
            {(i,): [["tt.divisibility", 16]] for i in aligned},
        )  # fmt: skip
        texts = {}
        for architecture in architectures:
            made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4, "num_stages": 2})
            texts[{80: "sm_80", 90: "sm_90a"}[architecture]] = made.asm["ptx"]
            print(name, architecture, "shared bytes", made.metadata.shared, "warps", made.metadata.num_warps)
        write_texts(name, texts)


def compile_functional() -> None:
    """Compile the kernels between matrix products for sm_90, each for its dtypes and sizes, and those of the GPT for sm_80."""
    sys.path[:0] = [str(FOLDER / "sources"), str(FOLDER)]
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    import functional_kernels
    import gpt_kernels
    import triton
    from functional_manifest import CASES, FILE, GPT
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    texts = {}

    def compile_text(name: str, kernel: str, types: dict, constants: dict, aligned: list[str], architecture: int, warps: int) -> None:
        function = getattr(functional_kernels, kernel, None) or getattr(gpt_kernels, kernel)
        hints = {(function.arg_names.index(key),): [["tt.divisibility", 16]] for key in aligned}
        source = ASTSource(function, types | dict.fromkeys(constants, "constexpr"), constants, hints)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
        texts[name] = {"text": made.asm["ptx"], "shared": made.metadata.shared, "warps": warps}

    for case in CASES:
        compile_text(case.name, case.kernel, *case.signature(), case.aligned(), 90, case.warps)
    for name, (kernel, types, constants) in GPT.items():
        aligned = [key for key, kind in types.items() if kind != "fp32" and key not in ("count", "cos_stride")]
        compile_text(f"gpt {name}", kernel, types, constants, aligned, 80, 32 if name == "cross_entropy" else 4)
    FILE.write_bytes(lzma.compress(json.dumps(texts).encode(), preset=9 | lzma.PRESET_EXTREME))


def compile_block_norms() -> None:
    """Compile the norms of block_norms.cuh for sm_90, for each dtype and vector, without the constants of CUB that nothing reads."""
    sys.path.insert(0, str(FOLDER))
    from functional_manifest import BLOCK_NORMS_FILE, CUDA_DTYPES, VECTORS

    from tcemu.engine.backends.cuda.nvrtc import compile_source, include_folders

    source, texts = (FOLDER / "sources" / "block_norms.cuh").read_text(), {}
    folders = [f"--include-path={folder}" for folder in include_folders()]
    for kind, dtype in CUDA_DTYPES.items():
        for vector in VECTORS[kind]:
            options = ["--std=c++17", f"-DDTYPE={dtype}", f"-DVECTOR={vector}", *folders]
            lines = compile_source(source, "compute_90", options=options).code.rstrip(bytes(1)).decode().splitlines()
            texts[f"{kind} {vector}"] = "\n".join(line for line in lines if not line.startswith((".global", "//"))) + "\n"
    BLOCK_NORMS_FILE.write_bytes(lzma.compress(json.dumps(texts).encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    if sys.argv[1:] == ["--triton"]:
        compile_with_triton()
    elif sys.argv[1:] == ["--functional"]:
        compile_functional()
    elif sys.argv[1:] == ["--block-norms"]:
        compile_block_norms()
    else:
        for path in [FOLDER / "sources" / f"{name}.cu" for name in sys.argv[1:]] or sorted((FOLDER / "sources").glob("*.cu")):
            compile_with_nvcc(path)
