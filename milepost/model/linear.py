"""Matrix products with weights: y = x W^T, in the weights' dtype.

On a CPU torch sends float32 products to MKL, which on processors not made by Intel stays far below the machine's speed.
oneDNN, which torch uses for bfloat16 anyway, is two to three times as fast there; torch reaches it for float32 only
through the operator its own compiler emits. So that operator is used where it exists and agrees, else F.linear.
"""

import functools

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class Linear:
    """A weight [outputs, inputs] and the fastest faithful way to multiply with it."""

    def __init__(self, weight: Tensor, *, keep_layout: bool = False) -> None:
        """keep_layout: the tensor is shared (tied embeddings), so don't make a copy in a faster layout."""
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and _onednn_works()
        if self._packed and not keep_layout:
            weight = weight.t().contiguous().t()  # the same matrix with its inputs outermost in memory
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, inputs] -> [rows, outputs]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return F.linear(x, self.weight)


@functools.cache
def _onednn_works() -> bool:
    """Whether the operator exists in this torch and computes what it should."""
    x = torch.linspace(-1, 1, 24).view(3, 8)
    weight = torch.linspace(-2, 1, 40).view(5, 8)
    try:
        y = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.allclose(y, F.linear(x, weight), rtol=1e-5, atol=1e-5)
