"""Data that lies beside the project and is never committed: public traces and measured runs."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "shared"


def shared(path: str) -> Path:
    """The file or folder, or a skip that says what is missing and where."""
    found = ROOT / path
    if not found.exists():
        pytest.skip(f"shared data not present at ../shared/{path}")
    return found
