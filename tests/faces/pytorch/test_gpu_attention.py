"""`scaled_dot_product_attention` within `tcemu.torch.emulate(gpu=...)`, and drawn calls of tests/gpu_runs/attention_calls.py on an H200."""

import json
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.torch_helpers import MISSING, torch

import tcemu
from tcemu.base.errors import NotModelled

pytestmark = pytest.mark.skipif(torch is None, reason=MISSING)
ROOT = Path(__file__).parents[3]
GOLDEN = json.loads(lzma.decompress((ROOT / "tests/golden/torch_attention_h200.json.xz").read_bytes()))
LETTERS = {"cudnn": "c", "flash": "f", "efficient": "e", "math": "m"}
USUAL_CHOICES = 80  # of each recorded series


@pytest.fixture(scope="module")
def script():
    """The script that records on a GPU."""
    sys.path.insert(0, str(ROOT / "tests/gpu_runs"))
    try:
        import attention_calls
    finally:
        sys.path.pop(0)
    return attention_calls


def choose(script, seed):
    from tcemu.faces.torch.function_choices import choose_backend, facts_of_call

    facts, operands, mask, _ = script.make_call(seed)
    with script.settings(facts):
        try:
            call = facts_of_call(SimpleNamespace(gpu="H200"), operands, mask, facts["p"], facts["causal"], facts["gqa"])
            return LETTERS["math" if call is None else choose_backend(call)]
        except RuntimeError:  # no backend takes it
            return "-"


@pytest.mark.parametrize("count", [USUAL_CHOICES, pytest.param(None, marks=pytest.mark.full)])
def test_the_backend_of_drawn_calls_is_an_h200s(script, count):
    for first, letters in GOLDEN["choice"].items():
        letters = letters[:count]
        found = [choose(script, seed) for seed in range(int(first), int(first) + len(letters))]
        assert [n for n, (x, y) in enumerate(zip(found, letters, strict=True)) if x != y] == []
        assert set(letters) == {*LETTERS.values(), "-"}


def attend(unknown, needs="qkv", deterministic=False, **options):
    """Gradients of attention over 300 keys, within the block."""
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 2, 300, 16), np.float32)).bfloat16() for _ in range(3))
    operands = [x.requires_grad_(name in needs) for name, x in zip("qkv", (q, k, v), strict=True)]
    torch.use_deterministic_algorithms(deterministic)
    try:
        with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100", unknown=unknown) as emulated:
            out = torch.nn.functional.scaled_dot_product_attention(*operands, **options)
            out.backward(torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    return {line.operator: line for line in emulated.report()}, [x.grad for x in operands]


def test_an_open_order_is_one_results():
    operator = "aten._scaled_dot_product_cudnn_attention_backward"
    with pytest.raises(NotModelled, match=r"3 blocks of 128 keys are added by atomics.*in one order that the GPU may take"):
        attend("raise")
    with pytest.warns(UserWarning, match="the order of a sum is open"):
        attend("warn")
    left, gradients = attend("leave")
    assert left[operator].status == "not known" and "lockstep" in left[operator].kernel
    lines, (of_q, *others) = attend("raise", needs="kv")
    assert of_q is None and lines[operator].status == "by rule"
    assert all(torch.equal(x, y) for x, y in zip(others, gradients[1:], strict=True))


def test_deterministic_algorithms_fix_the_order():
    lines, _ = attend("raise", deterministic=True)
    assert lines["aten._scaled_dot_product_flash_attention_backward"].status == "by rule"


def test_nested_tensors_are_refused_by_name():
    rows = [torch.ones(5, 2, 16), torch.ones(7, 2, 16)]
    x = torch.nested.nested_tensor(rows, dtype=torch.bfloat16, layout=torch.jagged).transpose(1, 2)
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"), pytest.raises(NotModelled, match="nested tensors"):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_what_pytorch_refuses_is_refused():
    x, attend = torch.ones(1, 1, 4, 16, dtype=torch.bfloat16), torch.nn.functional.scaled_dot_product_attention
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100"):
        with pytest.raises(RuntimeError, match="a mask beside is_causal"):
            attend(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool), is_causal=True)
        with pytest.raises(RuntimeError, match=r"bfloat16, torch\.float32"):
            attend(x, x.float(), x)


def test_a_mask_of_booleans_hides_keys_in_the_math_form():
    """Of a head size of 4, which with a mask the math form alone takes."""
    x, mask = torch.eye(4, dtype=torch.bfloat16)[None, None], torch.tensor([[True, False, True, True]])
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H100", unknown="leave") as emulated:
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask.expand(4, 4))
    assert "aten._safe_softmax" in {line.operator for line in emulated.report()}
    assert (out[..., 1] == 0).all() and (out[..., 0] > 0).all()
