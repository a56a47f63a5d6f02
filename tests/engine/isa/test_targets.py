"""Targets by the names of GPUs: every name of the table, everything that takes a target, and what is said of a name that is none."""

import inspect
from dataclasses import replace

import jax
import numpy as np
import pytest
from support.public_names import public_objects
from support.sampling import sample_cases

import tcemu
from tcemu.base.errors import NotModelled, Unsupported
from tcemu.cli import main
from tcemu.engine.architectures.lookup import resolve_arithmetic, target_rows
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.targets import GPU_NAMES, TARGETS, capability_target, resolve_target
from tcemu.uses.fuzz import verification
from tcemu.uses.fuzz.implementations import get_implementation

HALF = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
SPARSE = "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
WMMA = "wmma.{}.sync.aligned.row.m16n16k16.f16"
UNKNOWN = ("H10O", "sm_91", "", "A 1000 000", "x" * 10**6)
KNOWN = {  # what people write -> the target
    "H100": "sm_90a", "h200": "sm_90a", "GH200": "sm_90a", "A100": "sm_80", "A30": "sm_80", "A40": "sm_86", "A10": "sm_86",
    "RTX 3090": "sm_86", "RTX 4090": "sm_89", "L4": "sm_89", "L40": "sm_89", "L40S": "sm_89", "RTX 6000 Ada": "sm_89",
    "B200": "sm_100a", "GB200": "sm_100a", "B300": "sm_103a", "GB300": "sm_103a", "RTX 5090": "sm_120a", "RTX PRO 6000": "sm_120a",
    "V100": "sm_70", "T4": "sm_75", "RTX 2080 Ti": "sm_75", "Jetson Orin": "sm_87", "Orin": "sm_87", "Thor": "sm_110a",
    "DGX Spark": "sm_121a", "B100": "sm_100a",
    "Turing": "sm_75", "Ada": "sm_89", "Ada Lovelace": "sm_89", "Hopper": "sm_90a", "Grace Hopper": "sm_90a",
    "SM_90A": "sm_90a", " sm_90a": "sm_90a", "sm90": "sm_90", "rtx-4090": "sm_89", "rtx4090": "sm_89", "RTX_4070_Ti": "sm_89",
    # as drivers write them
    "NVIDIA H100 80GB HBM3": "sm_90a", "NVIDIA H100 PCIe": "sm_90a", "NVIDIA H200 NVL": "sm_90a", "NVIDIA A100-SXM4-80GB": "sm_80",
    "Tesla V100-SXM2-16GB": "sm_70", "Tesla T4": "sm_75", "NVIDIA GeForce RTX 4090 Laptop GPU": "sm_89", "Quadro RTX 6000": "sm_75",
    "NVIDIA RTX 6000 Ada Generation": "sm_89", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "sm_120a",
    "NVIDIA GB10": "sm_121a",
    # GPUs of clouds and of some countries
    "H800": "sm_90a", "NVIDIA H800 PCIe": "sm_90a", "A800": "sm_80", "NVIDIA A800-SXM4-80GB": "sm_80", "A10G": "sm_86", "T4G": "sm_75",
    "L20": "sm_89", "L2": "sm_89", "RTX 4090 D": "sm_89", "V100S": "sm_70", "A10M": "sm_86",
    # compute capabilities, and the virtual architectures of nvcc
    "9.0": "sm_90a", "8.9": "sm_89", "7.5": "sm_75", "12.0": "sm_120a", "compute_90": "sm_90", "compute_90a": "sm_90a", "CC 8.0": "sm_80",
    "compute capability 9.0": "sm_90a", "sm_9.0": "sm_90a", "compute_75": "sm_75",
}  # fmt: skip
SEVERAL = {  # a name -> the targets that it may mean
    "Volta": ("sm_70", "sm_72"), "Ampere": ("sm_80", "sm_86", "sm_87"), "RTX 6000": ("sm_75", "sm_89"),
    "Blackwell": ("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"),
}  # fmt: skip
NEAR = {"H10": "H100", "GH20O": "GH200", "RTX 4095": "GeForce RTX 4090", "Hoper": "Hopper", "RTX PRO 600": "RTX PRO 6000 Blackwell"}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint32)


HALVES, ONES = np.zeros((16, 16), np.uint16), np.ones((1, 16), np.float32)
KERNEL = """.version 8.0 .target sm_80 .address_size 64 .entry k(.param .u64 a) {
    .reg .b64 %rd; .reg .b32 %r; ld.param.u64 %rd, [a]; mov.u32 %r, %tid.x; st.global.u32 [%rd], %r; ret; }"""
TAKING = {  # everything public that takes a target, by its name, and what is below it
    "check": lambda target: tcemu.check(HALF, target),
    "isa.instructions": lambda target: tcemu.isa.instructions(target),
    "get_model": lambda target: tcemu.get_model(HALF, target),
    "get_model, of tcgen05": lambda target: tcemu.get_model("f16 tcgen05", UNIT.get(target, target)),
    "list_models": lambda target: tcemu.list_models(target),
    "evidence": lambda target: tcemu.evidence(HALF, target),
    "backends.describe": lambda target: tcemu.backends.describe(HALF, target=target),
    "applied, with a model": lambda target: resolve_arithmetic(HALF, target, tcemu.get_model(HALF, "sm_90a")),
    "rows_of": lambda target: target_rows(target),
    "get_recipe": lambda target: tcemu.get_recipe("bf16", target),
    "get_recipe, with block scales": lambda target: tcemu.get_recipe("nvfp4", UNIT.get(target, target)),
    "products.get_ozaki_recipe": lambda target: tcemu.products.get_ozaki_recipe("ozaki_int8", target),
    "products.OzakiSliceRecipe": lambda target: replace(tcemu.products.get_ozaki_recipe("ozaki_int8", "H100"), target=target),
    "products.OzakiModularRecipe": lambda target: replace(tcemu.products.get_ozaki_recipe("ozaki2_int8", "H100"), target=target),
    "instructions.Tcgen05Block": lambda target: tcemu.instructions.Tcgen05Block(zeros(64), target=UNIT.get(target, target)).target,
    "products.get_wide_recipe": lambda target: tcemu.products.get_wide_recipe("bf16x6", target),
    "recipes.split_accumulator_interval": lambda target: tcemu.recipes.split_accumulator_interval(target),
    "recipes.as_recipe": lambda target: tcemu.recipes.as_recipe("bf16", target),
    "Recipe": lambda target: tcemu.Recipe(HALF, target),
    "Recipe, of tcgen05": lambda target: tcemu.Recipe("f16 tcgen05", UNIT.get(target, target)),
    "Recipe, with a model": lambda target: tcemu.Recipe(HALF, target, model=tcemu.get_model(HALF, "sm_90a")),
    "replay.Steps": lambda target: tcemu.replay.Steps(HALF, target),
    "gemm": lambda target: tcemu.gemm(ONES, ONES.T, op=HALF, target=target),
    "dot": lambda target: tcemu.dot(HALF, HALVES, HALVES[:, :8], zeros(16, 8), target=target),
    "mma": lambda target: tcemu.mma(HALF, zeros(32, 4), zeros(32, 2), zeros(32, 4), target=target),
    "mma_sp": lambda target: tcemu.mma_sp(SPARSE, zeros(32, 2), zeros(32, 2), zeros(32, 4), zeros(32), selector=0, target=target),
    "wgmma": lambda target: tcemu.wgmma(WGMMA, zeros(4, 32, 4), 0, zeros(4096), a=zeros(4, 32, 4), target=target),
    "instructions.Warpgroup.wgmma":
        lambda target: group().wgmma(WGMMA, "d", 0, a="a", target=target).commit_group().wait_group(0).read("d")[0],
    "wmma_load": lambda target: tcemu.wmma_load(WMMA.format("load.a"), zeros(256), target=target),
    "wmma_store": lambda target: tcemu.wmma_store(WMMA.format("store.d"), zeros(256), zeros(32, 4), target=target),
    "wmma_mma": lambda target: tcemu.wmma_mma(
        "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32", zeros(32, 8), zeros(32, 8), zeros(32, 8), target=target
    ),
    "ldmatrix": lambda target: tcemu.ldmatrix("ldmatrix.sync.aligned.m8n8.x1.shared.b16", zeros(64), np.arange(32) % 8 * 16, target=target),
    "stmatrix": lambda target: tcemu.stmatrix(
        "stmatrix.sync.aligned.m8n8.x1.shared.b16", zeros(64), np.arange(32) % 8 * 16, zeros(32, 1), target=target
    ),
    "movmatrix": lambda target: tcemu.movmatrix("movmatrix.sync.aligned.m8n8.trans.b16", zeros(32, 1), target=target),
    "explain": lambda target: tcemu.explain(HALF, [1], [1], target=target).to_dict(),
    "explain, of several": lambda target: tcemu.explain(HALF, [1], [1], target=["sm_90a", target]).to_dict(),
    "fuzz.get_implementation": lambda target: facts(get_implementation(HALF, target)),
    "fuzz.get_implementation, changed": lambda target: facts(get_implementation(HALF, f"{target}:terms=8")),
    "fuzz.get_implementation, reference": lambda target: facts(get_implementation(HALF, f"reference:{target}")),
    "fuzz.get_implementation, another unit": lambda target: facts(get_implementation(HALF, f"{UNIT.get(target, target)}@tcgen05")),
    "fuzz.get_implementation, another toolkit": lambda target: facts(get_implementation(HALF, f"{target}@12.6")),
    "fuzz.emulator": lambda target: facts(tcemu.fuzz.emulator(parse(HALF), target)),
    "fuzz.Implementation": lambda target: facts(tcemu.fuzz.Implementation("mine", np.copy, target=target)),
    "study.expected_error": lambda target: tcemu.study.expected_error(ONES, ONES.T, 13.0, op=HALF, target=target),
    "study.surrogate": lambda target: tcemu.study.surrogate(ONES, ONES.T, 13.0, op=HALF, target=target),
    "ptx.run": lambda target: tcemu.ptx.run(KERNEL, grid=1, block=32, args=[zeros(32)], target=target)[0],
    "ptx.compile": lambda target: compile_kernel(target),
    "ptx.compare": lambda target: str(tcemu.ptx.compare(KERNEL, grid=1, block=32, args=[zeros(32)], targets=("sm_80", target))),
    "silicon.statement_kernel": lambda target: tcemu.silicon.statement_kernel(parse(HALF), target).text,
    "spelled": lambda target: verification.list_spellings(target, "mma"),
    "modelled": lambda target: verification.has_model(parse(HALF), target),
}  # fmt: skip
UNIT = {"H100": "B200", "sm_90a": "sm_100a"}  # where instructions are asked for that Hopper does not have


def compile_kernel(target: str) -> str:
    """The PTX of a source, or without NVRTC the message that names the target of a source that cannot be compiled."""
    try:
        return tcemu.ptx.compile('extern "C" __global__ void k(int* x) { *x = 1; }', target=target).text
    except tcemu.ptx.PtxError as error:
        return str(error)


def group() -> tcemu.instructions.Warpgroup:
    return tcemu.instructions.Warpgroup(zeros(4096), {"d": zeros(4, 32, 4), "a": zeros(4, 32, 4)}).fence()


def facts(one: tcemu.fuzz.Implementation) -> tuple:
    return one.name, one.target, one.identity


def taking_a_target() -> set[str]:
    """By its parameter `target`. That of `formats.convert` is a format; those of modules, launches and claims are a file's words."""
    found = {name: inspect.signature(value).parameters.get("target") for name, value in public_objects().items()}
    taking = {name for name, parameter in found.items() if parameter is not None and "Format" not in str(parameter.annotation)}
    return taking - {"ptx.Module", "ptx.RecordedLaunch", "study.Claim", "study.Quantity"}


def test_the_table_names_targets_that_are():
    assert set(tcemu.isa.gpus().values()) <= set(TARGETS)
    assert all(capability_target(*capability) in TARGETS for capability in GPU_NAMES)
    assert len(tcemu.isa.gpus()) == sum(len(products.names) for products in GPU_NAMES.values()) > 70
    numbered = {target.rstrip("af") for target in TARGETS}
    assert {capability_target(*capability).rstrip("a") for capability in GPU_NAMES} == numbered - {
        "sm_88"
    }  # of which no GPU is on the list


@pytest.mark.parametrize("gpu", tcemu.isa.gpus())
def test_every_gpu_has_its_target(gpu):
    """Written as anybody may write it, and never another GPU's."""
    target = tcemu.isa.gpus()[gpu]
    for written in (gpu, gpu.lower(), gpu.upper(), gpu.replace(" ", ""), gpu.replace(" ", "-"), f"NVIDIA {gpu}", f" {gpu} "):
        assert resolve_target(written) == target
    assert tcemu.isa.instructions(gpu) == tcemu.isa.instructions(target) != ()
    assert tcemu.list_models(gpu) == tcemu.list_models(target)
    assert (tcemu.list_models(gpu) == {}) == bool(TARGETS[target].public)


def test_what_people_write():
    assert {name: resolve_target(name) for name in KNOWN} == KNOWN
    assert {target: resolve_target(target) for target in TARGETS} == {target: target for target in TARGETS}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_name_of_several_targets_is_refused_with_them(name):
    with pytest.raises(Unsupported, match="say which") as caught:
        resolve_target(name)
    said = str(caught.value)
    assert [target for target in TARGETS if f"{target} (" in said] == list(SEVERAL[name]) and name in said


def test_the_error_names_the_gpus_that_are_meant():
    with pytest.raises(Unsupported, match=r"sm_75 \(Quadro RTX 6000\) or sm_89 \(RTX 6000 Ada\); say which"):
        resolve_target("rtx 6000")
    with pytest.raises(Unsupported, match=r"sm_80 \(A100, A30, A800\) or sm_86 \(A40, A10, A16, \.\.\.\) or"):
        resolve_target("Ampere")


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_is_helped(name):
    with pytest.raises(Unsupported, match=f"unknown target '{name}', did you mean .*{NEAR[name]}"):
        resolve_target(name)


@pytest.mark.parametrize("name", ["sm_107", "sm_107a", "sm_107f", "10.7", "compute_107a", "Rubin", "NVIDIA Vera Rubin"])
def test_products_of_a_target_whose_arithmetic_nobody_has_published_are_refused_with_what_is_public(name):
    with pytest.raises(NotModelled, match=rf"no evidence of what {name} computes.*ue5m3.*one sum"):
        tcemu.get_model("f16", name)


WITHOUT = {  # other accelerators, and what is said of them
    "P100": "P100 is older than Volta and has no tensor cores", "Tesla P100-PCIE-16GB": "older than Volta", "K80": "older than Volta",
    "M60": "older than Volta", "GTX 1080 Ti": "GTX 1080 Ti has no tensor cores", "GeForce GTX 1660": "has no tensor cores",
    "GeForce MX150": "has no tensor cores", "TITAN Xp": "older than Volta", "sm_60": "older than Volta", "6.1": "older than Volta",
    "compute_61": "older than Volta", "Pascal": "older than Volta",
    "MI430X": "MI430X is made by AMD", "AMD Instinct MI60": "made by AMD", "gfx906": "made by AMD", "RX 6800 XT": "made by AMD",
    "Gaudi2": "made by Intel", "TPU v5e": "made by Google", "M3 Max": "made by Apple", "Trainium2": "made by Amazon",
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_a_gpu_without_tensor_cores_is_named(name):
    with pytest.raises(Unsupported) as caught:
        resolve_target(name)
    said = str(caught.value)
    assert WITHOUT[name] in said and "NVIDIA GPUs from Volta (V100) on" in said and "did you mean" not in said


def test_the_names_come_before_the_list_of_targets():
    for name in ("H10O", "sm_91", "MI430X", "nothing"):
        with pytest.raises(Unsupported) as caught:
            resolve_target(name)
        said = str(caught.value)
        assert said.index("GPUs by name, such as H100 (tcemu list --gpus)") < said.index("sm_70, ") and said.endswith("sm_121a")


def test_names_that_came_and_went():
    with pytest.raises(Unsupported, match="sm_101 is sm_110 since PTX ISA"):
        resolve_target("sm_101")
    with pytest.raises(Unsupported) as caught:
        resolve_target("sm_91")
    assert "did you mean" not in str(caught.value)  # all targets stand in the message


def test_what_takes_a_target_is_here():
    """A new function that takes a target is found by its parameter, and must be in the table above."""
    assert taking_a_target() - {name.partition(",")[0] for name in TAKING} == set()
    assert len(taking_a_target()) > 25


@pytest.mark.parametrize("taking", sample_cases(TAKING, 3))
def test_a_gpu_by_name_is_its_target(taking):
    """Bit for bit, and word for word. That every function looks the name up, the test below shows of all."""
    by_name, by_target = (jax.tree.map(np.asarray, TAKING[taking](target)) for target in ("H100", "sm_90a"))
    assert jax.tree.structure(by_name) == jax.tree.structure(by_target)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(by_name), jax.tree.leaves(by_target), strict=True))


@pytest.mark.parametrize("taking", TAKING)
def test_an_unknown_target_raises_everywhere(taking):
    for target in UNKNOWN:
        with pytest.raises(Unsupported, match=r"unknown target .*; tcemu knows .* sm_70, "):
            TAKING[taking](target)
    with pytest.raises(Unsupported, match="say which"):
        TAKING[taking]("Blackwell")


def test_what_is_no_string_is_refused():
    for target in (90, None, b"sm_90a", ("sm_90a",)):
        with pytest.raises(TypeError, match="string such as"):
            resolve_target(target)  # type: ignore[arg-type]


# ---- the command line

COMMANDS = {  # each command that takes a target, with the name of a GPU in the place of T
    "check": f"check {HALF} --target T",
    "list": "list --target T --family mma",
    "list --evidence": "list --evidence --target T",
    "explain": f"explain {HALF} --a 1 --b 1 --target T",
    "explain of two": f"explain {HALF} --a 1 --b 1 --target A100 --target T",
    "fuzz": f"fuzz {HALF} --left T --right sm_80 --cases 8 --quiet",
    "fuzz of a family": "fuzz wgmma.sp --left sm_80 --right T --quiet --cases 1",
}


@pytest.mark.parametrize("command", sample_cases(list(COMMANDS)[:-1], list(COMMANDS)[:-2]))
def test_commands_take_gpus(command, capsys):
    printed = []
    for target in ("H100", "sm_90a"):
        main(COMMANDS[command].replace("T", target, 1).replace("T", target).split())
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_gemm_takes_a_gpu(tmp_path, capsys):
    np.save(tmp_path / "a.npy", ONES)
    np.save(tmp_path / "b.npy", ONES.T)
    words = ["gemm", str(tmp_path / "a.npy"), str(tmp_path / "b.npy"), "--op", HALF, "--target"]
    assert main([*words, "NVIDIA A100-SXM4-80GB"]) == 0
    assert f"{HALF} on sm_80\n" in capsys.readouterr().out
    assert main([*words, "A1OO"]) == 2
    assert "tcemu gemm: unknown target 'A1OO', did you mean A100" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_what_is_no_target(command, capsys):
    assert main(COMMANDS[command].replace("T", "H10O").split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and "unknown target 'H10O', did you mean H100" in err and err.count("\n") == 1
    assert main(COMMANDS[command].replace("T", "Ampere").split()) == 2
    assert "sm_80 (A100, A30, A800) or sm_86" in capsys.readouterr().err


def test_the_gpus_are_listed(capsys):
    assert main(["list", "--gpus"]) == 0
    out = capsys.readouterr().out
    assert all(" ".join(gpu.split()) in " ".join(out.split()) for gpu in tcemu.isa.gpus())
    assert out.startswith("sm_70    Volta      V100, Quadro GV100, TITAN V, V100S\n") and max(map(len, out.splitlines())) <= 118
    assert main(["list", "--gpus", "--target", "H100"]) == 2
