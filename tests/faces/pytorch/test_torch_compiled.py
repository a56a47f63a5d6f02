"""Graphs that `torch.compile` wrote on an H200, run from its cache folder: words of launches and of training steps against the GPU's."""

import hashlib
import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
from gpu_runs.compiled_models import TRAINED, described, make_training
from support.torch_helpers import MISSING, torch

import tcemu
from tcemu.base.errors import NotModelled

pytestmark = pytest.mark.skipif(torch is None, reason=MISSING)
GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder with the recorded cache folders, and with the digests of each as NAME.json."""
    folder = tmp_path_factory.mktemp("inductor")
    for name in ("inductor_h200", "inductor_training_h200"):
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress((GOLDEN / f"{name}.tar.xz").read_bytes()))) as archive:
            archive.extractall(folder, filter="data")
    return folder


def draw(seed, *shape):
    """As tests/gpu_runs/compiled_models.py draws operands."""
    numbers = np.random.Generator(np.random.Philox([5, seed])).integers(-(1 << 15), 1 << 15, shape, dtype=np.int32)
    return torch.from_numpy(numbers.astype(np.float32) * np.float32(2.0**-15))


def digest(x):
    words = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(words.tobytes()).hexdigest()[:24]


class NormSilu(torch.nn.Module if torch is not None else object):
    def __init__(self):
        super().__init__()
        self.w, self.g = (torch.nn.Parameter(draw(*seed).bfloat16()) for seed in ((1, 256, 96), (2, 256)))

    def forward(self, x):
        mean = x.float().pow(2).mean(-1, keepdim=True)
        return torch.nn.functional.silu((self.g * (x.float() * torch.rsqrt(mean + 1e-6)).to(x.dtype)) @ self.w)


def test_a_compiled_model_gives_the_gpus_words(recorded):
    """Two kernels as PTX, and cuBLAS's product between them. The words are not those of eager PyTorch."""
    facts = json.loads((recorded / "norm_silu.json").read_text())
    model, x = NormSilu(), draw(0, 24, 256).bfloat16()
    with torch.no_grad(), tcemu.torch.emulate(model, gpu="H100", compiled=tcemu.inductor.read(recorded / "norm_silu")) as emulated:
        y = emulated(x)
        report = emulated.report()
    assert digest(y) == facts["results"][0][3] != facts["uncompiled"][0][3]
    assert [line.operator.partition("_")[0] for line in report if line.status != "exact"] == ["triton.triton", "aten.mm", "triton.triton"]
    assert report.counts()["not known"] == 0


@pytest.mark.parametrize("names", ["mean_3", pytest.param("", marks=pytest.mark.full)])
def test_each_launch_leaves_the_gpus_words(recorded, names):
    """Reductions in two launches, in one, by turns with a softmax, a layer norm with GELU, and a mean that ptxas divides by a product."""
    facts = json.loads((recorded / "reductions.json").read_text())
    (graph,) = tcemu.inductor.read(recorded / "reductions")
    operands = [draw(2, 65, 768), draw(0, 100_000), draw(1, 37, 5000).bfloat16()]
    launches, found = iter([row for row in facts["log"] if "kernel" in row]), []

    def compare(part):
        row = next(launches)
        expected = [each[3] for each in row["after"] if isinstance(each, list)]
        found.append((part.name == row["kernel"], [digest(x) for x in part.operands if isinstance(x, torch.Tensor)] == expected))

    if not names:
        results = graph.run(*operands, target="H100", watch=compare)
        assert found == [(True, True)] * 6 and [digest(x) for x in results] == [each[3] for each in facts["results"]]
        return
    kernel, out = graph.kernels["triton_per_fused_mean_3"], torch.zeros(5000, dtype=torch.bfloat16)
    launch = kernel.launch([operands[2], out, 5000, 37], "sm_90a", checked=False)
    assert launch.grid == (157, 1, 1) and not launch.inexact
    assert digest(out) == next(row["after"][1][3] for row in facts["log"] if row.get("kernel") == kernel.name)


def test_a_folder_lists_kernels_and_calls_of_libraries(recorded):
    graphs = tcemu.inductor.read(recorded / "norm_silu")
    (graph,) = graphs
    first, product, last = graph.steps
    assert product == "extern_kernels.mm" and list(graph.kernels) == [first, last] and graph.kind == "inference"
    assert [str(each) for each in graph.arguments] == ["bfloat16[24, 256]", "bfloat16[256]", "bfloat16[256, 96]"]
    kernel = graph.kernels[last]
    assert kernel.blocks == {"XBLOCK": 128} and kernel.ptx.parent.name.startswith("BDFZ")  # the faster of two, by .best_config
    assert graph.kernels[first].blocks["XBLOCK"] == 1  # by the only form's code
    assert "operator of PyTorch" in str(graphs) and "PTX" in str(graphs) and "2 launches of 2 kernels" in repr(graph)


def is_equal(named, facts):
    """Whether named tensors have the recorded digests."""
    found = described(named)
    return {name: x[3] for name, x in found.items()} == {name: x[3] for name, x in facts.items()}


@pytest.mark.parametrize("name", ["mlp", pytest.param("mlp_dropout", marks=pytest.mark.full)])
def test_a_compiled_training_step_gives_the_gpus_words(recorded, name):
    """Loss, gradients and the weights after AdamW: the graphs' by their PTX, the optimizer's as eager PyTorch computes them on a GPU."""
    facts, (model, loss_of) = json.loads((recorded / f"{name}.json").read_text()), make_training(name, "cpu")
    with tcemu.torch.emulate(model, gpu="H200", compiled=tcemu.inductor.read(recorded / name)) as emulated:
        torch.manual_seed(TRAINED[name][6])
        loss = loss_of(emulated)
        loss.backward()
        gradients = [(key, p.grad.clone()) for key, p in model.named_parameters()]
        torch.optim.AdamW(model.parameters(), lr=1e-3).step()
        report = emulated.report()
    assert digest(loss) == facts["loss"][3] and is_equal(gradients, facts["gradients"])
    assert is_equal(model.named_parameters(), facts["updated"])
    assert not is_equal(gradients, {key: facts["uncompiled"][key] for key in facts["gradients"]})
    kernels = {(line.operator.partition(".")[0], line.backward) for line in report}
    assert report.counts()["not known"] == 0 and {("triton", False), ("triton", True), ("aten", True)} <= kernels


@pytest.mark.full
def test_a_compiled_optimizer_gives_the_gpus_words(recorded):
    """Dynamo's order of an optimizer's operands changes between versions of PyTorch: another one finds no graph."""
    facts, (model, loss_of) = json.loads((recorded / "mlp.json").read_text()), make_training("mlp", "cpu")
    with tcemu.torch.emulate(model, gpu="H200", compiled=tcemu.inductor.read(recorded / "mlp")) as emulated:
        loss_of(emulated).backward()
        step = emulated.compile(torch.optim.AdamW(model.parameters(), lr=1e-3).step)
        if not torch.__version__.startswith("2.11."):
            with pytest.raises(NotModelled, match="The model here does not call"):
                step()
            return
        step()
    assert is_equal(model.named_parameters(), facts["updated_compiled"])


def test_seeds_of_compiled_dropout_are_the_gpus(recorded):
    """PyTorch draws them by randint over all integers of 64 bits but the last one."""
    digests = [x[3] for x in json.loads((recorded / "mlp_dropout.json").read_text())["integers"]]
    seeds = torch.empty(1, dtype=torch.int64)
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200"):
        torch.manual_seed(TRAINED["mlp_dropout"][6])
        torch.ops.aten.randint.low_out(-(2**63), 2**63 - 1, [1], out=seeds)
    assert digest(seeds) in digests


def test_what_a_forward_graph_saves_is_read_from_places_and_names(recorded):
    """The saved tensors are the last results of the forward graph, and the first operands of the backward graph."""
    graphs = tcemu.inductor.read(recorded / "mlp")
    forward, backward = (next(graph for graph in graphs if graph.kind == kind) for kind in ("forward", "backward"))
    operands, tangent = [torch.empty(x.shape, dtype=x.dtype) for x in forward.arguments], torch.empty(())
    gradients = [x.dtype.is_floating_point and x.shape != (48, 64) for x in forward.arguments]
    found = graphs.find_training(operands, 1, [tangent], gradients, forward.sources)
    assert (found.forward, found.backward) == (forward, backward) and len(found.saved) == len(forward.results) - 1
    assert [name for name, _ in found.saved][:3] == ["primals_3", "primals_4", "primals_5"] == list(forward.results[1:4])
    for results, given, wanted, names in [
        (2, [tangent], gradients, forward.sources),  # one result more, which is no saved tensor
        (1, [tangent.bfloat16()], gradients, forward.sources),
        (1, [tangent], [True] * len(gradients), forward.sources),
        (1, [tangent], gradients, forward.sources - {"aten.gelu"}),  # another model with the same operands
    ]:
        with pytest.raises(NotModelled, match=r"no forward graph for 10 operands.*backward graph"):
            graphs.find_training(operands, results, given, wanted, names)


def test_two_models_of_one_folder_with_the_same_operands_are_refused(recorded, tmp_path):
    """Unless they are the same program. Which of two that differ is meant, nothing says."""
    (path,) = [path for path in (recorded / "norm_silu").glob("*/*.py") if path.read_text().startswith("# AOT ID")]
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa/a.py").write_text(path.read_text())
    (tmp_path / "aa/b.py").write_text(path.read_text().replace("0_inference", "1_inference"))
    graphs = tcemu.inductor.read(tmp_path)
    operands, names = [torch.empty(x.shape, dtype=x.dtype) for x in graphs[0].arguments], graphs[0].sources
    assert graphs.find(operands, 1, names) is graphs[0] and len(graphs) == 2
    (tmp_path / "aa/b.py").write_text(path.read_text().replace("extern_kernels.mm(buf1,", "extern_kernels.mm(1 * buf1,"))
    with pytest.raises(NotModelled, match="2 inference graphs for 3 operands"):
        tcemu.inductor.read(tmp_path).find(operands, 1, names)
    with pytest.raises(NotModelled, match=r"The model here does not call aten\.silu, silu"):
        graphs.find(operands, 1, names - {"silu", "aten.silu"})


def test_what_a_folder_lacks_is_named(recorded, tmp_path):
    graphs = tcemu.inductor.read(recorded / "norm_silu")
    model, x = NormSilu(), draw(0, 24, 256).bfloat16()
    with torch.no_grad(), pytest.raises(NotModelled, match=r"no inference graph for 3 operands bfloat16\[8, 256\]"):
        tcemu.torch.emulate(model, gpu="H100", compiled=graphs)(x[:8])
    with pytest.raises(NotModelled, match="no_grad"):
        tcemu.torch.emulate(model, gpu="H100", compiled=graphs)(x)
    with pytest.raises(NotModelled, match="no forward graph"), tcemu.torch.emulate(model, gpu="H100", compiled=graphs) as emulated:
        emulated(x)
    with pytest.raises(TypeError, match="compile needs graphs"):
        tcemu.torch.emulate(model, gpu="H100").compile(model)
    with pytest.raises(TypeError, match="compiled belong to gpu="):
        tcemu.torch.emulate(model, "bf16 on H100", compiled=graphs)
    with pytest.raises(ValueError, match=r"operand 1 is float32\[256\]"):
        graphs[0].run(x, model.g.float(), model.w, target="H100")
    with pytest.raises(FileNotFoundError):
        tcemu.inductor.read(tmp_path / "nothing")
    copy = tmp_path / "copy"
    for path in (recorded / "norm_silu").rglob("*"):
        if path.is_file() and path.suffix != ".best_config" and "triton_per" not in path.name:
            place = copy / path.relative_to(recorded / "norm_silu")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    missing = [kernel.missing for kernel in tcemu.inductor.read(copy)[0].kernels.values()]
    assert missing[0] == "the folder has no PTX" and "2 compiled forms" in missing[1]
    with pytest.raises(NotModelled, match="the folder has no PTX"):
        tcemu.inductor.read(copy)[0].run(x, model.g, model.w, target="H100")


@pytest.mark.parametrize("statement", ["open('x')", "buf2 = torch.load('x')", "while True: pass", "buf2 = extern_kernels.conv(x)"])
def test_nothing_else_of_a_folder_runs(recorded, tmp_path, statement):
    (path,) = [path for path in (recorded / "norm_silu").glob("*/*.py") if path.read_text().startswith("# AOT ID")]
    line = "            buf1 = empty_strided_cuda("
    changed = path.read_text().replace(line, f"            {statement}\n{line}", 1)
    assert changed != path.read_text()
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa/a.py").write_text(changed)
    model, x = NormSilu(), draw(0, 24, 256).bfloat16()
    with pytest.raises(NotModelled, match=r"is not known to tcemu\.inductor"):
        tcemu.inductor.read(tmp_path)[0].run(x, model.g, model.w, target="H100")
