"""Matrix products with weights: y = x W^T, in the weights' dtype.

On a CPU torch sends float32 products to MKL, which on processors not made by Intel stays far below the machine's speed,
and bfloat16 ones to oneDNN, which then reorders the weights for its kernels at each call. For both torch reaches oneDNN
with weights reordered once through the operators that its own compiler emits. So these are used where they exist and
agree, else F.linear.
"""

import functools

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

_ROWS = 8  # of the products whose favourite layout is asked for: decode, and prefill loses nothing by it


class Linear:
    """A weight [outputs, inputs] and the fastest faithful way to multiply with it."""

    def __init__(self, weight: Tensor, *, keep_layout: bool = False) -> None:
        """keep_layout: the tensor is shared (tied embeddings), so don't make a reordered copy."""
        reordered = _onednn(weight) and not keep_layout
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if reordered else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inputs] -> [rows, outputs]."""
        return product(x, self.weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs] times the transpose of weight [outputs, inputs]."""
    if _onednn(weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def _onednn(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and _onednn_works(weight.dtype)


@functools.cache
def _onednn_works(dtype: torch.dtype) -> bool:
    """Whether the operators exist in this torch, for this dtype on this processor, and compute what they should."""
    x = torch.linspace(-1, 1, 24, dtype=dtype).view(3, 8)
    weight = torch.linspace(-2, 1, 40, dtype=dtype).view(5, 8)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        ys = [torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in (weight, packed)]
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    expected = F.linear(x.double(), weight.double())
    tolerance = torch.finfo(dtype).eps * 8
    return all(torch.allclose(y.double(), expected, rtol=tolerance, atol=tolerance) for y in ys)
