"""Programs of torch's operators: compiled once for equal shapes in a process, for all modules, and stored on disk between processes."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.systems import skip_file
from support.torch_helpers import MISSING, equal, torch, tt

import tcemu

skip_file(MISSING if torch is None else "")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path):
    """The folder of JAX's persistent compilation cache, empty."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def lowered(monkeypatch):
    """The static arguments of the programs that are traced and lowered."""
    from tcemu.faces.torch import operators

    seen = []
    for function in (operators.compute_value, operators._compute_gradients):
        monkeypatch.setattr(function, "lower", lambda *args, lower=function.lower: seen.append(args) or lower(*args))
    return seen


def train(width, recipe="bf16", layers=1):
    """A step of equal layers, and of a product of batches: the gradients of the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    x = torch.randn(2, 3, width)
    with tt.emulate(model, recipe):
        y = model(x)
    y.sum().backward()
    return [y, *(parameter.grad for parameter in model.parameters())]


def test_equal_shapes_compile_once_and_a_second_module_adds_none(lowered):
    train(5, layers=3)
    assert len(lowered) == 4  # the value, and the gradients of the input, the weight and the bias
    train(5, layers=1)
    assert len(lowered) == 4
    train(9, layers=2)
    assert len(lowered) == 8


def test_a_gradient_shares_the_program_of_a_value(lowered):
    """dA of [3, 4] by [4, 4] is a product of these shapes; dB is another one, [4, 3] by [3, 4]."""
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((3, 4), (4, 4)))
    tt.matmul(a, b, recipe="bf16").sum().backward()
    assert len(lowered) == 2


def test_programs_are_compiled_again_when_those_of_jax_are_cleared(lowered):
    train(5)
    jax.clear_caches()
    count = len(lowered)
    train(5)
    assert len(lowered) > count


def test_a_stored_program_is_neither_traced_nor_compiled_again(lowered, cache_folder):
    first = train(7, layers=2)
    files = sorted((cache_folder / "tcemu-torch").iterdir())
    assert len(files) == len(lowered) == 4
    jax.clear_caches()
    assert equal(train(7, layers=2), first) and len(lowered) == 4
    jax.clear_caches()
    files[0].write_bytes(files[0].read_bytes()[:100])  # a file of a killed process
    assert equal(train(7, layers=2), first) and len(lowered) == 5


def test_a_recipe_without_a_name_is_not_stored(lowered, cache_folder):
    """Its name in this process means another recipe in the next."""
    recipe = tcemu.get_recipe("bf16").replace(split_k=2)
    train(8, recipe)
    stored = [path.name for path in (cache_folder / "tcemu-torch").iterdir()]
    assert len(lowered) - len(stored) in (1, 2)  # the value; the gradient of the weight too, unless bf16 itself was met before


def test_products_of_batches_are_stored_by_their_recipe(cache_folder):
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4)
    with tt.emulate(model, "bf16") as emulated:
        names = {product.name for product in emulated.report(x, x, x).replaced}
        emulated(x, x, x)
    stored = len(list((cache_folder / "tcemu-torch").iterdir()))
    assert stored == len(names) == 4


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "deepseek"])
@pytest.mark.parametrize("a", ["lhs", "rhs"])
def test_shared_programs_have_the_bits_of_the_whole_operator(monkeypatch, recipe, a):
    """A dot_general with axes in any order, and its gradients."""
    from tcemu.faces.torch.matrix_products import dot_general_op
    from tcemu.faces.torch.operators import Operator, register_name

    torch.manual_seed(0)
    name = register_name(tcemu.dot_general(recipe, a=a))
    lhs, rhs = torch.randn(5, 2, 6, 3), torch.randn(4, 6, 2)  # axis 1 of lhs and 2 of rhs: batch; 2 and 1: contracting

    def results():
        left, right = lhs.clone().requires_grad_(), rhs.clone().requires_grad_()
        d = dot_general_op(left, right, None, name, [2], [1], [1], [2], torch.float32)
        d.square().sum().backward()
        return [d, left.grad, right.grad]

    shared = results()
    monkeypatch.setattr(Operator, "find_product", lambda *_: None)
    assert equal(shared, results()) and shared[0].shape == (2, 5, 3, 4)
