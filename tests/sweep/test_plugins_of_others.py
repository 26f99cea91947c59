from __future__ import annotations

import pytest

from robust_train.sweep.plugins_of_others import remember_mask, restore_mask


@pytest.mark.parametrize("mask", [None, "", "1,0", "GPU-11111111"])
def test_under_submitit_here_a_job_sees_what_the_user_saw(mask: str | None):
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    remember_mask(environ)
    environ |= {"SUBMITIT_EXECUTOR": "local", "CUDA_VISIBLE_DEVICES": "0"}
    restore_mask(environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == mask


@pytest.mark.parametrize("executor", ["slurm", None])
def test_an_allocation_is_left_as_it_is(executor: str | None):
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    remember_mask(environ)
    environ["CUDA_VISIBLE_DEVICES"] = "3"
    if executor is not None:
        environ["SUBMITIT_EXECUTOR"] = executor
    restore_mask(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "3"
