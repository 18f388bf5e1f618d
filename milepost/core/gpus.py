"""Memory of known GPUs, in bytes. Any other is given by its memory."""

from milepost.errors import ConfigError

GIB, MIB = 2**30, 2**20
GPUS = {"h100": 80 * GIB, "h200": 141 * GIB, "b200": 180 * GIB, "b300": 275040 * MIB}


def memory(name: str) -> int:
    """Bytes of the GPU called `name`. Raises `ConfigError`."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError("--gpu", name, f"must be one of {', '.join(GPUS)}, or use --gpu-memory", "h200")
    return found
