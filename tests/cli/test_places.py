"""Folders and addresses at which nothing can be written or heard are wrong input, said in one line."""

import pytest

from harness.cli import main


@pytest.mark.parametrize("words", [
    ["runs", "report", "{run}", "--html", "/proc/x/y"],
    ["run", "--run", "{run}", "--set", "stage_dir=/proc/x", "--", "{script}"],
    ["run", "--run", "{run}", "--set", "addr=192.0.2.77", "--", "{script}"],
    ["run", "--run", "{run}", "--set", "addr=no-such-host.invalid", "--", "{script}"],
])  # fmt: skip
def test_places_that_permit_everything_and_take_nothing_are_one_line(words, tmp_path, capsys):
    """/proc to root, and addresses of other machines."""
    script, run = tmp_path / "s.py", tmp_path / "run"
    script.write_text("")
    with pytest.raises(SystemExit) as end:
        main([word.format(run=run, script=script) for word in words])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in said, said
    assert "/proc" in said or "wanted an address of this machine" in said, said
    assert not run.exists()
