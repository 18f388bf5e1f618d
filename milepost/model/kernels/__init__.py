"""The loops under the layers, twice: `plain` with tensor operations, which define them, and `compiled` for CPUs.

`compiled` puts the numba loops of `numba_*.py` behind the interface of `plain`.
"""

from milepost.model.kernels.plain import Kernels, TorchKernels, choose_kernels

__all__ = ["Kernels", "TorchKernels", "choose_kernels"]
