"""The variables that a command reads, as ``environment.json`` has them."""

from robust_train.features.provenance.environment import describe_changes, find_variables_read


def test_recorded_variables_of_a_command_exclude_secrets(tmp_path):
    """The recorded variables are those that the command reads."""
    program = "O=${O:-out}\nTMP=1\nexport LATER=2\npython t.py $O $TMP ${LATER} $1 $API_TOKEN\n"
    program += "echo $PWD $SLURM_NODELIST $RANK"
    (tmp_path / "cmd.sh").write_text(program)
    (tmp_path / "t.py").write_text("os.environ['SEED'], os.getenv(\"LR\"), environ.get('HF_TOKEN')")
    words = ["bash", "cmd.sh", "t.py", "--data=$DATA", "out=${oc.env:PLACE}", "no file", "\0"]
    secret = "hf_" + "a1B2" * 8
    environ = {"O": "one", "DATA": "/d", "SEED": "1", "API_TOKEN": "x", "PLACE": secret}
    named = find_variables_read(words, tmp_path, environ)
    assert named == {"DATA": "/d", "LR": None, "O": "one", "SEED": "1"}

    before = {"job": "this", "command_variables": named}
    now = find_variables_read(
        words, tmp_path, {"O": "s3://me:pw@host/two", "LR": "1", "DATA": "/d"}
    )
    changed = describe_changes(before, "this", now)
    names = "LR was not set and is '1'; O was 'one' and is 's3://…@host/two'; SEED was '1' and is"
    assert changed == f"{names} not set"
    assert describe_changes(before, "another", now) == ""
    assert describe_changes({}, "this", now) == ""
    assert describe_changes(before, "this", named) == ""
