"""What our own code may set of an attempt."""

import pytest

from robust_train.attempt.run import Run, live_of


@pytest.mark.parametrize("name", ["resume_checkpoint", "skips_to", "micro_batch_plan"])
def test_a_name_that_does_not_exist_is_refused(tmp_path, name):
    """It would silently change nothing: these belong to an attempt's parts."""
    with pytest.raises(AttributeError, match=name):
        setattr(live_of(Run(run_dir=tmp_path)), name, None)
