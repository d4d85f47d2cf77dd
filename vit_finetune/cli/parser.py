"""Readable messages for a mistyped option, class or value; saved configs for every command."""

import argparse
import difflib
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from typing_extensions import override

from vit_finetune.data import ImageDataModule

SAVED = "# lightning.pytorch=="
"""First characters of a config file with all options of a command: saved by a run, or printed by --print_config."""
EXPECTED = {bool: "true or false", type(None): "null"}
# The parts of jsonargparse's messages that are used; where they are missing, its own text is printed.
UNKNOWN = re.compile(r"(?:unrecognized arguments: --|(?:Group '([\w.]+)' does not accept )?option ')([\w.]+)", re.I)
KEY = re.compile(r'Parser key "([\w.]+)"')
VALUE = re.compile(r"(?:Given|Got) value: (.*)")
# The default of an option of Lightning's Timer is a member of an enum derived from str, which YAML cannot write.
yaml.SafeDumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))


class ReadableParser(LightningArgumentParser):
    """Parser that reports the wrong option or value, what is expected, and what was probably meant."""

    foreign: frozenset[str] = frozenset()
    """Options of other commands, which are ignored in their saved configs."""
    unset: frozenset[str] = frozenset()
    """Options whose built-in default is null: in a saved config such a null was not given by anyone."""

    @override
    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a config file; one that was saved by this or another command sets only what was given.

        It holds every option of its command. Its nulls must hide neither an earlier config nor a checkpoint.
        """
        if content.startswith(SAVED):
            with suppress(yaml.YAMLError, AttributeError):  # edited by hand, and not valid: reported below
                options = self._given(get_loader("yaml")(content))
                content = yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
        parsed: Namespace = super().parse_string(content, *args, **kwargs)
        return parsed

    def _given(self, options: dict[str, object]) -> dict[str, object]:
        def said(values: dict[str, object], parent: str) -> dict[str, object]:
            nulls = {name for name, value in values.items() if value is None and parent + name in self.unset}
            return {name: value for name, value in values.items() if name not in nulls}

        own = {name: value for name, value in said(options, "").items() if name not in self.foreign}
        return {name: said(value, f"{name}.") if isinstance(value, dict) else value for name, value in own.items()}

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        raise MisconfigurationException(f"{explain(parser, message)} All options: {prog} --help")


def note_defaults(parsers: Iterable[LightningArgumentParser]) -> None:
    """Tell the parser of each command which options are those of others, and which are null if nobody sets them."""
    options = {parser: options_of(parser) for parser in parsers if isinstance(parser, ReadableParser)}
    everything = {name.partition(".")[0] for own in options.values() for name in own}
    for parser, own in options.items():
        parser.foreign = frozenset(everything - {name.partition(".")[0] for name in own})
        parser.unset = frozenset(name for name, action in own.items() if action.default is None)


def refuse_undecodable(args: ArgsType) -> None:
    """Refuse arguments that are not text in this locale, because a config file cannot contain them.

    Raises:
        MisconfigurationException: Names the argument and the remedies.
    """
    for arg in args if isinstance(args, list) else []:
        if not arg.isascii() and arg != arg.encode(errors="replace").decode():
            raise MisconfigurationException(
                f"{arg!r} contains bytes that are not text in this locale. If it is UTF-8, set LC_ALL=C.UTF-8; "
                "otherwise change into the folder and use a relative path, or make a link to it."
            )


def explain(parser: ArgumentParser, message: str) -> str:
    """Turn a message of jsonargparse into one readable line."""
    key = ".".join(dict.fromkeys(KEY.findall(message)))  # for an option of a dataset: data, then batch_size
    unknown = UNKNOWN.search(message)
    if unknown:
        group = unknown[1] or key
        option = f"--{group}.{unknown[2]}" if group else f"--{unknown[2]}"
        return _unknown_option(option, parser) if group in ("", "data", "model") else _condense(message)
    value = VALUE.search(message)  # the first is the innermost
    if key == "data" and value and value[1].isidentifier():
        names = sorted(_datasets())
        return f"--data: expected one of: {', '.join(names)}; got {value[1]!r}.{_did_you_mean(value[1], names, 0.4)}"
    kind = _known_options(parser).get(key)
    if value and kind is not None:
        return _wrong_value(f"--{key}", value[1], list(_alternatives(kind)))
    return _condense(message)


def _unknown_option(option: str, parser: ArgumentParser) -> str:
    name = option.removeprefix("--")
    datasets = [f"--data {dataset}" for dataset, cls in sorted(_datasets().items()) if name in _dataset_types(cls)]
    if datasets:
        return f"{option} is not an option of the selected dataset. First select {' or '.join(datasets)}."
    known = [f"--{key}" for key in sorted(_known_options(parser))]
    group = option.rpartition(".")[0]
    siblings = [other for other in known if group and other.rpartition(".")[0] == group]
    return f"unrecognized option {option}.{_did_you_mean(option, known, 0.75) or _listed(siblings)}"


def _wrong_value(option: str, value: str, kinds: list[object]) -> str:
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    others = [EXPECTED.get(kind) or _type_name(kind) for kind in kinds if get_origin(kind) is not Literal]
    if choices:
        expected = f"one of: {', '.join(dict.fromkeys(choices + others))}"
        return f"{option}: expected {expected}; got {value!r}.{_did_you_mean(value, choices, 0.5)}"
    return f"{option}: expected {' or '.join(others)}; got {value!r}."


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else re.sub(r"\b\w+\.", "", str(kind))


def _did_you_mean(value: str, known: Iterable[str], cutoff: float) -> str:
    near = difflib.get_close_matches(value, set(known), 3, cutoff)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _listed(options: list[str]) -> str:
    return f" Options with this prefix: {', '.join(options)}." if options else ""


def options_of(parser: ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of a parser by name."""
    return {action.dest: action for action in parser._actions}  # private: there is no public list of options


def option_types(parser: ArgumentParser) -> dict[str, object]:
    """Return the type of each option of a parser by name."""
    return {
        name: getattr(action, "_typehint", None) or action.type  # private: there is no public way to a type
        for name, action in options_of(parser).items()
    }


def _known_options(parser: ArgumentParser) -> dict[str, object]:
    options = option_types(parser)
    for dataset in _datasets().values():
        options = _dataset_types(dataset) | options
    return options


def _dataset_types(dataset: type) -> dict[str, object]:
    return {f"data.{name}": kind for name, kind in class_option_types(dataset).items()}


def class_option_types(cls: type) -> dict[str, object]:
    """Return the type of each option of a class by name."""
    parser = ArgumentParser(add_help=False)
    parser.add_class_arguments(cls, "x", as_group=False)
    return {key[2:]: kind for key, kind in option_types(parser).items() if key.startswith("x.")}


def _datasets(base: type = ImageDataModule) -> dict[str, type]:
    """Return the subclasses by name, also indirect ones."""
    found: dict[str, type] = {}
    child: type
    for child in base.__subclasses__():
        found |= {child.__name__: child} | _datasets(child)
    return found


def _alternatives(kind: object) -> Iterable[object]:
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        for part in get_args(kind):
            yield from _alternatives(part)
    else:
        yield kind


def _condense(message: str) -> str:
    """Put a nested message on one line, without the lines that only repeat that no alternative matched."""
    skip = ("Does not validate", "Subtypes", "Errors:", "Given value type", "- Expected a <class 'NoneType'>")
    lines = [line.strip() for line in KEY.sub(r"--\1", message).splitlines()]
    return " ".join(line.lstrip("- ") for line in lines if line and not line.startswith(skip)).rstrip(".") + "."
