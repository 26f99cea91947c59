"""Write what the tests prove of recovery where memory runs out into docs/several-gpus.md:
``just proved``.

A test says what it proves by ``@pytest.mark.proves(framework, where, how)``, a refusal also what
is refused; a tuple stands for each of its words. Tests are read, not imported or run.
"""

import ast
from collections import defaultdict
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "several-gpus.md"
BEGIN, END = "<!-- what the tests prove: just proved -->\n", "<!-- end -->\n"

FRAMEWORKS = (
    "built-in trainer",
    "functions (`run.backward`)",
    "accelerate",
    "Lightning",
    "transformers",
    "scripts",
)
PLACES = ("one GPU", "several GPUs", "FSDP2", "under torchrun")
HOWS = ("in the step", "new attempt", "refused")
OWN_AFFAIRS = {("scripts", "FSDP2")}
"""What the launcher knows nothing of."""

Proofs = dict[tuple[str, str, str], set[str]]


def proofs(folder: Path = ROOT / "tests") -> Proofs:
    """Return by framework, place and how what was refused there, of all marks in ``folder``."""
    proved: Proofs = defaultdict(set)
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.proves":
                given = [ast.literal_eval(argument) for argument in node.args]
                for words in product(*(w if isinstance(w, tuple) else (w,) for w in given)):
                    expected = zip(words, (FRAMEWORKS, PLACES, HOWS), strict=False)
                    is_right = all(word in words_here for word, words_here in expected)
                    if not is_right or len(words) != 3 + (words[2:3] == ("refused",)):
                        raise ValueError(f"{path}:{node.lineno}: {ast.unparse(node)}")
                    proved[words[:3]].update(words[3:])
    return proved


def table(proved: Proofs) -> str:
    """Return them as Markdown: a table, and below it what is refused."""
    lines = [f"| | {' | '.join(PLACES)} |", "|---" * (len(PLACES) + 1) + "|"]
    for framework in FRAMEWORKS:
        cells = (
            ", ".join(how for how in HOWS if (framework, place, how) in proved)
            or ("–" if (framework, place) in OWN_AFFAIRS else "")
            for place in PLACES
        )
        lines.append(f"| {framework} | {' | '.join(cells)} |")
    lines += ["", "Refused in one line:", ""]
    for framework in FRAMEWORKS:
        refused = [(place, proved.get((framework, place, "refused"))) for place in PLACES]
        listed = "; ".join(f"{place}: {', '.join(sorted(what))}" for place, what in refused if what)
        if listed:
            lines.append(f"- {framework}: {listed}")
    return "\n".join(lines) + "\n"


def page(proved: Proofs, text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(proved)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(proofs(), PAGE.read_text()))
