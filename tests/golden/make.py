"""Record the golden journals from real runs: python tests/golden/make.py [NAME …]

Each folder has what a run left, and ``expected.json``, the story of it. Record them again when the
schema of the journal changes. When a story is told in other words, ``--tell`` writes the
expectations only; read the difference.
"""

import json
import platform
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

from golden.runs import CASES, bench_of  # noqa: E402
from golden.told import told  # noqa: E402
from robust_train.report.sources import read_sources  # noqa: E402
from robust_train.report.story import story_of  # noqa: E402
from world import ROOT  # noqa: E402

KEPT = ("journal.jsonl", "memory.jsonl", "summary.json", "sweep.json", "sweep_job.json")


def keep(folder, scratch, name):
    """Copy what a report is made from, without the names of this machine."""
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    names = {
        str(scratch): "/runs",
        sys.executable: "python",
        sys.prefix: "/python",
        str(ROOT): "/project",
        platform.node(): "host",
    }
    for path in sorted(folder.rglob("*")):
        if path.name in KEPT:
            text = path.read_text()
            for actual, neutral in names.items():
                text = text.replace(actual, neutral)
            text = re.sub(r'"error": "[\w+/=]+"', '"error": null', text)
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)


def tell(folder):
    """Write the expectations of the journals in a folder."""
    for journal in sorted(folder.rglob("journal.jsonl")):
        text = json.dumps(told(story_of(read_sources(journal.parent))), indent=1)
        (journal.parent / "expected.json").write_text(text + "\n")


def main(names):
    if names == ["--tell"]:
        tell(HERE)
        return
    recorded = [name for name in CASES if (HERE / name).exists()]
    for name in names or recorded:
        with bench_of(ROOT) as bench:
            bench.run_dir = bench.folder / name
            CASES[name](bench)
            keep(bench.run_dir, bench.folder, name)
        tell(HERE / name)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
