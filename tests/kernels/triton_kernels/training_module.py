"""A torch module whose forward and backward are Triton kernels: RMS norm, SwiGLU and cross entropy; and the same in torch alone."""

import torch
import triton
import triton.language as tl

EPSILON = 1e-5


@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, epsilon, N: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, N)
    x = tl.load(x_ptr + row * N + places)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / N + epsilon)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * N + places, x * rstd * tl.load(w_ptr + places))


@triton.jit
def rms_norm_gradient_kernel(x_ptr, w_ptr, dy_ptr, rstd_ptr, dx_ptr, dw_ptr, rows, N: tl.constexpr):
    """One program walks all rows, so that dw is summed in a fixed order."""
    places = tl.arange(0, N)
    w, dw = tl.load(w_ptr + places), tl.zeros((N,), tl.float32)
    for row in range(rows):
        x, dy = tl.load(x_ptr + row * N + places), tl.load(dy_ptr + row * N + places)
        rstd = tl.load(rstd_ptr + row)
        weighted = w * dy
        mean = tl.sum(weighted * x, axis=0) * rstd * rstd / N
        tl.store(dx_ptr + row * N + places, (weighted - x * mean) * rstd)
        dw += dy * x * rstd
    tl.store(dw_ptr + places, dw)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < n
    gate = tl.load(gate_ptr + places, mask=mask)
    tl.store(y_ptr + places, gate * tl.sigmoid(gate) * tl.load(up_ptr + places, mask=mask), mask=mask)


@triton.jit
def swiglu_gradient_kernel(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < n
    gate, up, dy = (tl.load(gate_ptr + places, mask=mask), tl.load(up_ptr + places, mask=mask), tl.load(dy_ptr + places, mask=mask))
    sigmoid = tl.sigmoid(gate)
    tl.store(dup_ptr + places, dy * gate * sigmoid, mask=mask)
    tl.store(dgate_ptr + places, dy * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=mask)


@triton.jit
def cross_entropy_kernel(x_ptr, labels_ptr, loss_ptr, dx_ptr, rows, N: tl.constexpr):
    """The loss of a row, and its gradient for the mean over the rows."""
    row, places = tl.program_id(0), tl.arange(0, N)
    x, label = tl.load(x_ptr + row * N + places), tl.load(labels_ptr + row)
    x -= tl.max(x, axis=0)
    weights = tl.exp(x)
    total = tl.sum(weights, axis=0)
    chosen = places == label
    tl.store(loss_ptr + row, tl.log(total) - tl.sum(tl.where(chosen, x, 0.0), axis=0))
    tl.store(dx_ptr + row * N + places, (weights / total - tl.where(chosen, 1.0, 0.0)) / rows)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        y, rstd = torch.empty_like(x), torch.empty(len(x))
        rms_norm_kernel[(len(x),)](x, w, y, rstd, EPSILON, N=x.shape[1], num_warps=1)
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        rms_norm_gradient_kernel[(1,)](x, w, dy.contiguous(), rstd, dx, dw, len(x), N=x.shape[1], num_warps=1)
        return dx, dw


class SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        y = torch.empty_like(gate)
        swiglu_kernel[(triton.cdiv(gate.numel(), 256),)](gate, up, y, gate.numel(), BLOCK=256, num_warps=2)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), 256),)
        swiglu_gradient_kernel[grid](gate, up, dy.contiguous(), dgate, dup, gate.numel(), BLOCK=256, num_warps=2)
        return dgate, dup


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        loss, gradient = torch.empty(len(logits)), torch.empty_like(logits)
        cross_entropy_kernel[(len(logits),)](logits, labels, loss, gradient, len(logits), N=logits.shape[1], num_warps=1)
        ctx.save_for_backward(gradient)
        return loss.mean()

    @staticmethod
    def backward(ctx, dloss):
        (gradient,) = ctx.saved_tensors
        return gradient * dloss, None


class Block(torch.nn.Module):
    """Norm, gated layer and classifier. kernels: by the Triton kernels above, else by torch."""

    def __init__(self, kernels: bool, width: int = 32, hidden: int = 64, classes: int = 16) -> None:
        super().__init__()
        self.kernels = kernels
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.gate, self.up = torch.nn.Linear(width, hidden, bias=False), torch.nn.Linear(width, hidden, bias=False)
        self.head = torch.nn.Linear(hidden, classes, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        normal = RmsNorm.apply(x, self.scale) if self.kernels else torch.nn.functional.rms_norm(x, x.shape[1:], self.scale, EPSILON)
        gate, up = self.gate(normal), self.up(normal)
        logits = self.head(SwiGlu.apply(gate, up) if self.kernels else torch.nn.functional.silu(gate) * up)
        return CrossEntropy.apply(logits, labels) if self.kernels else torch.nn.functional.cross_entropy(logits, labels)


def train(kernels: bool, steps: int) -> list[float]:
    """Return the losses of some steps of gradient descent on one batch, from the same start."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Block(kernels)
    x, labels = torch.randn(8, 32, generator=generator), torch.randint(0, 16, (8,), generator=generator)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
