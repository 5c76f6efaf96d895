"""Flags from frozen dataclasses: one field, one flag. It knows argparse and nothing else.

    @dataclass(frozen=True)
    class Launch:
        task: str = positional("the SkyPilot task YAML")
        nodes: str = flag("1:1", "how many nodes, LOW:HIGH", check=node_range)
        budget_usd: float | None = flag(None, "stop before more than this is spent", above=0)
        beat_s: float = flag(2.0, "time between two heartbeats", advanced=True)

An `advanced` field is a setting: `--set beat_s=1` in place of a flag of its own, and one line at
the end of `--help`. A class may make settings of inherited fields by their names in `SETTINGS`,
and put flags under titles in `--help` by their names in `TITLES`: {"limits": ("budget_usd",)}.

An unknown flag is answered with the nearest known one. Every number is finite and not negative by
default; a flag may carry other bounds (`at_least`, `above`, `at_most`; `at_least=None`: no lower
bound). A flag that is not a number may carry a `check`, which raises ValueError that says what is
wanted. Violations are reported with the flag's name before anything is done.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def flag(default: Any, help: str, **more: Any) -> Any:
    """Define a field that becomes the flag `--its-name`. `more`: options for argparse, bounds (see
    above), `advanced` (see above), and `short`, such as "-m". Of a setting the list of settings
    shows the first line of `help`; `--set NAME` without a value shows the others as well."""
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Bounds:
    """The range of numbers that a flag accepts. `None`: no bound on that side."""

    at_least: float | None = 0
    above: float | None = None
    at_most: float | None = None

    def of(self, text: str, kind: type[float] | type[int]) -> float:
        """Convert `text` to a number within the bounds. Raises ValueError that says what is wanted
        and what was found."""
        found: float | None = None
        with contextlib.suppress(ValueError):
            found = kind(text)
        if found is None or (kind is float and not math.isfinite(found)) or not self._holds(found):
            raise ValueError(f"wanted {self.words(kind)}, found {text!r}")
        return found

    def _holds(self, number: float) -> bool:
        low = self.at_least is None or self.above is not None or number >= self.at_least
        return (
            low
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
        )

    def words(self, kind: type[float] | type[int]) -> str:
        words = "a whole number" if kind is int else "a finite number"
        sides = [f"above {self.above:g}"] if self.above is not None else []
        if self.at_least is not None and self.above is None:
            sides.append(f"of at least {self.at_least:g}")
        if self.at_most is not None:
            sides.append(f"of at most {self.at_most:g}")
        return " ".join([words, " and ".join(sides)]).strip()


def _checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `convert` so that argparse shows the message of its ValueError."""

    def parse(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return parse


def _kept(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a converter that passes text through unchanged after `check` accepts it."""

    def parse(text: str) -> str:
        check(text)
        return text

    return parse


def positional(help: str, **more: Any) -> Any:
    """Define a field that becomes a positional argument."""
    return dataclasses.field(metadata={"help": help, "positional": True, **more})


def _is_setting(cls: Any, f: dataclasses.Field[Any]) -> bool:
    return bool(f.metadata.get("advanced")) or f.name in getattr(cls, "SETTINGS", ())


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"wanted true or false, found {text!r:.80}")
    return text == "true"


class FlagParser(argparse.ArgumentParser):
    """An argument parser with settings (`--set NAME=VALUE`) and commands that suggests the nearest
    known word.

    `commands`: what each of its commands does, for `--help`; `sections`: the first command below
    each title of that list; `elsewhere`: how commands are written that are not this parser's own,
    by their last word; `synonyms`: what is meant by words that people know from other tools;
    `for_scripts`: what follows `--` belongs to a script.
    """

    settings: argparse.ArgumentParser | None = None

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.commands: dict[str, str] = {}
        self.sections: dict[str, str] = {}
        self.elsewhere: dict[str, list[str]] = {}
        self.synonyms: dict[str, str] = {}
        self.for_scripts = False
        self._places: argparse._SubParsersAction[FlagParser] | None = None

    def add_command(self, name: str, about: str) -> FlagParser:
        """Add a command and return its parser. The first paragraph of `about` stands in the
        list of commands."""
        if self._places is None:
            self.usage = "%(prog)s [-h] COMMAND ..."
            self._places = self.add_subparsers(
                prog=self.prog,
                required=True,
                parser_class=FlagParser,
                metavar="COMMAND",
                help=argparse.SUPPRESS,
            )
        first, *more = [" ".join(part.split()) for part in about.split("\n\n")]
        self.commands[name] = first
        return self._places.add_parser(name, description=" ".join([first, *more]))

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, with the nearest known word, and exit with status 2."""
        if found := re.match(r"argument COMMAND: invalid choice: (.+) \(choose from", message):
            message = f"wanted a command, found {found[1]:.80}{self._command_near(found[1])}"
        elif found := re.match(r"(arg.+): invalid choice: (.+) \(choose from (.+)\)$", message):
            known = [word.strip("' ") for word in found[3].split(",")]
            near = _did_you_mean(found[2].strip("'"), known)
            message += near
        elif found := re.fullmatch(r"the following arguments are required: (.+)", message):
            message += self._explained(found[1].split(", "))
        elif (unknown := message.removeprefix("unrecognized arguments: ")) != message:
            message += self._flag_near(unknown.split())
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")

    def _explained(self, lacking: list[str]) -> str:
        """Return what the first of these arguments is, if its help says so."""
        helps = {action.metavar or action.dest: action.help for action in self._actions}
        about = helps.get(lacking[0])
        return f": {about}" if about and about != argparse.SUPPRESS else ""

    def _flag_near(self, unknown: list[str]) -> str:
        known = {option: option for action in self._actions for option in action.option_strings}
        known |= {_dashed(name): f"--set {name}=VALUE" for name in self.setting_names()}
        for word in unknown:
            if word.startswith("-"):
                cutoff = 0.75 if self.for_scripts else 0.6
                near = difflib.get_close_matches(word.split("=")[0], known, 1, cutoff)
                if not near and self.for_scripts:
                    return f"; flags of the script go behind --: {self.prog} -- script.py {word}"
                return f"; did you mean {known[near[0]]}?" if near else ""
        return ""

    def _command_near(self, quoted: str) -> str:
        if meant := self.synonyms.get(quoted.strip("'")):
            return f"; did you mean `{meant}`?"
        known = {word: [f"{self.prog} {word}"] for word in self.commands} | self.elsewhere
        near = difflib.get_close_matches(quoted.strip("'"), known, 1)
        return f"; did you mean `{'` or `'.join(known[near[0]])}`?" if near else ""

    def setting_names(self) -> dict[str, argparse.Action]:
        """Return the settings by name."""
        actions = self.settings._actions if self.settings else []
        return {action.dest: action for action in actions}

    def add_settings(self, settings: argparse.ArgumentParser) -> None:
        """Take settings, the options of another parser, by `--set`."""
        self.settings = settings
        self.add_argument(
            "--set",
            action=_Set,
            metavar="NAME=VALUE",
            dest=argparse.SUPPRESS,
            help="one of the settings below; repeat for more",
        )
        self.set_defaults(**vars(settings.parse_args([])))

    def format_help(self) -> str:
        settings = {
            name: (one.help or "").split("\n")[0] for name, one in self.setting_names().items()
        }
        head, title, rest = super().format_help().partition("\noptions:\n")
        commands = _listed("commands", self.commands, self.sections)
        title_of_settings = "settings (--set NAME=VALUE; --set NAME explains one)"
        return f"{head}{commands}{title}{rest}{_listed(title_of_settings, settings)}"


def _listed(title: str, rows: dict[str, str], sections: dict[str, str] | None = None) -> str:
    """Return rows as one line each, below a title; "" if there are none. `sections`: titles before
    rows, by the row's name, in place of `title`."""
    titles = sections or dict.fromkeys(list(rows)[:1], title)
    width = max(map(len, rows), default=0)
    lines = []
    for name, words in rows.items():
        lines += [f"\n{titles[name]}:"] if name in titles else []
        lines.append(f"  {name:{width}}  {words}")
    return "\n".join(lines) + "\n" if rows else ""


def _did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Set(argparse.Action):
    """The action of `--set`: parse a setting as its flag would be."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: Any = None,
    ) -> None:
        assert isinstance(parser, FlagParser) and parser.settings is not None
        name, equals, value = values.partition("=")
        known = parser.setting_names()
        if name not in known:
            flags = {option for action in parser._actions for option in action.option_strings}
            hint = _did_you_mean(name, list(known))
            if _dashed(name) in flags:
                hint = f"; it is a flag: {_dashed(name)}"
            raise argparse.ArgumentError(
                None, f"argument --set: wanted the name of a setting, found {name!r:.80}{hint}"
            )
        if not equals:
            about = "; ".join((known[name].help or "").split("\n"))
            raise argparse.ArgumentError(
                None, f"argument --set {name}: wanted {name}=VALUE, found no value: {about}"
            )
        try:
            parser.settings.parse_args([f"--{name}={value}"], namespace)
        except argparse.ArgumentError as e:
            raise argparse.ArgumentError(None, f"argument --set {name}: {e.message}") from None


def add_flags(parser: FlagParser, cls: type[Any]) -> None:
    """Add one argument or setting per field of `cls`."""
    hints = typing.get_type_hints(cls)
    settings = FlagParser(prog=parser.prog, add_help=False, exit_on_error=False)
    titles = {name: title for title, names in getattr(cls, "TITLES", {}).items() for name in names}
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(titles.values())}
    parser.for_scripts = "script" in hints
    # inherited keyword-only fields come after a class's own
    for f in sorted(dataclasses.fields(cls), key=lambda f: f.kw_only is True):
        if _is_setting(cls, f):
            _add(settings, f, hints[f.name], f"--{f.name}", is_setting=True)
        else:
            _add(groups.get(titles.get(f.name, ""), parser), f, hints[f.name], _dashed(f.name))
    if settings._actions:
        parser.add_settings(settings)


def _add(
    parser: argparse._ActionsContainer,
    f: dataclasses.Field[Any],
    kind: Any,
    name: str,
    *,
    is_setting: bool = False,
) -> None:
    """Add the argument of one field. `kind`: its type; `name`: its option."""
    more = {k: v for k, v in f.metadata.items() if k != "advanced"}
    is_positional = more.pop("positional", False)
    check, short = more.pop("check", None), more.pop("short", None)
    sides = ("at_least", "above", "at_most")
    bounds = Bounds(**{side: more.pop(side) for side in sides if side in more})
    about = more.pop("help").split("\n")
    options: dict[str, Any] = {"help": "; ".join(about), **more}
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if check is not None:
        options["type"] = _checked(_kept(check))
    elif kind in (int, float):
        options["type"] = _checked(functools.partial(bounds.of, kind=kind))
    if is_positional:
        if options.get("nargs") is None and kind is not list:
            options.setdefault("type", kind)
        parser.add_argument(f.name, **options)
        return
    names = [*([short] if short else []), name]
    default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator]
    if default not in (None, "", False, ()) or type(default) in (int, float):
        about[0 if is_setting else -1] += f" (default: {default})"
    options["help"] = ("\n" if is_setting else "; ").join(about)
    if kind is bool and not is_setting:
        parser.add_argument(*names, action="store_true", default=default, **options)
    elif typing.get_origin(kind) is tuple or kind is tuple:
        options.setdefault("action", "append")  # or "extend", with nargs
        parser.add_argument(*names, default=None, **options)
    else:
        options.setdefault("type", _checked(_truth) if kind is bool else kind)
        parser.add_argument(*names, default=default, **options)


def build(cls: type[T], namespace: argparse.Namespace) -> T:
    """Build the dataclass from parsed arguments."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = getattr(namespace, f.name)
        if value is None and isinstance(f.default, tuple):
            value = f.default
        values[f.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def words_of(flags: Any) -> list[str]:
    """Return the command line that gives these flags, without those that have their default."""
    placed: list[str] = []
    named: list[str] = []
    for f in dataclasses.fields(flags):
        value = getattr(flags, f.name)
        each = value if isinstance(value, tuple) else (value,)
        if f.metadata.get("positional"):
            placed += map(str, each)
        elif value == f.default:
            continue
        elif _is_setting(flags, f):
            shown = [str(one).lower() if isinstance(one, bool) else str(one) for one in each]
            named += [word for one in shown for word in ("--set", f"{f.name}={one}")]
        elif isinstance(value, bool):
            named.append(_dashed(f.name))
        else:
            named += [word for one in each for word in (_dashed(f.name), str(one))]
    return [*placed, *named]


# Consecutive steps as people write them: "20:23".

MOST_STEPS = 100


@dataclass(frozen=True)
class StepsAsked:
    """A range of steps, both ends included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> StepsAsked:
        """Parse "20" or "20:23". Raises ValueError that says what is wanted."""
        found = re.fullmatch(r"(\d{1,12})(?::(\d{1,12}))?", text.strip(), re.ASCII)
        wanted = "wanted a step or the first and the last of some, such as 20 or 20:23"
        if not found:
            raise ValueError(f"{wanted}; found {text!r:.40}")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last:
            raise ValueError(f"{wanted}, from 1 on; found {text!r:.40}")
        if last - first >= MOST_STEPS:
            raise ValueError(f"wanted at most {MOST_STEPS} steps, found {last - first + 1}")
        return cls(first, last)
