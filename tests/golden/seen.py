"""Record what users see of the golden runs: python tests/golden/seen.py [NAME …]

A file of ``seen/`` has the exit codes, the screens and the files that other programs read. What a
clock, the machine or chance gives is replaced by placeholders, everything else is the same to the
byte. With ``--project`` the commands are those of another checkout, and ``--to`` names another
folder than ``seen/``, to compare both. Run it with the interpreter of that checkout.
"""

import argparse
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

from golden.runs import CASES, bench_of  # noqa: E402
from world import ROOT  # noqa: E402

FILES = {"summary.json", "state.json", "sweep.json", "journal.jsonl"}
MEASURED = (
    r"time|started|since|updated|ended|pid|attempt_pid|\w*seconds\w*|\w+_share|share|useful|repeated"
    r"|skipped|waiting|starting|saving|stalled|samples_per_second|resident|max_resident"
    r"|before_bytes|after_bytes|returned_bytes|peak_memory_bytes"
)
PLACEHOLDERS = {
    # an attempt that ends early has a figure or none, as there was time for
    r'"speed": \[[^\]]*\]': '"speed": <speed>',
    rf'"({MEASURED})": [\d.e+-]+': r'"\1": <\1>',
    r'"steps": \d+(,\s+"seconds_per_step")': r'"steps": <steps>\1',
    r'"(python|torch|cuda|host|user)": "[^"]*"': r'"\1": "<\1>"',
    r"\b\d\d:\d\d:\d\d\b": "<clock>",
    r"(< )?(\b\d+ min )?\b\d+(\.\d+)? s\b|\b\d+ min\b": "<seconds>",
    r"[\d.,]+ samples/s\b": "<samples/s>",
    # a short attempt has as many samples as there was time for
    r'"unknown \([^"]*\)"': '"unknown (<reason>)"',
    # Python 3.10 draws none below a traceback's lines
    r"(\\n|\n|\?) *[~^]+(?=\\n|\n|\?)": "",
    # of the stacks of a stalled attempt the trainer's frames are kept
    r"([Tt]hread) 0x[0-9a-f]+": r"\1 <thread>",
    r'  File \\"(?!/tests/)[^"]*\\", line \d+ in [^\\]+\\n': "",
    # our own lines move
    r'(/project/src/robust_train/[^"]*\\", line )\d+': r"\1<line>",
    # torchrun's own messages
    r"(?m)^[EIW]\d{4} .*\n": "",
    # Torch warns of a rank whose peer has ended, if the rank still waits then.
    r"(?m)^\[W\d{4} .*TCPStore.*\n(?:(?:Exception raised|frame #|<omitting ).*\n)*\n?": "",
    r"(> )?\d+ % between steps": "<share> between steps",
    # columns are as wide as what they have, and wrap what is left
    r"\n {24,}": " ",
    r"(?<=\S) {2,}(?=\S)": "  ",
    # the last digits are the processor's
    r"\d+\.\d{5,}": lambda number: f"{float(number[0]):.4g}",
}


def seen(bench, name):
    """Run a case, and return what its users see."""
    CASES[name](bench)
    bench.robust_train("ps", "--json")
    bench.robust_train("status", "--json", bench.run_dir)
    parts = []
    for number, ended in enumerate(bench.ended, 1):
        parts.append(f"=== command {number}: exit code {ended.returncode}\n{ended.stdout}")
        parts.append(f"=== command {number}: stderr\n{ended.stderr}")
    paths = sorted(path for path in bench.run_dir.rglob("*") if path.is_file())
    names = [f"{path.relative_to(bench.run_dir)}\n" for path in paths]
    parts.append("=== files\n" + "".join(names))
    parts += [
        f"=== {path.relative_to(bench.run_dir)}\n{path.read_text()}"
        for path in paths
        if path.name in FILES
    ]
    return normal("\n".join(parts), bench)


def normal(text, bench):
    """Return a text with placeholders for what differs between two runs of the same case."""
    paths = {
        str(bench.folder): "/runs",
        sys.executable: "python",
        sys.prefix: "/python",
        str(TESTS): "/tests",
        str(bench.project): "/project",
    }
    for path, placeholder in paths.items():
        text = text.replace(path, placeholder)
    jobs = dict.fromkeys(re.findall(r"\b[0-9a-f]{32}\b", text))
    for number, job in enumerate(jobs, 1):
        text = text.replace(job, f"<job {number}>").replace(job[:8], f"<id {number}>")
    for pattern, placeholder in PLACEHOLDERS.items():
        text = re.sub(pattern, placeholder, text)
    lines = text.splitlines(keepends=True)
    # A clock sends these: a job that takes longer has more of them.
    return "".join(
        line for line in lines if not (line.startswith('{"time"') and '"event": "speed"' in line)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--project", type=Path, default=ROOT)
    parser.add_argument("--to", type=Path, default=HERE / "seen")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        with bench_of(options.project) as bench:
            (options.to / f"{name}.txt").write_text(seen(bench, name))
        print(name, flush=True)


if __name__ == "__main__":
    main()
