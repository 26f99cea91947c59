import pytest

from robust_train.sweep.session import remember_mask, restore_mask


@pytest.mark.parametrize("executor", ["local", "slurm", None])
@pytest.mark.parametrize("mask", [None, "", "1,0", "GPU-11111111"])
def test_a_job_sees_what_the_user_saw_unless_it_has_an_allocation(mask, executor):
    environ = {"CUDA_VISIBLE_DEVICES": mask, "SUBMITIT_EXECUTOR": executor}
    environ = {name: value for name, value in environ.items() if value is not None}
    remember_mask(environ)
    environ["CUDA_VISIBLE_DEVICES"] = "3"
    restore_mask(environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == (mask if executor == "local" else "3")
