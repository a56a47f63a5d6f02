"""`tcemu.torch.emulate(model, gpu=...)`: every operation as PyTorch computes it on a GPU."""

import contextlib
import hashlib
import importlib.util
import json
import lzma
import re
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.sampling import sample_cases
from support.torch_helpers import MISSING, torch

import tcemu
from tcemu.base.errors import NotModelled
from tcemu.drift import identify, predict, record
from tcemu.operations.functional.torch_cuda.distributions import held_limits
from tcemu.operations.functional.torch_cuda.random_numbers import dropout_mask, uniform_numbers
from tcemu.uses.drift.prediction import recorded_kernels
from tcemu.uses.drift.records import read_record
from tcemu.uses.replay.aten_operations import EXACT, OPERATIONS, parse_arguments

pytestmark = pytest.mark.skipif(torch is None, reason=MISSING)
ROOT = Path(__file__).parents[3]
OTHER_NAMES = {
    "scalar",
    "scalars",
    "tensors1",
    "weights",
    "p",
    "correction",
    "unbiased",
    "from",
    "to",
}  # of overloads that the rows take by position


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/gpu_runs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def step():
    """The script that records a training step on a GPU."""
    return load_script("torch_training_step")


def small_model(name="bfloat16"):
    dtype = getattr(torch, name)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
    return model.to(dtype), torch.randn(8, 16).to(dtype)


@pytest.mark.parametrize("dtype", sample_cases(["bfloat16", "float16"], ["bfloat16"]))
def test_a_forward_a_backward_and_a_step_are_known(dtype):
    model, x = small_model(dtype)
    before = x.clone(), [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with tcemu.torch.emulate(model, gpu="H100") as emulated:
        y = emulated(x)
        torch.nn.functional.cross_entropy(y.float(), torch.arange(8)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report = emulated.report()
    assert y.dtype == x.dtype and torch.equal(x, before[0])
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before[1], strict=True))
    assert report.counts()["not known"] == 0 and not report.unknown
    lines = {(line.operator, line.path, line.backward) for line in report}
    assert {("aten.addmm", "0", False), ("aten.gelu", "1", False), ("aten.native_layer_norm", "2", False)} <= lines
    assert ("aten.native_layer_norm_backward", "2", True) in lines and ("aten._foreach_addcdiv_", "", False) in lines
    expected = small_model(dtype)[0](x)
    assert torch.allclose(y.float(), expected.float(), atol=0.05)


def test_no_grad_and_a_call_outside_of_the_block():
    model, x = small_model()
    emulated = tcemu.torch.emulate(model, gpu="H200")
    with torch.no_grad():
        first = emulated(x)
    with emulated, torch.no_grad():
        assert torch.equal(first, emulated(x))
    assert {line.runs % 2 for line in emulated.report() if line.status != "exact"} == {0}


def test_autocast_has_the_list_of_a_gpu():
    model, x = small_model("float32")
    with tcemu.torch.emulate(model, gpu="H100") as emulated, torch.autocast("cpu", torch.bfloat16):
        emulated(x)
    operands = {line.operator: line.operands for line in emulated.report()}
    assert operands["aten.addmm"].startswith("bfloat16") and operands["aten.native_layer_norm"].startswith("float32")


def test_autocast_lowers_the_operands_of_attention():
    """Rotary embedding in float32 leaves queries and keys of another dtype than values; a float32 mask is lowered too."""
    q, v = torch.randn(1, 2, 16, 64), torch.randn(1, 2, 16, 64).bfloat16()
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100") as emulated, torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.scaled_dot_product_attention(q, q, v)
        masked = torch.nn.functional.scaled_dot_product_attention(q, q, v, attn_mask=torch.zeros(16, 16))
    names = [line.operator for line in emulated.report()]
    assert y.dtype == masked.dtype == torch.bfloat16 and "aten._scaled_dot_product_cudnn_attention" in names
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"):
        expected = torch.nn.functional.scaled_dot_product_attention(q.bfloat16(), q.bfloat16(), v)
    assert torch.equal(y, expected)


def test_the_order_of_a_sum_is_the_gpus():
    x = (np.random.default_rng(0).standard_normal(4096) * 100).astype(np.float32)
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"):
        total = torch.from_numpy(x).sum()
    from tcemu.operations.functional.torch_cuda.rows import reduce

    assert total.numpy() == np.asarray(reduce("sum", x, None))


def test_counts_of_bins_are_those_of_the_gpus_formula():
    """A count of experts, and floats whose bin f32 rounding decides; with bounds from the data the GPU's bins are not known."""
    experts = torch.tensor([0, 3, 3, 1, 7, 7, 7], dtype=torch.float32)
    x = torch.tensor([0.1, 0.7, 0.7000001, 0.3, -0.2, 1.2, 1.0, float("nan")])
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100") as emulated:
        counts, others = torch.histc(experts, 8, 0, 7), torch.histc(x, 10, 0, 1)
        with pytest.raises(NotModelled, match="min < max"):
            torch.histc(x, 10)
    assert counts.tolist() == [1, 1, 0, 2, 0, 0, 0, 3] and emulated.report().counts()["not known"] == 0
    bins = [min(int(np.float32(v) * np.float32(10) / np.float32(1)), 9) for v in (0.1, 0.7, 0.7000001, 0.3, 1.0)]
    assert others.tolist() == np.bincount(bins, minlength=10).tolist()


def test_optimizers_of_other_threads_keep_their_defaults():
    """Two blocks, of which the first one opened closes first, and a thread without a block."""
    devices = torch.utils._foreach_utils._get_foreach_kernels_supported_devices
    read = lambda: "cpu" in torch.utils._foreach_utils._get_foreach_kernels_supported_devices()
    first_open, second_open, first_closed, seen = threading.Event(), threading.Event(), threading.Event(), {}

    def first():
        with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"):
            first_open.set()
            second_open.wait(60)
            seen["first"] = read()
        first_closed.set()

    def second():
        first_open.wait(60)
        with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"):
            second_open.set()
            first_closed.wait(60)
            seen["second"] = read()

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    first_open.wait(60)
    seen["without"] = read()
    for thread in threads:
        thread.join()
    assert seen == {"first": True, "second": True, "without": False}
    assert torch.utils._foreach_utils._get_foreach_kernels_supported_devices is devices


@pytest.mark.parametrize(("start", "unknown"), [(0, "raise"), (1, "leave")])
def test_rms_norm_and_its_gradients_are_the_operators_of_a_gpu(start, unknown):
    """An operand that begins at an odd element has no rule."""
    x, norm, found = torch.randn(41)[start : start + 40].reshape(5, 8).requires_grad_(), torch.nn.RMSNorm(8), []
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
    emulated = tcemu.torch.emulate(norm, gpu="H200", unknown=unknown)
    for run in (emulated, norm):
        with emulated if run is emulated else contextlib.nullcontext():
            found.append(torch.autograd.grad(run(x).square().sum(), (x, norm.weight)))
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(*found, strict=True))
    statuses = {line.operator: line.status for line in emulated.report()}
    assert {statuses[f"aten._fused_rms_norm{end}"] for end in ("", "_backward")} == {"not known" if start else "by rule"}
    assert "aten.rsqrt" not in statuses


# ---- special values


@pytest.fixture(scope="module")
def special():
    """The script that records special values on a GPU, and what an H200 gave."""
    module = load_script("special_values")
    return module, json.loads(lzma.open(ROOT / "tests/golden/torch_special_values.json.xz").read())["cases"]


SPECIAL_UNKNOWN = (
    r"(sgn|round|frac|fmax|fmin) of specials|selu of codes|logsigmoid of codes|logsumexp|lerp tensor|histc|sum gaps|sum expanded|linspace|"
    "logspace|hann|arange|int (topk ties|sort ties|median|kthvalue)"
)


def assert_special_values(special, chosen):
    module, recorded = special
    wrong, unknown = [], []
    for name, fn, operands in module.cases():
        if not re.search(chosen, name):
            continue
        try:
            with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = fn(*operands)
        except NotModelled:
            unknown.append(name)
            continue
        if module.digests(found) != recorded[name]:
            wrong.append(name)
    assert not wrong and all(re.search(SPECIAL_UNKNOWN, name) for name in unknown)


def test_special_values_are_an_h200s(special):
    assert_special_values(
        special,
        r"bf16 (pow (0.501|2.003|0.5)|rsub 0.1 alpha 0.3|remainder 0.7|relu of|maximum|minimum|clamp|to torch|am(ax|in) of zeros|mm)|"
        r"f32 (rms_norm|sum \(|log_softmax \(5)|int (over|exp|to the|times)|0.3 to the int",
    )


@pytest.mark.full
@pytest.mark.parametrize("chosen", ["^bf16", "^f16", "^f32", "^(?!bf16|f16|f32)"])
def test_all_special_values_are_an_h200s(special, chosen):
    assert_special_values(special, chosen)


# ---- what is not known


def test_an_unknown_operation_raises_warns_or_is_left():
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.erfinv(x)

    model, x = Model(), torch.rand(3)
    with tcemu.torch.emulate(model, gpu="H100") as emulated, pytest.raises(NotModelled, match=r"erfinv of float32\[3\].*unknown='warn'"):
        emulated(x)
    with tcemu.torch.emulate(model, gpu="H100", unknown="warn") as emulated, pytest.warns(UserWarning, match="erfinv has no rule"):
        emulated(x)
    with tcemu.torch.emulate(model, gpu="H100", unknown="leave") as emulated, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(emulated(x), torch.erfinv(x))
    report = emulated.report()
    assert report[0].status == "not known" and report[0].operator == "aten.erfinv" and "tcemu.drift.record" in str(report)


ONE_KERNEL = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "TransformerEncoderLayer"]


@pytest.mark.parametrize("name", sample_cases(ONE_KERNEL, ["LSTM", "GRUCell", "TransformerEncoderLayer"]))
def test_layers_that_are_one_kernel_on_a_gpu_are_not_known(name):
    """A CPU calls products and activations, which have rules. Source: the operators that PyTorch 2.11 dispatches on an H200."""
    attends = name in ("MultiheadAttention", "TransformerEncoderLayer")
    layer, x = getattr(torch.nn, name)(8, 2, **({"batch_first": True} if attends else {})).eval(), torch.randn(3, 8)
    operands = (x[None],) * (3 if name == "MultiheadAttention" else 1) if attends else (x,)
    others = {"RNN": "torch.rnn_tanh", "GRUCell": "torch.gru_cell", "LSTMCell": "torch.lstm_cell"}
    operator = "aten._native_multi_head_attention" if attends else others.get(name, f"torch.{name.lower()}")
    with tcemu.torch.emulate(layer, gpu="H200") as emulated, torch.no_grad(), pytest.raises(NotModelled, match=f"{operator} of float32"):
        emulated(*operands)
    with tcemu.torch.emulate(layer, gpu="H200", unknown="leave") as emulated, torch.no_grad():
        left = emulated(*operands)
    assert [line.operator for line in emulated.report().unknown] == [operator]
    expected = layer(*operands)
    first = lambda y: y if isinstance(y, torch.Tensor) else y[0]
    assert torch.allclose(first(left), first(expected), atol=1e-5)


def test_functions_within_functions_are_a_gpus():
    """multi_head_attention_forward calls attention and, under autocast, a softmax, which a GPU computes in float32."""
    layer, x = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), torch.randn(1, 4, 16)
    with tcemu.torch.emulate(layer, gpu="H200", unknown="leave") as emulated:
        emulated(x)
    operators = {line.operator for line in emulated.report()}
    assert "aten._scaled_dot_product_efficient_attention" in operators and "aten.addmm" in operators
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    with tcemu.torch.emulate(layer, gpu="H200", unknown="leave") as emulated, torch.autocast("cpu", torch.bfloat16):
        emulated(x, x, x)
    (softmax,) = [line for line in emulated.report() if line.operator == "aten._softmax"]
    assert softmax.operands.startswith("float32")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: torch.nn.functional.dropout(torch.ones(9), 0.5), "draws a seed for the GPU itself"),
        (lambda: torch.randperm(3), "randperm has no rule"),
        (lambda: torch.ones(3, dtype=torch.complex64).abs(), "abs has no rule"),
        (lambda: torch.tensor([1, 2, 2]).sort(), "not stable"),
        (lambda: torch.zeros(3).index_add(0, torch.tensor([0, 0]), torch.ones(2)), "atomics"),
        (lambda: torch.ones(3).double().exp(), "float64"),
        (lambda: torch.arange(0, 1, 0.1), "steps that are no integers"),
        (lambda: torch.linspace(0, 1, 9), "linspace has no rule"),
        (lambda: torch.zeros(3).scatter(0, torch.tensor([0, 0]), torch.ones(2)), "equal indices"),
        (lambda: torch.zeros(3).scatter(0, torch.tensor([0, 1]), torch.ones(2), reduce="add"), "atomics"),
        (lambda: torch.zeros(3).index_put((torch.tensor([0, 0]),), torch.ones(2)), "equal indices"),
        (lambda: torch.bincount(torch.tensor([0, 0]), torch.ones(2)), "atomics"),
        (lambda: torch.tensor([1, 2, 2]).topk(2), "equal integers"),
        (lambda: torch.tensor([0.0, -0.0]).max(), "zeros of both signs"),
        (lambda: torch.ones(1001)[1:].sum(), "begins 4 bytes after"),
        (lambda: torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([0, 3])), "none of 3 classes"),
        (lambda: torch.nn.functional.cross_entropy(torch.ones(3), torch.tensor(0)), "known are rows"),
        (lambda: torch.nn.functional.rms_norm(torch.ones(2, 3, 4), (3, 4)), "known is the last one"),
    ],
)
def test_what_the_gpu_leaves_open_is_not_known(run, said):
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"), pytest.raises(NotModelled, match=said):
        run()


def test_other_switches_of_products_are_not_known():
    x, precision = torch.ones(16, 16), torch.get_float32_matmul_precision()
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"):
        try:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.set_float32_matmul_precision("high")
            with pytest.raises(NotModelled, match="allow_bf16_reduced_precision_reduction=False"):
                x.bfloat16() @ x.bfloat16()
            with pytest.raises(NotModelled, match="TF32 have no rule"):
                x @ x
        finally:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
            torch.set_float32_matmul_precision(precision)


def test_equal_operations_that_are_exact_are_not_unknown():
    x = torch.tensor([3.0, 1.0, 2.0])
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100") as emulated:
        assert x.topk(2).values.tolist() == [3.0, 2.0] and x.sort().indices.tolist() == [1, 2, 0]
        assert torch.zeros(3).index_add(0, torch.tensor([0, 2]), torch.ones(2)).tolist() == [1.0, 0.0, 1.0]
        assert torch.arange(3).cumsum(0).tolist() == [0, 1, 3]
        assert torch.zeros(3).index_put((torch.tensor([0, 2]),), torch.ones(2)).tolist() == [1.0, 0.0, 1.0]
        assert torch.ones(9)[4:].sum() == 5 and torch.ones(4, 9)[:, 1:].softmax(-1).shape == (4, 8)
        for without_axes in (x[0].sort()[0], x[0].topk(1)[0], x[0].cumsum(0)):
            assert without_axes == 3
    assert set(emulated.report().counts()) == {"not known", "by rule", "measured", "exact"} and not emulated.report().unknown


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (((), {"gpu": "B200"}), NotModelled, "known are H100, H200"),
        (((), {"gpu": "H100", "library": "torch 2.9"}), NotModelled, "known is torch 2.11"),
        (((), {"gpu": "H100", "unknown": "ignore"}), ValueError, "expected one of raise, warn, leave"),
        (((), {}), TypeError, "give a policy.*or a GPU"),
        ((("bf16 on H100",), {"gpu": "H100"}), TypeError, "leave out policy"),
        (((), {"gpu": "H100", "convolutions": True}), TypeError, "leave out convolutions"),
        ((("bf16 on H100",), {"unknown": "warn"}), TypeError, "belong to gpu="),
    ],
)
def test_arguments_that_do_not_fit_say_what_does(arguments, error, said):
    with pytest.raises(error, match=said):
        tcemu.torch.emulate(torch.nn.Identity(), *arguments[0], **arguments[1])


# ---- the table


def test_rows_have_the_arguments_of_aten():
    for name, operation in OPERATIONS.items():
        packets = [getattr(torch.ops.aten, full) for full in (name, f"{name}_") if hasattr(torch.ops.aten, full)]
        schemas = [getattr(packet, overload)._schema for packet in packets for overload in packet.overloads()]
        names = [argument for argument, _, _ in parse_arguments(operation.arguments)]
        fits = [
            schema
            for schema in schemas
            if [x.name for x in schema.arguments if x.name not in ("out", "rounding_mode")][: len(names)] == names
        ]
        fits = fits or [schema for schema in schemas if {x.name for x in schema.arguments} - OTHER_NAMES <= set(names) | {"out"}]
        assert fits, (name, names)
        assert name not in EXACT


# ---- random numbers


def test_dropout_takes_the_numbers_of_the_gpus_generator():
    x = torch.arange(1.0, 1001).reshape(10, 100).requires_grad_()
    with tcemu.torch.emulate(torch.nn.Dropout(0.5), gpu="H200") as emulated:
        torch.manual_seed(7)
        y = emulated(x)
        y.backward(torch.ones_like(y))
        again = emulated(x)
        torch.cuda.manual_seed(7)
        assert torch.equal(emulated(x), y) and not torch.equal(again, y)
        assert (emulated.generator.seed, emulated.generator.offset) == (7, 4)
    kept = dropout_mask(7, 0, 1000, 0.5, vector=4).reshape(10, 100)
    assert torch.equal(y, torch.where(torch.from_numpy(kept), 2 * x, 0.0)) and torch.equal(x.grad, 2.0 * torch.from_numpy(kept))


def test_forms_of_dropout_that_are_not_one_kernel_take_single_elements():
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200") as emulated:
        torch.manual_seed(7)
        written = torch.nn.functional.dropout(torch.ones(600), 0.5, inplace=True)
        channels = torch.nn.functional.dropout2d(torch.ones(2, 300, 3, 3), 0.5)
    assert torch.equal(written, 2.0 * torch.from_numpy(uniform_numbers(7, 0, 600) < 0.5)) and emulated.generator.offset == 8
    assert torch.equal(channels[:, :, 0, 0].reshape(-1), 2.0 * torch.from_numpy(uniform_numbers(7, 4, 600) < 0.5))


def test_draws_of_torch_have_the_words_of_an_h200():
    """tests/gpu_runs/random_draws.py, run within the block: draws, of small tensors, and indices of extremes among equal elements."""
    script = load_script("random_draws")
    recorded = json.loads(lzma.decompress((ROOT / "tests/golden/torch_draws_h200.json.xz").read_bytes()))["calls"]
    tried = [(i, call) for i, call in enumerate(script.list_calls()) if np.prod(call[1]) <= 3000 and "argm" not in call[0]]
    for number, call in tried:
        with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200") as emulated:
            emulated.generator.manual_seed(1000 + number, 4)
            results = [script.words(torch, x) for x in script.run(torch, number, call, "cpu")]
        digests = [hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16] for x in results]
        given = slice(1 if call[0] in ("max", "min") else 0, None)  # of extremes the indices: a NaN's word is not that of a CPU
        assert digests[given] == recorded[number]["digest"][given], call
        assert emulated.generator.offset == recorded[number]["offset"]
    assert len({call[0] for _, call in tried}) == 11


@pytest.mark.parametrize("shape", ["7x9", pytest.param("20", marks=pytest.mark.full), pytest.param("3x5x64x31", marks=pytest.mark.full)])
def test_forms_of_dropout_have_the_words_of_an_h200(shape):
    """tests/gpu_runs/dropout_words.py, run within the block, with a probability of 0.35."""
    script = load_script("dropout_words")
    recorded = json.loads(lzma.decompress((ROOT / "tests/golden/torch_random_h200.json.xz").read_bytes()))["forms"]
    found = {}
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200") as emulated:
        script.offset = lambda: emulated.generator.offset
        for dtype in script.DT:
            (x,) = script.normals("drop", dtype, tuple(map(int, shape.split("x"))))
            for form, run in [*script.dropout_forms(x, 0.35), ("gradient", None)]:
                if form != "begins":  # its operand begins within a vector
                    made = script.two_calls(run) if run else script.gradient_of_dropout(x, 0.35)
                    found |= {f"{form}|{dtype}|{shape}|0.35#{key}": value for key, value in made.items()}
    digests = {
        k: v if k.endswith("offsets") else hashlib.sha256(np.ascontiguousarray(v).tobytes()).hexdigest()[:16] for k, v in found.items()
    }
    assert digests == {name: value for name, value in recorded.items() if name.split("|")[2] == shape}


def test_the_math_form_of_attention_drops_weights():
    q, attention = torch.ones(2, 4, 8, 16), torch.nn.attention
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200") as emulated, attention.sdpa_kernel(attention.SDPBackend.MATH):
        torch.manual_seed(7)
        y = torch.nn.functional.scaled_dot_product_attention(q, q[:, :2], q[:, :2], dropout_p=0.5, enable_gqa=True)
    kept = dropout_mask(7, 0, 512, 0.5, vector=4).reshape(2, 4, 8, 8)
    assert torch.equal(y[..., 0], torch.from_numpy(kept.sum(-1) / np.float32(4)))
    assert "aten.native_dropout" in {line.operator for line in emulated.report()}


@pytest.mark.filterwarnings("ignore:(to - 1|from) is out of bounds")
def test_limits_of_integers_as_floats_are_those_to_which_nothing_is_rounded():
    """`update_from` and `update_to` of PyTorch, whose kernels on a CPU use the same limits: no number is the upper one."""
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200"):
        torch.manual_seed(0)
        found = {
            "bf16": torch.randint(0, 1000, (20000,), dtype=torch.bfloat16),
            "f16": torch.empty(60000, dtype=torch.float16).random_(0, 3000),
            "below": torch.randint(-999, 0, (20000,), dtype=torch.bfloat16),
            "tensor": torch.randint_like(torch.zeros(4000), torch.tensor(5)),
        }
    assert [(x.min().item(), x.max().item()) for x in found.values()] == [(0, 996), (0, 2996), (-996, -1), (0, 4)]
    limits = {(0, 1000, 8): (0, 996), (-999, 0, 8): (-996, 0), (0, 3000, 11): (0, 2998), (-7, 256, 8): (-7, 256), (5, 6, 24): (5, 6)}
    assert {given: held_limits(*given) for given in limits} == limits


@pytest.mark.parametrize(
    ("draw", "error", "said"),
    [
        (lambda: torch.empty(4).exponential_(0.0), RuntimeError, "lambda > 0"),
        (lambda: torch.empty(4).uniform_(2, 1), NotModelled, "low=2"),
        (lambda: torch.normal(torch.zeros(4), -torch.ones(4)), NotModelled, "negative"),
        (lambda: torch.multinomial(torch.ones(3), 5), NotModelled, "5 samples of 3"),
        (lambda: torch.bernoulli(torch.full((4,), 1.5)), NotModelled, "from 0 to 1"),
        (lambda: torch.empty(4, dtype=torch.int8).random_(0, 300), NotModelled, "high=300 of int8"),
        (lambda: torch.empty(4, dtype=torch.int32).random_(5, None), NotModelled, "low=5 without high"),
        (lambda: torch.empty(4, dtype=torch.float64).random_(), NotModelled, "without limits"),
        (lambda: torch.randn(4, dtype=torch.complex64), NotModelled, "complex64"),
    ],
)
def test_draws_that_pytorch_refuses_or_that_have_no_rule_are_not_drawn(draw, error, said):
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200"), pytest.raises(error, match=said):
        torch.manual_seed(0)
        draw()


def test_after_an_unknown_operator_and_in_a_recomputation_numbers_are_not_known():
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100", unknown="leave") as emulated:
        torch.manual_seed(7)
        torch.randperm(3)
        torch.nn.functional.dropout(torch.ones(9), 0.5)
        assert [line.operator for line in emulated.report().unknown] == ["aten.randperm", "aten.native_dropout"]
        torch.manual_seed(7)
        x = torch.ones(8, requires_grad=True)
        torch.utils.checkpoint.checkpoint(lambda v: torch.nn.functional.dropout(v, 0.5), x, use_reentrant=False).exp().sum().backward()
    assert ("aten.native_dropout", True) in {(line.operator, line.backward) for line in emulated.report().unknown}


def test_a_function_that_hands_itself_to_a_mode_by_another_one_ends():
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"):
        assert torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")[0].shape == (2, 3)


def test_inference_mode_decomposes_functions_as_without_it():
    model, x = small_model()
    with tcemu.torch.emulate(model, gpu="H100") as emulated:
        expected = emulated(x)
        with torch.inference_mode():
            assert torch.equal(emulated(x), expected)
    assert not emulated.report().unknown


def test_foreach_maximum_takes_the_second_of_two_zeros():
    zeros = [torch.tensor([0.0, -0.0, float("nan"), 1.0])], [torch.tensor([-0.0, 0.0, 1.0, float("nan")])]
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"):
        for run in (torch._foreach_maximum, torch._foreach_minimum):
            (found,) = run(*zeros)
            assert found.signbit()[:2].tolist() == [True, False] and found[2:].isnan().all()


# ---- words of a GPU


def test_a_training_step_has_the_words_of_a_gpu(step):
    """Two steps of a small transformer, of each operation a digest: tests/gpu_runs/torch_training_step.py, recorded on a GPU."""
    recorded = json.loads(lzma.decompress((ROOT / "tests/golden/torch_training_step.json.xz").read_bytes()))
    model, ids = step.make(torch.bfloat16)
    with tcemu.torch.emulate(model, gpu="H200", unknown="leave") as emulated, step.Digests() as digests:
        step.train(model, ids)
    expected = recorded["bfloat16"]
    assert digests.names == expected["names"]
    assert [n for n, (a, b) in enumerate(zip(digests.words, expected["words"], strict=True)) if a != b] == []
    assert not emulated.report().unknown


# ---- a record, judged


def test_a_record_is_judged_and_the_first_other_operation_is_named(tmp_path):
    model, x = small_model()
    model[2] = torch.nn.LayerNorm(32).to(torch.bfloat16)
    with tcemu.torch.emulate(model, gpu="H100"), record(str(tmp_path / "run.drift"), model):
        model(x).float().sum().backward()
    found = predict(tmp_path / "run.drift", gpu="H100")
    assert found.first is None and {line.verdict for line in found.operations} <= {"equal", "exact"}
    assert sum(line.verdict == "equal" for line in found.operations) > 8

    def change(number, name, operands, results):
        if name != "aten.gelu":
            return None
        results[0].view(np.uint16).reshape(-1)[3] ^= 1
        return results

    with tcemu.torch.emulate(model, gpu="H100"), record(str(tmp_path / "other.drift"), model, substitute=change):
        model(x)
    judged = predict(tmp_path / "other.drift", gpu="H100")
    assert judged.first is not None and judged.first.name == "aten.gelu" and (judged.first.wrong, judged.first.words) == (1, 256)
    assert len(judged.different) == 1 and "first that no H100" in str(judged)


def test_a_result_of_another_dtype_is_named(tmp_path):
    """A CPU gives the moments of a norm in the operand's dtype, a GPU in float32."""
    model, x = small_model()
    with record(str(tmp_path / "run.drift"), model):
        model(x)
    found = predict(tmp_path / "run.drift", gpu="H100")
    (line,) = [line for line in found.operations if line.skipped]
    assert line.name == "aten.native_layer_norm" and "not compared: 1 aten.native_layer_norm: result 1" in str(found)


def test_a_record_of_a_known_gpu_is_identified_by_its_librarys_kernels(tmp_path):
    """Several orders give the words of a short mean; the one that is named is the one of PyTorch's kernel."""
    model, x = small_model()
    with tcemu.torch.emulate(model, gpu="H200"), record(str(tmp_path / "run.drift"), model):
        (model(x).float() ** 3).mean(-1)
    run = read_record(tmp_path / "run.drift")
    run.environment |= {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    found = {line.name: line for line in identify(run, targets=(), names=["aten.mean", "aten.addmm", "aten.pow"]).operations}
    assert found["aten.mean"].arithmetic == "mean: Reduce.cuh, 8 terms, torch 2.11 on H200" and not found["aten.mean"].twins
    assert found["aten.addmm"].recipe and "nvjet" in found["aten.addmm"].arithmetic and found["aten.pow"].is_explained
    run.environment["torch"] = "2.10.0"
    (searched,) = identify(run, targets=(), names=["aten.mean"]).operations
    assert searched.is_explained and "torch 2.11" not in searched.arithmetic


def test_variables_that_change_kernels_are_kept_and_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, x = small_model()
    with tcemu.torch.emulate(model, gpu="H200"), record(str(tmp_path / "run.drift"), model):
        model(x)
    run = read_record(tmp_path / "run.drift")
    assert run.environment["sdp_flash"] is True and len(run.environment["sdp_priority"]) == 5
    run.environment |= {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    assert predict(run, gpu="H200").notes == ("the record is of a run with CUBLAS_WORKSPACE_CONFIG=:4096:8, which has no rule",)
    assert recorded_kernels(run) is None
    del run.environment["CUBLAS_WORKSPACE_CONFIG"]
    assert predict(run, gpu="H200").notes == () and recorded_kernels(run) == ("H200", "torch 2.11")


def test_operands_with_gaps_are_judged_and_exact_operations_are_not_identified(tmp_path):
    """The first token of each sequence, as a classifier takes it, and movements of all kinds."""
    model = torch.nn.Linear(64, 16).to(torch.float16)
    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0)).to(torch.float16)

    def run(x):
        y = model(x[:, 0])
        return torch.stack([torch.where(y > 0, -y, y), y.masked_fill(y > 1, 0.0)]).max()

    with tcemu.torch.emulate(model, gpu="H200"), record(str(tmp_path / "run.drift"), model):
        run(x)
    found = read_record(tmp_path / "run.drift")
    found.environment |= {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    assert {line.verdict for line in predict(found, gpu="H200").operations} == {"equal", "exact"}
    (line,) = identify(found, targets=()).operations
    assert line.name == "aten.addmm" and "torch 2.11 on H200" in line.arithmetic


def test_attention_without_gradients_gives_no_sums(tmp_path):
    """cuDNN's kernel has no logarithms of sums then, and a record has the states of its generator alone beside the output."""
    q = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200"), torch.no_grad():
        assert run(q, q, q, None, False)[1] is None and run(q, q, q, None, True)[1].shape[:3] == (1, 2, 40)
