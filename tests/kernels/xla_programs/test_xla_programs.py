"""`tcemu.xla`: what XLA compiled on an NVIDIA H200 gives the words that it gave there, and what has no rule is refused by name."""

import importlib.util
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.profiler import ProfileData

import tcemu.xla
from tcemu.base.errors import NotModelled
from tcemu.kernels.xla.element_moves import evaluate_movement
from tcemu.kernels.xla.hlo_text import DTYPES, ArrayShape, Slice, Thunk, parse_buffers, parse_literal, parse_module, parse_thunks
from tcemu.kernels.xla.tile_maps import find_tiles, tile_map
from tcemu.operations.functional.torch_cuda.product_kernels import Launch, TorchProduct, order_of_kernels

TESTS = Path(__file__).parents[2]
RECORDED = TESTS / "golden" / "xla_h200.tar.xz"
spec = importlib.util.spec_from_file_location("recorded_xla_programs", TESTS / "gpu_runs" / "xla_programs.py")
xla_programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(xla_programs)
GROUPS = {name: {case: operands for case, _, operands in group()} for name, group in xla_programs.GROUPS.items()}
CASES = GROUPS["functions"]
USUAL = ("adam_step", "embedded", "recurrent_bf16")
WHOLE = ("block_bf16_16x64", "gated_f16", "logsumexp_f32", "variance_bf16")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of XLA's dumps and of a profile, and the words."""
    folder = tmp_path_factory.mktemp("xla")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    (folder / "vm.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace((folder / "profile.pbtxt").read_text()))
    return folder, np.load(folder / "words.npz")


def count_wrong(recorded, name, operands, **settings):
    """The words of each result that differ, of those that are kept, and the report."""
    folder, words = recorded
    (program,) = tcemu.xla.read(folder / name, target="H200", **settings)
    result, report = program.run(*jax.tree.leaves(operands))
    wrong = []
    for number, leaf in enumerate(jax.tree.leaves(result)):
        found, wanted = xla_programs.words(leaf), words[f"{name}.{number}"]
        found = found if found.size == wanted.size else found[:: max(1, -(-found.size // 600)) | 1]
        wrong.append(int((found != wanted).sum()))
    return wrong, report


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=pytest.mark.full) for name in WHOLE)])
def test_a_program_of_the_gpu(recorded, name):
    """Its inputs alone are given: 0 words of any result differ."""
    wrong, report = count_wrong(recorded, f"default.{name}", CASES[name])
    assert not any(wrong), wrong
    assert all(step.kernel or step.grid == () for step in report.steps)
    # sums of floats that atomics add have no order of their own
    doubts = {doubt for step in report.steps for doubt in step.inexact}
    assert doubts == ({"atom.add of floats: the order of the threads is open"} if name == "embedded" else set()), doubts


@pytest.mark.parametrize("name", ["int8_16x16x16", "nn_bf16_37x256x96"])
def test_tensor_maps(recorded, name):
    """XLA's dump does not have them."""
    wrong, report = count_wrong(recorded, f"maps.{name}", GROUPS["products"][name])
    assert wrong == [0] and {record["bits"] for record in report.records()} == {"exact"}


LIBRARY = (
    "gelu_f32_100x328x200", "gelu_bf16_100x328x200", "relu_f16_100x328x200", "added_bf16_100x328x200", "turned_f32_100x328x200",
    "to_f32_bf16_64x8192x64", "nn_f16_5x33x100x48", "int8_96x160x64",
)  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY)
def test_products_of_cublaslt(recorded, name):
    wrong, report = count_wrong(recorded, f"libraries.{name}", GROUPS["held"][name], profile=recorded[0])
    assert wrong == [0]
    assert any(step.threads and step.grid for step in report.steps)


def test_a_product_of_cublaslt_without_a_profile(recorded):
    with pytest.raises(NotModelled, match=r"100 x 328 x 200 .* in float32: .* number \d+ of its algorithm.*jax\.profiler\.trace.*profile="):
        count_wrong(recorded, f"libraries.{LIBRARY[0]}", GROUPS["held"][LIBRARY[0]])
    assert count_wrong(recorded, "libraries.int8_96x160x64", GROUPS["held"]["int8_96x160x64"])[0] == [0]
    with pytest.raises(FileNotFoundError, match="xplane"):
        tcemu.xla.read(recorded[0] / f"libraries.{LIBRARY[0]}", target="H200", profile=recorded[0] / "untimed.found_places")


@pytest.mark.parametrize(
    ("name", "grid", "slices"),
    [
        ("cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4", (8, 2, 4), 4),
        (
            "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x128x32_execute_segment_k_off_kernel__5x_cublas",
            (64, 2, 1),
            1,
        ),
        (
            "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize32x32x64_stage3_execute_kernel__5x_cublas",
            (7, 3, 1),
            1,
        ),
    ],
)
def test_kernels_of_tf32_by_name(name, grid, slices):
    recipe = order_of_kernels([Launch(name, grid, (128, 1, 1))], TorchProduct("float32", 128, 768, 768)).recipe
    assert str(recipe.a) == "tf32" and recipe.unit.op.k == 8 and len(recipe.slices.edges) == slices + 1
    if name.startswith("sm80"):
        with pytest.raises(NotModelled, match="cuts K, for which no order was seen"):
            order_of_kernels([Launch(name, (7, 3, 2))], TorchProduct("float32", 128, 768, 768))


def test_attention_by_cudnn_and_its_gradient(recorded):
    name = "attention_gradient_bf16"
    assert count_wrong(recorded, f"untimed_libraries.{name}", GROUPS["held"][name])[0] == [0, 0, 0]


def test_a_slice_that_is_copied(recorded):
    """The runtime copies it from its own place: the counts of jnp.histogram."""
    assert not any(count_wrong(recorded, "untimed.found_places", GROUPS["more"]["found_places"])[0])


def test_products_of_int8_that_xla_doubles(recorded):
    """As the H200 gave them."""
    operands = GROUPS["products"]["int8_16x16x16"]
    with pytest.warns(UserWarning, match="XLA takes 16 elements of K .* every result is doubled"):
        wrong, report = count_wrong(recorded, "untimed.int8_16x16x16", operands)
    assert wrong == [0] and "exact; XLA takes 16 elements" in report.records()[0]["bits"]
    x, y = (operand.astype(np.int32) for operand in operands)
    assert np.array_equal(recorded[1]["untimed.int8_16x16x16.0"].view(np.int32), (2 * x @ y).reshape(-1))


def test_the_report_and_each_step(recorded):
    folder, words = recorded
    (program,) = tcemu.xla.read(folder / "default.adam_step", target="H200")
    seen = []
    result, report = program.run(*jax.tree.leaves(CASES["adam_step"]), watch=lambda step, results: seen.append((step, results)))
    assert [step for step, _ in seen] == list(report.steps)
    last, results = seen[-1]
    assert any(np.array_equal(xla_programs.words(x), words["default.adam_step.0"]) for x in results)
    assert f"Steps of {program.name} on sm_90a" in str(report) and last.kernel in str(report)
    assert report.records()[-1]["bits"] == "exact"
    assert len(result) == 3


def test_operands_of_another_type_are_refused(recorded):
    (program,) = tcemu.xla.read(recorded[0] / "default.adam_step", target="H200")
    with pytest.raises(ValueError, match=r"got float64\[2\]; it was compiled for float32\[300, 7\], "):
        program.run(np.zeros(2))


def test_a_folder_without_a_dump(tmp_path, recorded):
    with pytest.raises(FileNotFoundError, match="--xla_dump_to="):
        tcemu.xla.read(tmp_path, target="H200")
    source = next((recorded[0] / "default.adam_step").glob("*_gpu_after_optimizations.txt"))
    (tmp_path / source.name).write_text(source.read_text())
    with pytest.raises(FileNotFoundError, match=r"thunk_sequence\.txt, .*thunk_metadata\.txt, .*buffer-assignment\.txt is not there"):
        tcemu.xla.read(tmp_path, target="H200")


# ---- programs written here

HEAD = "HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2]{0})->f32[2]{0}}\n\n"
LOOP = f"""{HEAD}%condition (s.1: (s32[], f32[2])) -> pred[] {{
  %s.1 = (s32[], f32[2]{{0}}) parameter(0)
  ROOT %less = pred[] custom-call(%s.1#0), custom_call_target="less"
}}

ENTRY %main (x: f32[2]) -> f32[2] {{
  %x = f32[2]{{0}} parameter(0), metadata={{op_name="x"}}
  ROOT %y = f32[2]{{0}} custom-call(%x), custom_call_target="__cublas$gemm", metadata={{op_name="jit(f)/dot"}}
}}
"""
BUFFERS = """BufferAssignment:
allocation 0: size 8, page 0, parameter 0, shape |f32[2]| at ShapeIndex {}:
 value: <1 x @0> (size=8,offset=0): f32[2]{0}
allocation 1: size 300, page 0, maybe-live-out:
 value: <2 y{1,0} (phi) @0> (size=8,offset=256): f32[2]{0}
 value: <3 y @0> (size=8,offset=0): f32[2]{0}
allocation 2: size 4, page 0, thread-local:
 value: <4 inner @0> (size=4,offset=0): f32[]
"""


def program_of(text=LOOP, kind="kGemm"):
    return tcemu.xla.XlaProgram(parse_module(text), BUFFERS, {"y": [Thunk(1, kind)]}, (), "H200")


def test_what_has_no_rule_is_named():
    x = np.zeros(2, np.float32)
    with pytest.raises(NotModelled, match=r"jit_f: y calls the library function __cublas\$gemm, which has no rule in tcemu\.xla"):
        program_of().run(x)
    with pytest.raises(NotModelled, match="the runtime's steps do not name z, which is a fft"):
        program_of(LOOP.replace("%y = ", "%z = ").replace("custom-call(%x)", "fft(%x)")).run(x)
    with pytest.raises(NotModelled, match="the dump has no PTX of gemm_1: make it with --xla_dump_emitter_re=ptx"):
        program_of().ptx_module("gemm_1")
    with pytest.raises(NotModelled, match="is_scheduled=true"):
        parse_module(LOOP.replace("is_scheduled=true", "is_scheduled=false"))


def test_copies_and_fills():
    x = np.array([1.5, -2], np.float32)
    assert np.array_equal(program_of(kind="kCopy").run(x)[0], x)
    assert np.array_equal(program_of(kind="kMemzero").run(x)[0], np.zeros(2, np.float32))


def test_buffers_and_thunks():
    sizes, places = parse_buffers(BUFFERS)
    assert sizes == {0: 8, 1: 300}
    assert places == {("x", ()): Slice(0, 0, 8), ("y", (1, 0)): Slice(1, 256, 8), ("y", ()): Slice(1, 0, 8)}
    sequence = (
        "001: kCustomKernel [source | next=002 (1)] sort_6_1 grid: [8, 1, 1] threads: [64, 1, 1]  shared_memory: 24 bytes\n"
        "    002: kCopy [prev=001 (1) | sink ] kCopy\n"
    )
    named = 'thunk_info {\n    profile_annotation: "%s"\n    thunk_id: %d\n  }\n'
    assert parse_thunks(sequence, named % ("fusion.1", 2) + named % ("fusion.1", 1) + named % ("gone", 7)) == {
        "fusion.1": [Thunk(1, "kCustomKernel", "sort_6_1", (8, 1, 1), (64, 1, 1), None, 24), Thunk(2, "kCopy")]
    }


def test_instructions():
    text = HEAD + (
        "ENTRY %main.3 (x.1: f32[4,2]) -> (f32[4,2], s32[]) {\n"
        "  %x.1 = f32[4,2]{0,1} parameter(0), sharding={mesh[], [{}, {}]}\n"
        "  %f = (f32[4,2]{1,0:T(8)}, (s32[], /*index=1*/bf16[])) fusion(%x.1, /*index=1*/%x.1#2#0), "
        'calls=%a.b, metadata={op_name="w[\\"a\\"](1)"}\n'
        "  ROOT %t = (f32[4,2]{1,0}, s32[]) tuple(%f#0, %f#1#0)\n}\n"
    )
    module = parse_module(text)
    x, fused, root = module.computations["main.3"]
    assert (module.name, module.entry, x.shape) == ("jit_f", "main.3", ArrayShape(np.dtype(np.float32), (4, 2), (1, 0)))
    assert fused.operands == (("x.1", ()), ("x.1", (2, 0))) and fused.attribute("calls") == "a.b" and not fused.attribute("body")
    assert fused.shape[1][1].dtype == ml_dtypes.bfloat16 and root.is_root and root.operands == (("f", (0,)), ("f", (1, 0)))
    array = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert x.shape.to_bytes(array).view(np.float32).tolist() == array.T.reshape(-1).tolist()
    assert np.array_equal(x.shape.from_bytes(x.shape.to_bytes(array)), array)


@pytest.mark.parametrize(
    ("dtype", "text", "wanted"),
    [
        ("f32", "-inf", -np.inf), ("pred", "{true, false, true}", [True, False, True]), 
        ("s32", "{ { 1, -2 }, { 3, 4 } }", [[1, -2], [3, 4]]),
        ("bf16", "1e-3", ml_dtypes.bfloat16(1e-3)), ("c64", "{(1, -2), (0.5, 3)}", [1 - 2j, 0.5 + 3j]), ("u8", "{/*i0=0*/ 7, 8}", [7, 8]),
    ],
)  # fmt: skip
def test_constants(dtype, text, wanted):
    wanted = np.array(wanted, DTYPES[dtype])
    found = parse_literal(ArrayShape(np.dtype(DTYPES[dtype]), wanted.shape, tuple(range(wanted.ndim))), text)
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("dtype", "text", "codes"),
    [
        ("f32", "{nan(0x400001), -nan, nan(0x1), -nan(0x1), -0}", [0x7FC00001, 0xFFC00000, 0x7F800001, 0xFF800001, 1 << 31]),
        ("bf16", "{nan(0x1), 1}", [0x7F81, 0x3F80]), ("f8e5m2", "{-nan(0x1), inf}", [0xFD, 0x7C]), ("f8e4m3fn", "{nan, -2}", [0x7F, 0xC0]),
        ("c64", "{(nan(0x1), -0), (2, -inf)}", [0x800000007F800001, 0xFF80000040000000]), ("f32", "{}", []),
    ],
)  # fmt: skip
def test_the_codes_of_constants(dtype, text, codes):
    """XLA writes the fraction of a NaN that is not the usual one."""
    kind = np.dtype(DTYPES[dtype])
    found = parse_literal(ArrayShape(kind, (len(codes),), (0,)), text)
    assert found.dtype == kind and found.view(f"u{kind.itemsize}").tolist() == codes


def test_a_constant_that_the_dump_leaves_out():
    with pytest.raises(NotModelled, match="--xla_dump_large_constants"):
        parse_literal(ArrayShape(np.dtype(np.float32), (100,), (0,)), "{...}")


MOVED = HEAD + (
    "ENTRY %main (x: f32[3,4], i: s32[], u: f32[1,4]) -> f32[3,4] {\n"
    "  %x = f32[3,4]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n  %u = f32[1,4]{1,0} parameter(2)\n"
    "  %two = s32[] constant(2)\n  %zero = s32[] constant(0)\n  %j = s32[] subtract(%two, %i)\n"
    "  %less = pred[] compare(%j, %zero), direction=LT\n  %k = s32[] select(%less, %zero, %j)\n"
    "  %row = f32[1,4]{1,0} dynamic-slice(%x, %k, %zero), dynamic_slice_sizes={1,4}\n"
    "  %turned = f32[4,1]{0,1} bitcast(%row)\n  %back = f32[1,4]{1,0} bitcast(%turned)\n"
    "  ROOT %y = f32[3,4]{1,0} dynamic-update-slice(%x, %back, %i, %zero)\n}\n"
)


@pytest.mark.parametrize("i", [-5, 0, 1, 2, 9])
def test_moved_elements(i):
    """As JAX on this CPU, with starts that are clamped."""
    x, u = np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((1, 4), np.float32)
    body = parse_module(MOVED).computations["main"]
    k = max(2 - i, 0)
    wanted = jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, (k, 0), (1, 4)), (jnp.int32(i), jnp.int32(0)))
    assert np.array_equal(evaluate_movement("f", body, [x, np.int32(i), u]), wanted)


def test_a_copy_that_computes_is_refused():
    body = parse_module(MOVED.replace("dynamic-update-slice(%x, %back, %i, %zero)", "exponential(%x)")).computations["main"]
    with pytest.raises(NotModelled, match="f: y: exponential within a copy of elements"):
        evaluate_movement("f", body, [np.zeros((3, 4), np.float32), np.int32(0), np.zeros((1, 4), np.float32)])


# ---- tiles

FUSED = HEAD + (
    "%fused (p: bf16[8,6,32], q: bf16[16,32,8], r: f32[5,96,48]) -> f32[6,8,16] {\n"
    "  %p = bf16[8,6,32]{2,1,0} parameter(0)\n  %q = bf16[16,32,8]{1,0,2} parameter(1)\n"
    "  %turned = bf16[8,32,16]{1,2,0} transpose(%q), dimensions={2,1,0}\n"
    "  %dot = f32[8,6,16]{2,1,0} dot(%p, %turned), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
    'rhs_contracting_dims={1}, backend_config={"sizes":["16"]}\n'
    "  %back = f32[6,8,16]{2,1,0} transpose(%dot), dimensions={1,0,2}\n"
    "  %r = f32[5,48,16]{2,1,0} parameter(2)\n  %zero = f32[] constant(0)\n"
    "  %sum = f32[48,16]{1,0} reduce(%r, %zero), dimensions={0}, to_apply=%add\n"
    "  %rows = f32[6,8,16]{2,1,0} bitcast(%sum)\n"
    "  ROOT %y = f32[6,8,16]{2,1,0} add(%back, %rows)\n}\n"
)


def test_tiles_of_what_a_fusion_reads():
    body = parse_module(FUSED).computations["fused"]
    config = {"fusion_backend_config": {"block_level_fusion_config": {"output_tiles": [{"sizes": ["2", "8", "16"]}]}}}
    tiles = find_tiles(body, config)
    assert tiles["p"] == (8, 2, 16) and tiles["q"] == (16, 16, 8) and tiles["r"] == (5, 16, 16) and tiles["y"] == (2, 8, 16)
    config["fusion_backend_config"]["block_level_fusion_config"]["output_tiles"][0]["sizes"] = ["4", "2", "16"]
    tiles = find_tiles(body, config)  # 2 of 8 rows, of 4 of 6: no interval of the 48
    assert tiles["p"] == (2, 4, 16) and "r" not in tiles and "sum" not in tiles
    assert find_tiles(body, {}) == {}


@pytest.mark.parametrize(
    ("sizes", "order", "dtype", "tile", "box", "swizzle"),
    [
        ((128, 4, 64), (0, 1, 2), "bf16", (64, 1, 64), [64, 1, 64], 128), ((64, 4, 320), (2, 1, 0), "bf16", (32, 1, 16), [32, 1, 16], 64),
        ((4, 128, 320), (0, 1, 2), "f32", (1, 16, 256), [32, 16, 1], 128), ((4, 64, 320), (0, 1, 2), "bf16", (1, 16, 8), [8, 16, 1], 0),
        ((64, 320, 4), (2, 0, 1), "f8e4m3fn", (64, 64, 1), [64, 64, 1], 64), ((128,), (0,), "f32", (64,), [64], 0),
        ((5, 48, 16), (0, 1, 2), "f32", (5, 1, 16), [16, 1, 8], 64),
    ],
)  # fmt: skip
def test_the_map_of_a_tile(sizes, order, dtype, tile, box, swizzle):
    """As the descriptors that XLA's compiler prints, but for the last two, whose kernels an H200 ran."""
    shape = ArrayShape(np.dtype(DTYPES[dtype]), sizes, order)
    found = tile_map(shape, tile, np.zeros(shape.nbytes, np.uint8), 0)
    assert (list(found.box_dims), found.swizzle) == (box, swizzle)
    assert list(found.global_dims) == [sizes[axis] for axis in reversed(order)] and found.dtype == f"u{8 * shape.dtype.itemsize}"


def test_a_tile_that_the_dump_does_not_tell(recorded):
    folder, _ = recorded
    (program,) = tcemu.xla.read(folder / "maps.int8_16x16x16", target="H200")
    entry = program.module.computations[program.module.entry]
    replaced = tuple(each._replace(attributes=each.attributes.replace("output_tiles", "none")) for each in entry)
    program.module = program.module._replace(computations={**program.module.computations, program.module.entry: replaced})
    with pytest.raises(NotModelled, match=r"tensor map of its operand 0, whose tile the dump does not tell: .*autotune_level=0"):
        program.run(*GROUPS["products"]["int8_16x16x16"])


# ---- compiling, where JAX has its CUDA plugin


def test_a_gpu_without_a_description():
    with pytest.raises(NotModelled, match=r"gpu='A100': tcemu\.xla describes H100 and H200\. Give .*gpu_target_config"):
        tcemu.xla.compile(jnp.sin, np.zeros(2, np.float32), gpu="A100")


def test_a_function_without_a_gpu(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX's CUDA plugin is not installed: the extra `xla`")
    emulated = tcemu.xla.emulate(lambda x, w: {"y": jnp.tanh(x) * w, "n": x.sum()}, gpu="H200")
    x = np.linspace(-3, 3, 64, dtype=np.float32)
    with pytest.raises(ValueError, match="not called yet"):
        emulated.report()
    found = emulated(x, np.float32(2))
    assert np.allclose(found["y"], np.tanh(x) * 2, rtol=1e-6) and abs(found["n"] - x.sum()) < 1e-5
    assert emulated(x[::-1], np.float32(2))["y"].tobytes() == np.ascontiguousarray(found["y"][::-1]).tobytes()
    assert len(emulated.programs) == 1 and {record["bits"] for record in emulated.report().records()} == {"exact"}
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="nothing is overwritten"):
        tcemu.xla.compile(jnp.sin, x, gpu="H200", folder=tmp_path)


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (lambda: (jnp.arange(7) * 3, None), ()), (lambda x, n: x * n, (np.arange(5, dtype=np.int8), 3)),
        (lambda x, n: x * n, (np.arange(5).astype(ml_dtypes.bfloat16), 2.0)), (lambda x: x + 1, (np.arange(5),)),
        (lambda x, y: x * y, (np.arange(4.0), np.float64(0.5))), (lambda key: jax.random.bits(key, (3,)), (jax.random.key(5),)),
        (lambda x: jax.lax.bitcast_convert_type(jnp.where(x > 0, np.uint32([0x7FC00001, 0xFF800001]).view(np.float32), 1), jnp.int32),
         (np.int32([1, 1]),)),
    ],
)  # fmt: skip
def test_arguments_are_those_of_jit(function, operands):
    """Python's numbers take the dtype of what they meet, 64 bits become 32, and a function may have no arguments: as `jax.jit`."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX's CUDA plugin is not installed: the extra `xla`")
    emulated = tcemu.xla.emulate(function, gpu="H200")
    found, wanted = emulated(*operands), jax.jit(function)(*operands)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)


def test_what_cannot_be_compiled_is_named():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX's CUDA plugin is not installed: the extra `xla`")
    with pytest.raises(NotModelled, match="calls of Python"):
        tcemu.xla.compile(lambda x: jax.pure_callback(np.sin, x, x), np.ones((16, 16), np.int8), gpu="H200")


def test_emulate_at_the_root():
    """It takes a policy, or a GPU."""
    emulated = tcemu.emulate(jnp.sin, gpu="H100", options={"xla_gpu_autotune_level": 0})
    assert isinstance(emulated, tcemu.xla.Emulated) and emulated.settings["gpu"] == "H100"
    assert tcemu.emulate(lambda x: x + 1, None)(np.float32(1)) == 2
    for arguments, settings, message in (
        ((), {}, "got neither"), (("bf16",), {"gpu": "H100"}, "gpu='H100' with policy"), (("bf16",), {"checked": True}, "checked"),
        ((), {"gpu": "H100", "rows": "x"}, "with rows"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"a policy, .* or a GPU, .*{message}"):
            tcemu.emulate(jnp.sin, *arguments, **settings)
    with pytest.raises(TypeError, match="takes a JAX function"):
        tcemu.emulate("bf16", gpu="H100")


def test_settings_have_programs_of_their_own():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX's CUDA plugin is not installed: the extra `xla`")
    emulated = tcemu.xla.emulate(lambda x: x * 2, gpu="H200")
    assert emulated(np.arange(3.0)).dtype == np.float32
    with jax.enable_x64(True):
        assert emulated(np.arange(3.0)).dtype == np.float64
    assert emulated(np.float32(1)).dtype == np.float32 and len(emulated.programs) == 3


def test_without_the_plugin(monkeypatch):
    from jax.experimental import topologies

    def refuse(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    monkeypatch.setattr("tcemu.kernels.xla.compilation.PLUGINS", ("none",))
    with pytest.raises(NotModelled, match=r"pip install --no-deps jax-cuda13-plugin=="):
        tcemu.xla.compile(jnp.sin, np.zeros(2, np.float32), gpu="H200")
