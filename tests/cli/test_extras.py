"""What is said where the packages of an optional part are not installed."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules[{package!r}] = None
sys.argv = ["milepost", *{args!r}]
from milepost.cli import main
main()
"""
PLAN = "plan --workload chat --lanes 2 --seconds 9 --seeds 1 --workers 1 --model qwen3.5-9b --rest-memory 3GiB"
PLAN += " --prefill-tps 9000 --decode-ms 9 --report plan.html"


@pytest.mark.parametrize(
    ("package", "args", "said"),
    [
        ("torch", ["serve"], "serve needs the package torch; pip install 'milepost[serve]'"),
        ("torch", ["models"], "models needs the package torch; pip install 'milepost[serve]'"),
        ("plotly", PLAN.split(), "--report needs the package plotly; pip install 'milepost[plan]'"),
    ],
)
def test_one_line_says_what_to_install(package, args, said, tmp_path):
    script = SCRIPT.format(package=package, args=args)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.strip().splitlines()[-1].startswith(f"milepost: {said}")
