"""The table of what is recovered where says what tests prove, and nothing else."""

import pytest

from proved import PAGE, page, proofs, table


def test_the_page_says_what_the_tests_prove():
    text = PAGE.read_text()
    assert page(proofs(), text) == text, "run: just proved"


def test_marks_make_the_table(tmp_path):
    marks = """
@pytest.mark.proves("Lightning", "one GPU", "in the step")
@pytest.mark.proves("Lightning", "FSDP2", "refused", "FSDP")
def test_a(): ...
"""
    (tmp_path / "test_a.py").write_text(marks)
    (tmp_path / "test_b.py").write_text(marks.replace('"in the step"', '"refused", "LBFGS"'))
    lines = table(proofs(tmp_path)).splitlines()
    assert "| Lightning | in the step, refused |  | refused |  |" in lines
    assert lines[-1] == "- Lightning: one GPU: LBFGS; FSDP2: FSDP"


@pytest.mark.parametrize("wrong", ['"lightning", "one GPU", "refused", "x"', '"Lightning"'])
def test_a_mark_with_an_unknown_word_is_refused(tmp_path, wrong):
    (tmp_path / "test_a.py").write_text(f"@pytest.mark.proves({wrong})\ndef test_a(): ...")
    with pytest.raises(ValueError, match=r"test_a\.py:1: "):
        proofs(tmp_path)
