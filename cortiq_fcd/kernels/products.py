"""Matrix products of f32 tensors, in the precision that the run has chosen.

`f32` is IEEE f32. `bf16` rounds both factors to bf16 (8 bits of mantissa) on their way into the product and sums in
f32; what goes in and comes out stays f32, so masters, norms, losses, attention and optimizer are as they were. It takes
units that multiply bf16: AMX or AVX512-BF16 of a CPU, tensor cores of a GPU. (Products too small to gain from it may
stay f32: the library below decides.)

The choice is one of the process, like the number of threads: it is made once, by whoever chooses the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["f32", "bf16"]
# Fewer rows than this (a decoding step) are bound by reading the weights: rounding them costs more than it saves.
FEW_ROWS = 8

_precision: Precision = "f32"


def set_precision(precision: Precision) -> None:
    """Choose for all products from now on. Raises ValueError for bf16 on a torch or a processor that can't."""
    global _precision
    if precision == "bf16" and not (cpu_has_bf16() or torch.cuda.is_available()):
        raise ValueError("bf16 products need AMX, AVX512-BF16 or a GPU with bf16 units, and a recent torch")
    _precision = precision


def get_precision() -> Precision:
    """What `set_precision` chose; f32 until then."""
    return _precision


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 and this torch lets f32 products use it."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return hasattr(_switch(), "fp32_precision") and bool(
        capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    )


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a b, for a [N, K] and b [K, M]."""
    if not _rounds(a):
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        product = torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
        return product if out is None else out.copy_(product)
    with _bf16_on_cpu():
        return torch.mm(a, b, out=out)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """bias + a b, for bias [M], a [N, K] and b [K, M]."""
    if not _rounds(a):
        return torch.addmm(bias, a, b, out=out)
    return mm(a, b, out=out).add_(bias)


def _rounds(a: Tensor) -> bool:
    return _precision == "bf16" and a.dtype is torch.float32 and a.shape[0] >= FEW_ROWS


@contextmanager
def _bf16_on_cpu() -> Iterator[None]:
    # torch's switch is global and would round the products of attention too, whose exponentials can't bear it.
    switch = _switch()
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before


def _switch() -> Any:
    """torch's setting for f32 products on the CPU; null before torch 2.9. Its types don't know it."""
    return getattr(torch.backends.mkldnn, "matmul", None)
