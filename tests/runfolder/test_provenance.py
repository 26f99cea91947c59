"""The command that a job ran with and continues with, and no secrets."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from another_user import needs_root
from robust_train.folder import secrets
from robust_train.folder.hydra_state import run_folder
from robust_train.folder.resume_command import sweep_resume_command
from robust_train.folder.secrets import public_command, public_variables


def test_secrets_are_left_out():
    command = (
        "python t.py lr=1 wandb.api_key=abc --token abc +notify.urls=[a://b] s3://me:pw@host/x"
    )
    shown = "python t.py lr=1 wandb.api_key=… --token … +notify.urls=… s3://…@host/x"
    assert public_command(command.split()) == shown.split()
    harmless = [
        "+model={max_tokens:1000000000}",
        "model.name=vit_base_patch16_clip_224",
        "hydra.run.dir=/tmp/pytest-of-root/pytest-220/test_a_long_name0/run",
        "training.num_tokens=5",
        "model.tokenizer=gpt2",
        "data.image_key=pixels",
        "--dist-url",
        "tcp://127.0.0.1:23456",
        "--tracking-uri=http://mlflow:5000",
        "trainer.argv=[python,train.py,--batch_size,'{batch_size}']",
    ]
    assert public_command(harmless) == harmless
    secret = ("SLURM_JWT", "HF_TOKEN", "HOME", "ROBUST_TRAIN_NOTIFY_URLS")
    shown = {"CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/h", "TORCH_PROXY": "http://…@h"}
    given = {**dict.fromkeys(secret, "a://b"), **shown, "TORCH_PROXY": "http://u:p@h"}
    assert public_variables(given) == shown


SECRET = "aB3" + "x" * 40


@pytest.mark.parametrize(
    "word",
    [
        "+db.password=Tr0ub4dor&3!",
        "+db.passwd='correct horse battery'",
        "+login={user: ada, password: short7!}",
        "+wandb={api_key:0a1b2c3d4e}",
        "+db.dsn=mysql://ada:pw@host/runs",
        "notify.command=[curl,-H,'Authorization: Bearer x',https://host]",
        "trainer.argv=[python,train.py,--token,abc]",
        f"+hub=hf_{SECRET}",
        f"+api=sk-proj-{SECRET}",
        f"+git=ghp_{SECRET[:36]}",
        "+cloud=AKIAIOSFODNN7EXAMPLE",
        "+chat=https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
        "+jwt_of_mine=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3",
        "+tls='-----BEGIN RSA PRIVATE KEY-----'",
    ],
)
def test_overrides_are_hidden_by_name_or_form(word):
    assert public_command([word]) == [f"{word.partition('=')[0]}=…"]


FORMS = """
ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- glrt- hf_ wandb_v1_ sk- sk-proj- sk-ant- sk-or-
gsk_ r8_ SG.aB3xxxxxxxxxxxxxxxxxxx. nvapi- xoxb- xoxp- xapp- AIza ya29. GOCSPX- npm_ pypi-
dckr_pat_ dckr_oat_ sk_live_ rk_live_ sk_test_ whsec_
shpat_ shpca_ shppa_ shpss_ hvs. hvb. glsa_ sntrys_ sntryu_
tskey-auth- ntn_ eyJhbGciOiJIUzI1NiJ9.eyJ
"""
"""What the tokens of an issuer begin with, in front of letters and digits."""
HEX = "key- dop_v1_ dapi"
WHOLE = (
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "ABIAIOSFODNN7EXAMPLE",
    "ACCAIOSFODNN7EXAMPLE",
    "123456:ABC-DEF1234ghIkl-zyx57W2v1u123ew11",
    "https://hooks.slack.com/services/T0/B0/X",
    "https://discord.com/api/webhooks/1/x",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
)
TOKENS = [f"{prefix}{SECRET}" for prefix in FORMS.split()]
TOKENS += [f"{prefix}{'0af1' * 10}" for prefix in HEX.split()]
TOKENS += WHOLE


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_hidden_wherever_it_stands(token):
    words = [token, f"+hub={token}", f"+a={{b:[x,'{token}']}}", f"--hub={token}"]
    assert public_command(words) == ["…", "+hub=…", "+a=…", "--hub=…"]
    assert public_variables({"HF_HUB": token, "HF_HOME": "/h"}) == {"HF_HOME": "/h"}


def test_each_form_has_its_source_and_a_token():
    """A form without a row above is a promise without a proof."""
    lines = Path(secrets.__file__).with_name("secrets.txt").read_text().splitlines()
    sections = "\n".join(lines).split("\n\n")[1:]
    assert len(sections) >= 30
    for section in sections:
        source, *forms = section.splitlines()
        assert source.startswith("# https://"), section
        for form in forms:
            assert any(re.search(form, token) for token in TOKENS), form


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("+wandb.key=0a1b2c3d4e", "+wandb.key=…"),
        ("+openai_key=open-sesame", "+openai_key=…"),
        ("OPENAI_KEY=sesame", "OPENAI_KEY=…"),
        ("+db.password=123456", "+db.password=…"),
        ("+login={user: ada, password: 123456}", "+login=…"),
        ("+login={user: ada, password: null}", "+login={user: ada, password: null}"),
        ("+db.key=12", "+db.key=12"),
        ("+sort.key=name", "+sort.key=name"),
        ("+aws.credentials=x", "+aws.credentials=…"),
        ("s3://me:p@ss@host/x@2", "s3://…@host/x@2"),
        ("http://host/a@b", "http://host/a@b"),
        ("+run=sk-learn-experiments-of-2026", "+run=sk-learn-experiments-of-2026"),
        ("+disk-a1b2c3d4e5f6a7b8c9d0=1", "+disk-a1b2c3d4e5f6a7b8c9d0=1"),
        ("model.name=npm_like_names_of_a_model", "model.name=npm_like_names_of_a_model"),
    ],
)
def test_what_only_looks_like_a_secret_is_shown(word, shown):
    assert public_command([word]) == [shown]


def test_an_option_hides_the_next_word():
    words = "--key 0a1b2c3d --image-key pixels --api-key 1234 --key 7 lr=1"
    shown = "--key … --image-key pixels --api-key … --key 7 lr=1"
    assert public_command(words.split()) == shown.split()


def test_no_shared_record_contains_a_secret(world):
    """Only the user can open the folder."""
    secret = "Tr0ub4dor&3!"
    words = [f"+db.password='{secret}'", f"+hub=hf_{SECRET}", "hydra.verbose=false"]
    world.train("plain", *words, code=0)
    assert world.run_dir.stat().st_mode & 0o777 == 0o700
    names = ("report.html", "summary.json", "journal.jsonl", "state.json", "environment.json")
    for name in names:
        text = (world.run_dir / name).read_text()
        assert secret not in text, name
        assert SECRET not in text, name
    assert "+hub=…" in (world.run_dir / "report.html").read_text()


@pytest.mark.parametrize(("others", "mode"), [("", 0o700), ("a", 0o755)])
def test_who_else_may_read_a_run_folder(tmp_path, others, mode):
    tmp_path.chmod(0o755)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / (others or ".hydra")).touch()
    run_folder(tmp_path, "")
    assert tmp_path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("owner", "mode", "who"),
    [
        pytest.param(3001, 0o755, "3001 can", marks=needs_root),
        pytest.param(65534, 0o755, None, marks=needs_root, id="of another namespace"),
        (os.geteuid(), 0o777, "every user of this machine can"),
        (os.geteuid(), 0o1777, None),
    ],
)
def test_an_unsafe_run_folder_is_warned_of(tmp_path, caplog, owner, mode, who):
    """Others can replace files in it."""
    (tmp_path / "train.py").touch()
    os.chown(tmp_path, owner, -1)
    tmp_path.chmod(mode)
    run_folder(tmp_path, "")
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (who is not None)
    assert not warned or f"{who} replace the code and checkpoints" in warned[0]


@pytest.mark.parametrize(
    "folder", ["/a/2026-01-31_x.y", "/a b/c", "/a[1]/{x},=y%20 $z", "/ü/(1)", "/it's", '/"a"']
)
def test_a_command_resumes_whatever_its_folders_name(folder, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "lr=1", "hydra.sweep.dir=/other"])
    *words, last = shlex.split(sweep_resume_command(Path(folder), "/my work"))
    assert words == ["cd", "/my work", "&&", sys.executable, "train.py", "lr=1"]
    override = OverridesParser.create().parse_override(last)
    value = override.value()
    assert (override.key_or_group, getattr(value, "text", value)) == ("hydra.sweep.dir", folder)


def test_a_command_with_line_breaks_is_dropped(monkeypatch):
    """Readers would drop it."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "a = 1\nb = 2"])
    assert sweep_resume_command(Path("/a"), "/my work") is None
