"""What flags take: the rule is at the parser, so nonsense is refused before anything is looked
at."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from harness.cli import command as cli
from harness.core.flags import FlagParser, add_flags, build, flag, positional, words_of


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
        (
            ["run", "--set", "speed=-1"],
            "argument --set speed: wanted a finite number of at least 0, found '-1'",
        ),
        (
            ["run", "--set", "peer_encrypt=1"],
            "argument --set peer_encrypt: wanted true or false, found '1'",
        ),
        (
            ["run", "--set", "notice_ack=some"],
            "argument --set notice_ack: invalid choice: 'some' (choose from",
        ),
        (
            ["run", "--set", "dead_s"],
            "argument --set dead_s: wanted dead_s=VALUE, found no value: silence of a node",
        ),
        (
            ["run", "--set", "nproc=2"],
            "argument --set: wanted the name of a setting, found 'nproc'; it is a flag: --nproc",
        ),
        (
            ["run", "--min-nodes", "0"],
            "argument --min-nodes: wanted a whole number of at least 1, found '0'",
        ),
        (
            ["run", "--nproc", "0"],
            "argument --nproc: wanted a number or auto, at least 1; found '0'",
        ),
        (
            ["run", "--set", "leave_after=nan"],
            "argument --set leave_after: 'nan' is no duration",
        ),
        (
            ["run", "--set", "leaderless_hours=inf"],
            "argument --set leaderless_hours: wanted a finite number of at least 0, found 'inf'",
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lanch"], "wanted a command, found 'lanch'; did you mean `harness launch`?"),
        (["postmortem", "u"], "found 'postmortem'; did you mean `harness runs postmortem`?"),
        (["runs", "reprot", "u"], "found 'reprot'; did you mean `harness runs report`?"),
        (["run", "--npoc", "1"], "unrecognized arguments: --npoc; did you mean --nproc?"),
        (["run", "--dead-s=1"], "; did you mean --set dead_s=VALUE?"),
        (["run", "--set", "dead-s=1"], "found 'dead-s'; did you mean dead_s?"),
    ],
)
def test_the_nearest_word_is_suggested_in_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said and said.count("\n") == 1, said


def test_every_number_of_every_command_is_bounded() -> None:
    """No flag and no setting takes a number that is none."""
    _, subs = cli.parser()
    for sub in subs.values():
        wants = ["1" for action in sub._get_positional_actions() if action.nargs != "*"]
        for action in sub._actions:
            if action.option_strings and type(action.default) in (int, float):
                with pytest.raises(SystemExit):
                    sub.parse_args([*wants, action.option_strings[0], "nan"])
        for setting, action in getattr(sub, "setting_names", dict)().items():
            if type(action.default) in (int, float):
                with pytest.raises(SystemExit):
                    sub.parse_args([*wants, "--set", f"{setting}=nan"])


# ---- settings ------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Shared:
    owner: str = flag("", "who\nwhoever it is")


@dataclass(frozen=True)
class Flags(Shared):
    SETTINGS = ("owner",)

    url: str = positional("a URL")
    name: str = flag("x", "a flag", choices=["x", "y"])
    beat_s: float = flag(2.0, "time between heartbeats\nin seconds", advanced=True)
    quiet: bool = flag(False, "say nothing", advanced=True)
    tags: tuple[str, ...] = flag((), "tags; repeat for more", advanced=True)
    limit: int | None = flag(None, "a limit", at_least=1, advanced=True)


def parsed(*words: str) -> Flags:
    parser = FlagParser(prog="it")
    add_flags(parser, Flags)
    return build(Flags, parser.parse_args(list(words)))


def test_settings_are_fields_of_the_same_dataclass() -> None:
    assert parsed("u") == Flags("u")
    words = ["u", "--name", "y", *("--set", "beat_s=0.5", "--set", "quiet=true")]
    words += ["--set", "tags=a=b", "--set", "tags=c", "--set", "limit=3", "--set", "owner=me"]
    found = Flags("u", "y", 0.5, True, ("a=b", "c"), 3, owner="me")
    assert parsed(*words) == found
    assert parsed(*words_of(found)) == found
    assert parsed("u", "--set", "beat_s=1", "--set", "beat_s=3").beat_s == 3


def test_help_ends_with_the_settings_one_line_each() -> None:
    parser = FlagParser(prog="it")
    add_flags(parser, Flags)
    listed = parser.format_help().partition("\nsettings (")[2].splitlines()[1:]
    assert [line.split()[0] for line in listed] == ["beat_s", "quiet", "tags", "limit", "owner"]
    assert listed[0] == "  beat_s  time between heartbeats (default: 2.0)"
    assert "--beat-s" not in parser.format_help() and "in seconds" not in parser.format_help()


def test_the_command_is_small_enough_to_be_read() -> None:
    """At most 14 names at the top, at most 20 flags of `harness run`, and lines that fit."""
    root, subs = cli.parser()
    assert 1 < len(root.commands) <= 14
    assert set(root.commands) >= {"init", "check", "plan", "launch", "run", "status", "stop", "down"}
    assert set(root.commands) >= set(cli.GROUPS)
    flags = [action for action in subs["run"]._actions if action.option_strings]
    assert len(flags) - 1 <= 20  # without --help
    for line in root.format_help().splitlines():
        assert len(line) <= 80, line
    for sub in subs.values():
        for line in sub.format_help().splitlines():
            assert len(line) <= 100, line


def test_bounds() -> None:
    from harness.core.flags import Bounds

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
