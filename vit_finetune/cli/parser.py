"""One readable line for a mistyped option, class or value."""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser

from vit_finetune.data import ImageDataModule

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


class ReadableParser(LightningArgumentParser):
    """Says in one line what is wrong, what is allowed, and what was probably meant."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the line and exits with code 2."""
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        self.exit(2, f"error: {explain(parser, message)} All options: {prog} --help\n")


def explain(parser: LightningArgumentParser, message: str) -> str:
    """Turns the parser's message into one line."""
    unknown = re.search(r"unrecognized arguments: (.*)", message, re.IGNORECASE)
    if unknown:
        return _unknown_option(unknown.group(1).split()[0].split("=")[0], _options(parser))
    if re.search(r'Parser key "data', message):
        return _data_problem(message)
    key = re.search(r'Parser key "([^"]+)"', message)
    if key and (types := _types(parser, key.group(1))):
        value = re.findall(r"(?:Given value|Got value): (.*)", message)
        return _wrong_value(f"--{key.group(1)}", value[-1] if value else None, types)
    return _condense(message)


def _unknown_option(option: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(option, known, 3, 0.75)
    group = option.rpartition(".")[0]
    near = near or [name for name in known if group and name.rpartition(".")[0] == group] or []
    return f"there is no option {option}.{_similar(near)}"


def _wrong_value(option: str, value: str | None, types: list[Any]) -> str:
    choices = [str(choice) for kind in types if get_origin(kind) is Literal for choice in get_args(kind)]
    words = [WORDS[kind] for kind in types if kind in WORDS]
    near = difflib.get_close_matches(value or "", choices, 2, 0.5)
    allowed = ", ".join(dict.fromkeys(choices + words)) or ", ".join(str(kind) for kind in types)
    return f"{option}: {value!r} is not allowed. Allowed: {allowed}.{_similar(near) if choices else ''}"


def _data_problem(message: str) -> str:
    """``--data`` takes a class and options of that class."""
    given_class = re.search(r"class_path '([\w.]+)'", message)
    if given_class:
        known = _init_options(given_class.group(1))
        unknown = re.search(r"Option '(\w+)' is not accepted", message)
        if unknown:
            having = [
                f"--data {name}"
                for name, kind in sorted(_subclasses(ImageDataModule).items())
                if unknown.group(1) in _init_options(f"{kind.__module__}.{kind.__name__}")
            ]
            if having:
                name = given_class.group(1).rpartition(".")[2]
                option = f"--data.{unknown.group(1)}"
                return f"--data {name} has no option {option}. Before it, name data that has: {' or '.join(having)}."
            return _unknown_option(f"--data.{unknown.group(1)}", [f"--data.{name}" for name in known])
        wrong = re.search(r'Parser key "(?!data")(\w+)":', message)
        value = re.search(r"Got value: (.*)", message) or re.search(r"val='(.*)'\)", message)
        if wrong and wrong.group(1) in known:
            types = list(_alternatives(known[wrong.group(1)]))
            return _wrong_value(f"--data.{wrong.group(1)}", value.group(1) if value else None, types)
    wrong_class = re.search(r"(?:Expected a dot import path string|Unexpected import path format): (\S+)", message)
    if wrong_class:
        classes = sorted(_subclasses(ImageDataModule))
        near = difflib.get_close_matches(wrong_class.group(1), classes, 2, 0.4)
        return f"--data: there is no dataset {wrong_class.group(1)!r}. Allowed: {', '.join(classes)}.{_similar(near)}"
    return _condense(message)


def _options(parser: LightningArgumentParser) -> set[str]:
    """All option names of a command, those of the datasets included."""
    names = {
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and not option.endswith("+")
    }
    for base in _subclasses(ImageDataModule).values():
        names |= {f"--data.{name}" for name in _init_options(f"{base.__module__}.{base.__name__}")}
    return names


def _types(parser: LightningArgumentParser, key: str) -> list[Any]:
    """The alternatives of an option's type, empty if there is no such option."""
    for action in parser._actions:
        if action.dest == key:
            kind = getattr(action, "_typehint", None) or action.type
            return list(_alternatives(kind)) if kind is not None else []
    return []


def _alternatives(kind: Any) -> Iterable[Any]:
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        for part in get_args(kind):
            yield from _alternatives(part)
    else:
        yield kind


def _init_options(class_path: str) -> dict[str, Any]:
    """Names and types of the options of a dataset, those of its base classes included."""
    module, _, name = class_path.rpartition(".")
    options: dict[str, Any] = {}
    for base in inspect.getmro(getattr(importlib.import_module(module), name)):
        if "__init__" in vars(base) and issubclass(base, ImageDataModule):
            types = get_type_hints(base.__init__)
            parameters = inspect.signature(base.__init__).parameters.values()
            options |= {p.name: types[p.name] for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD}
    return options


def _subclasses(base: type) -> dict[str, type]:
    found: dict[str, type] = {}
    child: type
    for child in base.__subclasses__():
        found |= {child.__name__: child} | _subclasses(child)
    return found


def _similar(names: list[str]) -> str:
    return f" Similar: {', '.join(names)}." if names else ""


def _condense(message: str) -> str:
    """Leaves out of a nested message what only repeats that no alternative fitted."""
    skip = ("Does not validate", "Subtypes", "Errors:", "Given value type", "- Expected a <class 'NoneType'>")
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line.lstrip("- ") for line in lines if line and not line.startswith(skip)).rstrip(".") + "."
