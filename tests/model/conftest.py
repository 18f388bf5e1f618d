"""Reference models, made once per session and saved as transformers saves them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.model import load_decoder
from tests.model.oracle import FAMILIES, make_reference, save

# As in tests/engine: two threads of two processes on two cores spin at each other's barriers.
torch.set_num_threads(1)


@dataclass
class Golden:
    """A model by transformers, and the folder it was saved to."""

    reference: Any
    folder: Path


@pytest.fixture(scope="session")
def goldens(tmp_path_factory):
    """Makes the golden model of a family, once."""
    made: dict[str, Golden] = {}

    def get(family: str) -> Golden:
        if family not in made:
            model = make_reference(family)
            # One family in shards, so that both ways of storing weights are read.
            options = {"max_shard_size": "100KB"} if family == "qwen3_next" else {}
            made[family] = Golden(model, save(model, tmp_path_factory.mktemp(family), **options))
        return made[family]

    return get


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def golden(request, goldens):
    return goldens(request.param)


@pytest.fixture(scope="session")
def decoders():
    """Loads a folder with some options, once."""
    loaded = {}

    def get(folder: Path, dtype: torch.dtype = torch.float32, kernels: str = "auto"):
        key = folder, dtype, kernels
        if key not in loaded:
            loaded[key] = load_decoder(folder, dtype=dtype, kernels=kernels)
        return loaded[key]

    return get
