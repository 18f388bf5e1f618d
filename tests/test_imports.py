"""Who may import whom (docs/design.md §2), read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import milepost

PACKAGE = Path(milepost.__file__).parent
EVERYWHERE = {"milepost.errors"}

# package: (parts of Milepost it may import, outside packages it may import; None: any)
ALLOWED: dict[str, tuple[set[str], set[str] | None]] = {
    "core": ({"core"}, {"numpy"}),
    "storage": ({"core", "storage"}, {"numpy"}),
    "sim": ({"core", "sim"}, {"numpy"}),
    "model": ({"model"}, {"numpy", "torch", "numba", "llvmlite", "safetensors"}),
    "engine": ({"core", "model", "storage", "engine"}, {"numpy", "torch", "tokenizers", "jinja2"}),
    "report": ({"report"}, {"plotly", "matplotlib"}),
    "server": ({"core.request", "core.tokens", "engine.facade", "engine.text", "server"}, None),
}
STANDARD = set(sys.stdlib_module_names)


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            found.add(node.module or "")
            if node.module == "milepost":
                found |= {f"milepost.{alias.name}" for alias in node.names}
    return found


def allowed(name: str, inside: set[str], outside: set[str] | None) -> bool:
    if name in EVERYWHERE or name == "milepost":
        return True
    if name.startswith("milepost."):
        rest = name.removeprefix("milepost.")
        return any(rest == part or rest.startswith(part + ".") for part in inside)
    top = name.split(".")[0]
    return top in STANDARD or outside is None or top in outside


@pytest.mark.parametrize("package", ALLOWED)
def test_package_imports_only_what_it_may(package):
    inside, outside = ALLOWED[package]
    wrong = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in sorted((PACKAGE / package).rglob("*.py"))
        for name in imports(file)
        if not allowed(name, inside, outside)
    ]
    assert not wrong, "\n".join(wrong)


def test_core_has_no_clock_no_chance_no_threads():
    banned = {"time", "datetime", "random", "threading", "asyncio", "logging", "os", "sys", "io", "socket"}
    wrong = [
        f"{file.name}: {name}"
        for file in sorted((PACKAGE / "core").rglob("*.py"))
        for name in imports(file)
        if name.split(".")[0] in banned
    ]
    assert not wrong, "\n".join(wrong)


def test_core_and_sim_load_without_torch():
    blocker = (
        "import sys\n"
        "for name in ('torch', 'numba', 'tokenizers', 'starlette', 'uvicorn'): sys.modules[name] = None\n"
        "import milepost.core.audit, milepost.sim.executor\n"
    )
    run = subprocess.run([sys.executable, "-c", blocker], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
