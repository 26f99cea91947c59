"""README and docs: links resolve, examples run, commands parse, README stays short."""

import ast
import builtins
import importlib
import inspect
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import proved
import robust_train
import warm
from robust_train import current_run
from robust_train.cli.main import find_command, parse
from robust_train.cli.run_script import values_of
from robust_train.config.checks import checked
from robust_train.folder.state import Summary
from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec
from robust_train.sweep.record import Status, SweepJob, SweepTable, build_row

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S)


def _prose(page):
    return re.sub(r"`[^`\n]*`", "code", _FENCE.sub("", page.read_text()))


def _anchors(page):
    """The anchors that GitHub gives a page's headings."""
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", a) is not None for a in anchors)
        anchors.add(f"{slug}-{repeated}" if repeated else slug)
    return anchors


def _name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_relative_link_and_anchor_resolves(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            dead.append(link)
    assert not dead


def _blocks(page, language):
    fenced = _FENCE.findall(page.read_text())
    return [textwrap.dedent(code) for kind, code in fenced if kind == language]


def _parsed(code):
    try:
        return ast.parse(code)
    except SyntaxError:  # a snippet may show the inside of a function
        return ast.parse(f"def snippet():\n{textwrap.indent(code, '    ')}")


def _is_complete(code):
    """Whether a block defines or imports all names that it uses."""
    nodes = list(ast.walk(_parsed(code)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {name.id for name in names if not isinstance(name.ctx, ast.Load)} | {"__name__"}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | set(dir(builtins))
    for statement in nodes:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    is_used = any(isinstance(node, (ast.Call, ast.Expr)) for node in _parsed(code).body[1:])
    return is_used and all(name.id in bound for name in names)


COMPLETE = [
    pytest.param(code, id=f"{_name(page)}-{number}")
    for page in PAGES
    for number, code in enumerate(_blocks(page, "python"))
    # what is a file of a tutorial runs in test_tutorials
    if not page.name.startswith("tutorial-")
    # reads a sweep that the test of the recipe makes
    if "pandas" not in code
    if _is_complete(code) or "__main__" in code
]


@pytest.mark.parametrize("code", COMPLETE)
def test_complete_examples_run(code, world):
    if "hydra_main" in code:  # its project has folders beside it: only what it defines
        code = code.replace("__main__", "__elsewhere__")
    script = world.folder / "example.py"
    script.write_text(code)
    kind = None if "launch" in code else "vision"
    world.end(warm.start([script], world.folder, world.environ, kind), code=0)


def test_the_recipe_reads_a_sweep_into_pandas(tmp_path):
    pytest.importorskip("pandas", reason="not installed: the recipe of docs/sweeps.md")
    (code,) = [
        block for block in _blocks(ROOT / "docs" / "sweeps.md", "python") if "pandas" in block
    ]
    folder = tmp_path / "multirun" / "lr"
    attempt = Attempt(1, AttemptSpec((), 32, 2), end_step=10, seconds=4.0)
    rows = []
    for number, result in enumerate((0.5, None)):
        path = folder / str(number)
        path.mkdir(parents=True)
        Summary("completed", path, result=result, attempts=(attempt,)).write()
        job = SweepJob(number, (f"training.lr=0.{number}",), "id")
        job.write(path)
        rows.append(build_row(job, path))
    rows.append(SweepJob(2, ("training.lr=0.2",), "id", Status.NOT_STARTED))
    SweepTable("id", "gpu_queue", Status.ENDED, 0, 9.0, tuple(rows)).write(folder)
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert re.search(r"0 +0 +\[training\.lr=0\.0\] +completed +0\.5", printed), printed
    assert len(re.findall(r"cpu +32 +completed", printed)) == 2, printed


def test_the_examples_are_found():
    named = {str(example.id).rpartition("-")[0] for example in COMPLETE}
    assert named >= {"README.md", "docs/recovery.md", "docs/notebooks.md", "docs/bring-your-own.md"}


def _target(module, name):
    """What a block imports from us; of an integration, whose library may be absent, its source."""
    if not module.startswith("robust_train.integrations"):
        return getattr(importlib.import_module(module), name)
    nodes = ast.walk(ast.parse((ROOT / "src" / f"{module.replace('.', '/')}.py").read_text()))
    return next(node for node in nodes if getattr(node, "name", None) == name)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_python_block_uses_what_there_is(page):
    """Names that it imports from us, what it calls of ``run``, and the arguments of both."""
    run = current_run()
    for code in _blocks(page, "python"):
        nodes = list(ast.walk(_parsed(code)))
        ours = {
            alias.name: _target(node.module, alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("robust_train")
            # the page itself adds this feature, and another test runs it
            if "lost_steps" not in str(node.module)
            for alias in node.names
        }
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "run":
                assert hasattr(run, node.attr), ast.unparse(node)
            if not isinstance(node, ast.Call):
                continue
            if any(keyword.arg is None for keyword in node.keywords):
                continue
            called = ours.get(ast.unparse(node.func))
            if ast.unparse(node.func).startswith("run."):
                called = getattr(run, ast.unparse(node.func).removeprefix("run."))
            keywords = [str(keyword.arg) for keyword in node.keywords]
            if callable(called):
                inspect.signature(called).bind(*node.args, **dict.fromkeys(keywords))
            elif isinstance(called, ast.FunctionDef):
                declared = (*called.args.args, *called.args.kwonlyargs)
                parameters = {parameter.arg for parameter in declared}
                assert {*keywords} <= parameters, ast.unparse(node)


def _commands(page):
    """Every command of a page's shell blocks, as words."""
    commands = []
    for code in _blocks(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            groups = itertools.groupby(words, "&&".__eq__)
            commands += [list(command) for is_between, command in groups if not is_between]
    return commands


def _compose(config, words):
    """Compose a command's config; of a sweep, its first job's."""
    kept = []
    for override in OverridesParser.create().parse_overrides([w for w in words if w != "-m"]):
        if override.is_sweep_override() and not (
            override.is_choice_sweep() or override.is_range_sweep()
        ):
            kept.append(f"{override.key_or_group}=1e-3")
        elif not override.key_or_group.startswith("hydra"):
            first = next(override.sweep_string_iterator()) if override.is_sweep_override() else None
            kept.append(
                override.input_line if first is None else f"{override.key_or_group}={first}"
            )
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose(config, overrides=kept)
    checked(cfg)


def _recipes():
    justfile = (ROOT / "justfile").read_text()
    return {*re.findall(r"^([a-z-]+)(?: [a-z*]+)*:", justfile, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_parses(page):
    for words in _commands(page):
        match words:
            case [_, "train_robust.py", *rest] | ["robust-train", "train", *rest]:
                _compose("robust", rest)
            case [_, "train.py", *rest]:
                _compose("config", rest)
            case ["robust-train", *rest]:
                command, rest = find_command(rest[: rest.index(">")] if ">" in rest else rest)
                arguments = parse(command, rest)
                if command.name == "run":
                    values_of(arguments)
            case ["just", recipe, *_]:
                assert recipe in _recipes()


def test_the_recovery_table_says_what_tests_prove():
    """It is the table of what is recovered where."""
    text = proved.PAGE.read_text()
    assert proved.page(proved.proofs(), text) == text, "run: just proved"


@pytest.mark.parametrize("wrong", ['"lightning", "one GPU", "refused", "x"', '"Lightning"'])
def test_unknown_words_of_proof_are_refused(tmp_path, wrong):
    (tmp_path / "test_a.py").write_text(f"@pytest.mark.proves({wrong})\ndef test_a(): ...")
    with pytest.raises(ValueError, match=r"test_a\.py:1: "):
        proved.proofs(tmp_path)


def test_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_names_that_stay_exist():
    _, _, section = (ROOT / "README.md").read_text().partition("## Names that stay")
    rows = re.findall(r"^\| (\w+) \| (`.+`) \|$", section, re.M)
    names = {kind: re.findall("`(.+?)`", row) for kind, row in rows}
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose("robust")
    absent = object()
    missing = [key for key in names["keys"] if OmegaConf.select(cfg, key, default=absent) is absent]
    missing += {*names["functions"]} - {*robust_train.__all__}
    assert missing == []
    for command in names["commands"]:
        find_command(command.split()[1:])
    assert {recipe.removeprefix("just ") for recipe in names["recipes"]} <= _recipes()
    assert [*map(len, names.values())] == [16, 15, 6, 6], "none is taken off the list"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=_name)
def test_a_page_begins_with_whom_it_is_for(page):
    assert re.match(r"# .+\n\nFor ", page.read_text())


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^::: robust_train\.(\w+)$", page, re.M)
    assert sorted(named) == sorted(robust_train.__all__)


def test_public_functions_return_and_raise_public_names():
    hidden = []
    for name in robust_train.__all__:
        value = getattr(robust_train, name)
        if not inspect.isfunction(value):
            continue
        returned = str(inspect.signature(value).return_annotation)
        _, _, raised = (value.__doc__ or "").partition("Raises:")
        named = {*re.findall(r"\w+", returned), *re.findall(r"^ +(\w+): ", raised, re.M)}
        home = vars(inspect.getmodule(value))
        hidden += [
            f"{name}: {word}"
            for word in named - {*robust_train.__all__}
            if inspect.isclass(home.get(word)) and home[word].__module__.startswith("robust_train")
        ]
    assert hidden == []


NO_VERB = {
    *("A", "After", "All", "An", "As", "Before", "Best", "Called", "Every", "For", "From", "How"),
    *("In", "It", "More", "No", "Nothing", "One", "Others", "Somebody", "The", "Their", "There"),
    *("They", "This", "What", "When", "Where", "Whether", "Who", "Why", "With", "Within"),
}


def test_docstrings_begin_with_a_verb():
    wrong = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            decorators = map(ast.unparse, node.decorator_list)
            if any(decorator.endswith("property") for decorator in decorators):
                continue  # its docstring says what it is
            first, *_ = (ast.get_docstring(node) or "Do").split()
            if first.strip(",.:;") in NO_VERB or not first[0].isalpha():
                wrong.append(f"{path.name}:{node.lineno} {first}")
    assert wrong == [], "\n".join(wrong)


OTHER_WORDS = re.compile(
    r"\b(tenanc(y|ies)|quarantine\w*|rungs?|ladders?|verdicts?|whole numbers?|g(a|i)ven? back"
    r"|gives back|lets? go of|standing in line|put aside|(may|might) help|tells?|told|hears?|heard"
    r"|come round|sick)\b"
)


def test_there_is_one_word_for_a_thing():
    pages = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.j2")]
    lines = [
        f"{page.name}: {line.strip()}"
        for page in pages
        for line in page.read_text().splitlines()
        if OTHER_WORDS.search(line) and ".tell(" not in line
    ]
    assert lines == []


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra [docs]")
    pytest.importorskip("mkdocstrings", reason="the extra [docs]")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    names = (tmp_path / "api.html").read_text()
    assert names.count('class="doc doc-heading"') > 30
    assert re.findall(r":[a-z]+:<code>|::</p>", names) == [], "docstrings are shown as Markdown"
    listed = re.findall(r"^- \[.+\]\((.+\.html)\): .+", (tmp_path / "llms.txt").read_text(), re.M)
    assert {"recovery.html", "agents.html", "architecture.html"} <= set(listed)
    assert all((tmp_path / page).exists() for page in listed)
