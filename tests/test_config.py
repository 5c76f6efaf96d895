"""What flags take: the rule is at the parser, so nonsense is refused before anything is looked
at."""

from __future__ import annotations

import pytest

from harness.cli import command as cli


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["launch", "t.yaml", "--budget-usd", "nan"],
            "argument --budget-usd: wanted a finite number above 0, found 'nan'",
        ),
        (
            ["launch", "t.yaml", "--budget-usd", "-5"],
            "argument --budget-usd: wanted a finite number above 0, found '-5'",
        ),
        (
            ["launch", "t.yaml", "--budget-usd", "inf"],
            "argument --budget-usd: wanted a finite number above 0, found 'inf'",
        ),
        (
            ["launch", "t.yaml", "--budget-usd", "0"],
            "argument --budget-usd: wanted a finite number above 0, found '0'",
        ),
        (["launch", "t.yaml", "--budget-usd", "1e999"], "--budget-usd"),
        (
            ["launch", "t.yaml", "--max-hours", "nan"],
            "argument --max-hours: wanted a finite number above 0, found 'nan'",
        ),
        (
            ["launch", "t.yaml", "--nodes", "0"],
            "argument --nodes: wanted LOW:HIGH or N with 1 <= LOW <= HIGH, for example 1:4; found "
            "'0'",
        ),
        (["launch", "t.yaml", "--nodes", "3:1"], "LOW <= HIGH"),
        (["launch", "t.yaml", "--nodes", "-1:2"], "--nodes"),
        (["launch", "t.yaml", "--nodes", "two"], "--nodes"),
        (
            ["launch", "t.yaml", "--move-saving", "2"],
            "argument --move-saving: wanted a finite number of at least 0 and of at most 1",
        ),
        (
            ["run", "--grace-s", "-1"],
            "argument --grace-s: wanted a finite number of at least 0, found '-1'",
        ),
        (["run", "--speed", "0"], "argument --speed: wanted a finite number above 0, found '0'"),
        (
            ["run", "--min-nodes", "0"],
            "argument --min-nodes: wanted a whole number of at least 1, found '0'",
        ),
        (
            ["run", "--nproc", "0"],
            "argument --nproc: wanted a number or auto, at least 1; found '0'",
        ),
        (["run", "--leave-after", "nan"], "argument --leave-after: 'nan' is no duration"),
        (
            ["run", "--leaderless-hours", "inf"],
            "argument --leaderless-hours: wanted a finite number of at least 0, found 'inf'",
        ),
        (
            ["stop", "u", "--wait-s", "nan"],
            "argument --wait-s: wanted a finite number of at least 0, found 'nan'",
        ),
        (
            ["down", "u", "--timeout-s", "soon"],
            "argument --timeout-s: wanted a finite number of at least 0, found 'soon'",
        ),
    ],
)
def test_nonsense_is_refused_with_the_flags_name(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in said and "did you mean" not in said, said


def test_every_number_of_every_command_is_bounded() -> None:
    """No flag takes a number that is none."""
    _, subs = cli.parser()
    for name, sub in subs.items():
        for action in sub._actions:
            kind = type(action.default)
            if action.option_strings and kind in (int, float):
                with pytest.raises(SystemExit):
                    sub.parse_args(
                        [
                            *(["x"] * 2 if name != "launch" else ["x"]),
                            action.option_strings[0],
                            "nan",
                        ]
                    )


def test_bounds() -> None:
    from harness.core.config import Bounds

    assert Bounds().of("0", float) == 0.0 and Bounds(at_least=None).of("-3.5", float) == -3.5
    assert Bounds(above=0, at_most=2).of("2", int) == 2
    for bounds, text in (
        (Bounds(), "-0.1"),
        (Bounds(above=0), "0"),
        (Bounds(at_most=2), "3"),
        (Bounds(), ""),
    ):
        with pytest.raises(ValueError, match=rf"wanted a finite number .*found '{text}'"):
            bounds.of(text, float)
