"""Known GPUs: memory in bytes, and peak speeds. Any other is given by its memory, or by a `Gpu`.

Values of AIConfigurator's system files; speeds are those of data sheets, without sparsity.
"""

from dataclasses import dataclass

from milepost.errors import ConfigError

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """`bandwidth` of the memory and `link` to the other GPUs (one way), in bytes/s; dense bfloat16 FLOP/s.

    The links are those of NVLink 4 and 5, from memory, unverified.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    link: float


HARDWARE = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 80 * GIB, 3.35e12, 989e12, 450e9),
        Gpu("h200", 141 * GIB, 4.8e12, 989e12, 450e9),
        Gpu("b200", 180 * GIB, 7.7e12, 2250e12, 900e9),
        Gpu("b300", 275040 * MIB, 7.75e12, 2250e12, 900e9),
    )
}

GPUS = {name: gpu.memory for name, gpu in HARDWARE.items()}
"""Bytes of memory."""


def find(name: str) -> Gpu:
    """The GPU called `name`. Raises `ConfigError`."""
    found = HARDWARE.get(name.lower())
    if found is None:
        raise ConfigError("--gpu", name, f"must be one of {', '.join(GPUS)}, or use --gpu-memory", "h200")
    return found


def memory(name: str) -> int:
    """Bytes of the GPU called `name`. Raises `ConfigError`."""
    return find(name).memory
