"""Limits and settings, each in a process of its own: they cannot be taken back."""

import json
import os
import textwrap
from types import SimpleNamespace

import pytest
import torch

import warm
from attempts import built
from robust_train import set_memory_fraction
from robust_train.host.allocator import VARIABLE, use_expandable_segments
from robust_train.launcher.request import build_environment
from robust_train.memory.limits import MemoryLimit, apply_to_allocator
from robust_train.model.spec import AttemptSpec
from simulated_nvml import MIB


def python(code, **environ):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    done = warm.run(("-c", textwrap.dedent(code)), {**kept, **environ})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_share_of_host_memory_is_enforced():
    """There is no CUDA, and beyond the share memory runs out."""
    description, ended, kind, limit, lifted, total = python(
        """
        import json, resource
        import torch
        from robust_train import set_memory_fraction
        from robust_train.host.memory import read_host_memory
        total = read_host_memory().total
        limit = set_memory_fraction((read_host_memory().data + 200 * 2**20) / total)
        small = torch.ones(10 * 2**20)
        try:
            torch.ones(100 * 2**20)
            ended = "not limited"
        except RuntimeError as error:
            ended = str(error)
        from robust_train.failures import classify_failure
        kind = classify_failure(RuntimeError(ended)).kind.value
        lifted = set_memory_fraction(1.0)
        torch.ones(100 * 2**20)
        print(json.dumps([limit.description, ended, kind, limit.bytes, lifted.bytes, total]))
        """
    )
    assert description.startswith("no CUDA in this process; host memory (RLIMIT_DATA): at most ")
    assert "not enough memory" in ended or "allocate memory" in ended
    assert kind == "host_oom"
    assert limit < lifted == total


@pytest.mark.parametrize("fraction", [1e-9, 0, -1, 1.5, float("nan"), "0.5", True, None])
def test_impossible_shares_are_refused_in_one_line(fraction):
    """So is a limit while memory is in use."""
    refusal = r"fraction=1e-09: .* 0 MiB .* already|accepted is a number over 0, up to 1"
    with pytest.raises(ValueError, match=refusal):
        set_memory_fraction(fraction)


@pytest.mark.parametrize(
    ("exported", "value", "sentence"),
    [
        ({}, "expandable_segments:True", "expandable_segments:True for programs started from here"),
        (
            {VARIABLE: "max_split_size_mb:64"},
            "max_split_size_mb:64,expandable_segments:True",
            "expandable_segments:True for programs started from here",
        ),
        (
            {VARIABLE: "expandable_segments:False"},
            "expandable_segments:False",
            "has expandable_segments:False already, which stays",
        ),
    ],
)
def test_enable_sets_segments_for_child_programs(exported, value, sentence):
    """Exported settings are kept."""
    code = f"""
        import json, os, torch
        from robust_train import enable_memory_efficient_settings
        print(json.dumps([enable_memory_efficient_settings(), os.environ[{VARIABLE!r}]]))
        """
    done, setting = python(code, **exported)
    assert setting == value
    assert done[0].startswith(VARIABLE)
    assert done[0].endswith(sentence)
    assert done[1] == "no CUDA in this process: nothing else to set"


def test_this_torchs_allocator_accepts_runtime_settings():
    assert apply_to_allocator(torch, "expandable_segments:True") == (
        "the allocator of this process: expandable_segments:True"
    )
    assert "torch refuses nonsense:1: " in apply_to_allocator(torch, "nonsense:1")


def test_a_limit_is_told_in_mib():
    limit = MemoryLimit("cuda:0", 0.5, 512 * MIB, 1024 * MIB, 600 * MIB)
    assert limit.description == (
        "cuda:0: at most 512 of 1,024 MiB (0.5), 600 MiB in use; "
        "that is more than the limit, so the next larger request will fail"
    )


@pytest.mark.parametrize(
    ("expected", "setting", "where"),
    [
        (True, None, {}),
        (False, None, {"is_safe": False}),
        (False, None, {"gpus": 2}),
        (False, None, {"kernel": "5.15.90.1-microsoft-standard-WSL2"}),
        (False, None, {"kernel": "4.4.0-19041-Microsoft"}),
        (True, True, {"is_safe": False, "gpus": 2, "kernel": "microsoft"}),
        (False, False, {}),
    ],
)
def test_expandable_segments_are_avoided_if_unsafe(expected, setting, where, monkeypatch):
    """There are machines on which they may fail."""
    where = {"kernel": "6.8.0-45-generic", **where}
    kernel = SimpleNamespace(release=where.pop("kernel"))
    monkeypatch.setattr(os, "uname", lambda: kernel)
    assert use_expandable_segments(setting, {}, **where) is expected
    exported = {VARIABLE: f"expandable_segments:{not expected}"}
    assert use_expandable_segments(setting, exported, **where) is not expected


@pytest.mark.skipif(torch.version.cuda is None, reason="this build of torch has no CUDA")
@pytest.mark.parametrize("expandable", [True, False])
def test_torch_prefers_our_settings_variable(expandable):
    """To the newer name. As torch's own snapshot of its allocator has them, which needs no GPU."""
    environ = build_environment({}, built(AttemptSpec, (), 8, 1, expandable_segments=expandable))
    environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{not expandable}"
    code = """
        import json, torch
        print(json.dumps(torch._C._cuda_memorySnapshot(None)["allocator_settings"]))
        """
    settings = python(code, **environ)
    assert settings[VARIABLE] == f"expandable_segments:{expandable}"
    assert settings["expandable_segments"] == expandable
