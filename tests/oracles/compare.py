"""Comparisons that say where they fail, and the two ways to get a gradient without the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def worst_error(got: Tensor, want: Tensor) -> float:
    """Largest |got - want| over the largest |want| (both in f64); NaN in either counts as infinite."""
    error = (got.double() - want.double()).abs()
    largest = want.double().abs().max().item()
    worst = torch.nan_to_num(error, nan=torch.inf).max().item()
    return worst / largest if largest > 0 else worst


def assert_close(name: str, got: Tensor, want: Tensor, bound: float) -> None:
    """|got - want| <= bound * largest |want| everywhere; a failure lists the worst entries."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert_within(name, got, want, torch.as_tensor(bound * want.double().abs().max().item()))


def assert_within(name: str, got: Tensor, want: Tensor, allowed: Tensor) -> None:
    """|got - want| <= allowed, entry by entry (allowed broadcasts); a failure lists the worst entries."""
    got, want = got.detach().double(), want.detach().double()
    allowed = allowed.double().expand(want.shape)
    error = torch.nan_to_num((got - want).abs(), nan=torch.inf)
    excess = error - allowed
    if not bool((excess > 0).any()):
        return
    order = excess.flatten().argsort(descending=True)[:8].tolist()
    lines = []
    for at in order:
        where = tuple(i.item() for i in torch.unravel_index(torch.tensor(at), want.shape))
        a, b, off, limit = (x.flatten()[at].item() for x in (got, want, error, allowed))
        lines.append(f"  {where}: got {a:.9g}, expected {b:.9g}, off by {off:.3g}, allowed {limit:.3g}")
    count = int((excess > 0).sum())
    raise AssertionError(f"{name}: {count} of {want.numel()} entries are off; the worst:\n" + "\n".join(lines))


def assert_no_worse_than(name: str, got: Tensor, rival: Tensor, want: Tensor) -> None:
    """Error against f64 `want`: at most twice that of torch's own op in this dtype, plus 4 ulp of the largest entry."""
    assert got.dtype == rival.dtype, f"{name}: {got.dtype}, expected {rival.dtype}"
    largest = want.double().abs().max().item()
    rival_error = (rival.detach().double() - want.double()).abs().max().item()
    assert_within(name, got, want, torch.as_tensor(2 * rival_error + 4 * torch.finfo(got.dtype).eps * largest))


def assert_rounded_once(name: str, got: Tensor, want: Tensor) -> None:
    """A bf16 result of a kernel that computes in f32: off by half a bf16 ulp of the largest entry, and f32's noise."""
    assert got.dtype == torch.bfloat16, f"{name}: {got.dtype}, expected bf16"
    assert_close(name, got, want, 1.01 * torch.finfo(got.dtype).eps / 2)


def autograd(f: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """f(*inputs) and the gradients of sum(f * dout) for every input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    return out.detach(), tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))


def central_differences(f: Callable[[], float], x: Tensor, step: float = 1e-4) -> Tensor:
    """Gradient of f() for x, changed in place entry by entry and put back.

    Fourth-order stencil: with this step, truncation and f64 rounding both stay near 1e-11 of a smooth f.
    """
    gradient = torch.empty_like(x)
    flat, into = x.view(-1), gradient.view(-1)
    for i in range(flat.numel()):
        at = flat[i].item()
        values = []
        for k in (-2, -1, 1, 2):
            flat[i] = at + k * step
            values.append(f())
        flat[i] = at
        into[i] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
    return gradient


def assert_differences(
    name: str, forward: Callable[..., Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor], dout: Tensor
) -> None:
    """Central differences of sum(forward(*inputs) * dout) agree with grads to 1e-6 of the largest gradient entry."""
    inputs = [x.clone() for x in inputs]
    largest = max(g.abs().max().item() for g in grads)
    for i, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
        numeric = central_differences(lambda: float((forward(*inputs) * dout).sum()), x)
        assert_within(f"{name}, input {i}, finite differences", grad, numeric, torch.as_tensor(1e-6 * largest))


class Unchanged:
    """Clones of tensors, to show afterwards that a kernel left them alone."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.clones = [x.clone() for x in tensors]

    def check(self) -> None:
        for i, (x, clone) in enumerate(zip(self.tensors, self.clones, strict=True)):
            assert torch.equal(x, clone), f"argument {i} was modified"
