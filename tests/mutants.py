"""Plant the bugs that such caches have had, one at a time, and see that the model checks catch each.

    python -m tests.mutants [NAME …]

A mutant is a change of a few words in a copy of the package. One that survives, or whose text is no longer found,
is a failure: then the checks, or this list, have a hole.
"""

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECKS = ["tests/core/test_cache_model.py", "tests/core/test_scheduler_model.py"]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "a state goes and its window stays",
        "core/cache.py",
        "        self.windows.unkeep(node.window)\n",
        "",
    ),
    Mutant(
        "the window is trimmed one row too far",
        "core/window.py",
        "        low = position - self._pool.reach\n",
        "        low = position - self._pool.reach + 1\n",
    ),
    Mutant(
        "the window of a pinned state is not in use",
        "core/cache.py",
        "            self.windows.use(node.window)\n",
        "",
    ),
    Mutant(
        "a resumed sequence does not hold the window it reads",
        "core/window.py",
        "        self._pool.use(rows)\n        self._rows, self.low",
        "        self._rows, self.low",
    ),
    Mutant(
        "window pressure evicts checkpoints that free nothing",
        "core/cache.py",
        "lambda holder: windows.spare(holder.window) > 0",
        "",
    ),
    Mutant(
        "a rolled snapshot keeps its window",
        "core/scheduler.py",
        "            self.cache.windows.unuse(sequence.snapshot.window)\n",
        "            pass\n",
    ),
    Mutant(
        "admission forgets the windows of those who run",
        "core/scheduler.py",
        "for s in (*self._running.values(), sequence)]",
        "for s in (sequence,)]",
    ),
    Mutant(
        "split moves the checkpoint up",
        "core/tree.py",
        "        upper.kv.pins = lower.kv.pins\n",
        "        upper.kv.pins = lower.kv.pins\n        upper.state, lower.state = lower.state, upper.state\n",
    ),
    Mutant("split forgets pins", "core/tree.py", "        upper.kv.pins = lower.kv.pins\n", ""),
    Mutant(
        "state eviction ignores pins",
        "core/evict.py",
        "if node.state.pins == 0 and worth(node):\n                    return",
        "if worth(node):\n                    return",
    ),
    Mutant(
        "release does not requeue the leaf",
        "core/cache.py",
        "        if node.kv.pins == 0 and node.parent is not None:\n            self.victims.add_rows(node)\n",
        "        if node.kv.pins == 0 and node.parent is not None and node.children:\n"
        "            self.victims.add_rows(node)\n",
    ),
    Mutant("prefix compare off by one", "core/tokens.py", "else size", "else size - 1"),
    Mutant(
        "duplicate state leaks",
        "core/cache.py",
        "            self.slots.give(checkpoint.slot, lease.owner)\n            node.note = min",
        "            node.note = min",
    ),
    Mutant(
        "resume inside an edge",
        "core/cache.py",
        "        return Match(namespace, node, walk.node, node.end, depth, why)\n",
        "        return Match(namespace, node, walk.node, depth if walk.partial else node.end, depth, why)\n",
    ),
    Mutant(
        "acquire forgets to lock the leaf",
        "core/cache.py",
        "        self._pin_path(node, None)\n",
        "        self._pin_path(node.parent, None)\n",
    ),
    Mutant(
        "evicted leaf keeps its state",
        "core/cache.py",
        "            self.drop_state(leaf, Loss.KV_PRESSURE)\n",
        "            pass\n",
    ),
    Mutant(
        "publish reports one row too few",
        "core/cache.py",
        "            own = rows[node.end : stop].copy()\n            self.rows.move(own,",
        "            own = rows[node.end : stop].copy()\n            self.rows.move(own[:-1],",
    ),
    Mutant(
        "parent of an evicted leaf not requeued",
        "core/cache.py",
        "        self.victims.reconsider(parent, coldest=True)\n",
        "",
    ),
    Mutant(
        "a state is stored at another depth",
        "core/scheduler.py",
        "Snapshot(mark.position, mark.slot",
        "Snapshot(min(mark.position + 1, chunk.stop), mark.slot",
    ),
    Mutant(
        "a copied checkpoint is let go before it was copied",
        "core/cache.py",
        "            self._pin_state(match.node)\n",
        "            lease.state = None\n",
    ),
    Mutant(
        "adopted rows are not exchanged",
        "core/cache.py",
        "            own[:] = node.kv.device\n",
        "",
    ),
    Mutant(
        "the cap frees forks",
        "core/cache.py",
        "or len(node.children) != 1:",
        "or not node.children:",
    ),
    Mutant(
        "a marked fork stays marked",
        "core/cache.py",
        "                self.victims.unmark(parent)\n",
        "                pass\n",
    ),
    Mutant(
        "namespaces share a root",
        "core/tree.py",
        "        root = self.roots.get(namespace)\n        if root",
        "        root = self.roots.get('')\n        if root",
    ),
    Mutant(
        "an abort forgets the tracking slots",
        "core/scheduler.py",
        "for slot in (sequence.slot, *sequence.tracking):",
        "for slot in (sequence.slot,):",
    ),
    Mutant(
        "admission forgets what running prefills still need",
        "core/scheduler.py",
        "rows - promised < ",
        "rows < ",
    ),
    Mutant(
        "a preempted request comes back too early",
        "core/scheduler.py",
        "sequence.prompt + sequence.max_new - 1 if sequence.preempted else sequence.known",
        "sequence.prompt",
    ),
    Mutant(
        "the last prompt token is taken from the cache",
        "core/scheduler.py",
        "sequence.key(sequence.known - 1), sequence.request.namespace",
        "sequence.key(sequence.known), sequence.request.namespace",
    ),
]


def caught(mutant: Mutant) -> str:
    """ "caught", or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        ignore = shutil.ignore_patterns("demo", "__pycache__", "model", "engine", "server")
        shutil.copytree(ROOT / "milepost", copy / "milepost", ignore=ignore)
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignore)
        target = copy / "milepost" / mutant.file
        text = target.read_text()
        if text.count(mutant.old) != 1:
            return f"its text stands {text.count(mutant.old)} times in {mutant.file}"
        target.write_text(text.replace(mutant.old, mutant.new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--hypothesis-profile=first-failure",
            "--timeout=120",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
        ]
        run = subprocess.run([*command, *CHECKS], cwd=copy, capture_output=True, text=True, timeout=600)
        return {0: "SURVIVED", 1: "caught"}.get(run.returncode, run.stdout[-2000:] + run.stderr[-2000:])


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or m.name in names]
    bad = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, verdict in zip(chosen, pool.map(caught, chosen), strict=True):
            bad += verdict != "caught"
            print(f"{verdict:10} {mutant.name}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants caught")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
