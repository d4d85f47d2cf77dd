"""Suite files: the configurations to compare, and the number of runs of each.

::

    epochs: 3                        # for all variants; so are config, options, seeds and repeats
    repeats: 2
    config: [../quickstart.yaml]     # fit --config, relative to this file
    variants:
      - name: 32-true
        options: {trainer.precision: 32-true}
      - name: bf16-mixed
        extends: 32-true             # starts from the files and options of that variant
        options: {trainer.precision: bf16-mixed}
      - name: fine-tuned
        weights_from: bf16-mixed     # fit --model.weights with the best checkpoint of that variant
        seeds: [0, 1, 2]

A variant without ``extends`` starts from the options at the top, and is compared with the variant before it.
"""

import difflib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

Options = dict[str, Any]
"""Values as YAML gives them: nested options of ``fit``, or an entry of a suite file."""
COMMON = {"config": list, "options": dict, "epochs": int, "seeds": list, "repeats": int}
SUITE = {**COMMON, "variants": list}
VARIANT = {**COMMON, "name": str, "extends": str, "weights_from": str}


@dataclass(frozen=True)
class Variant:
    """One configuration of a suite.

    Attributes:
        name: Unique within the suite.
        args: Arguments of ``python -m vit_finetune fit``; later ones override earlier ones, files and options alike.
        seeds: Values of ``--seed_everything``.
        repeats: Number of runs per seed.
        compared_with: Name of the variant that results are compared with; ``None`` for the first variant.
        weights_from: Name of the variant whose best weights this one starts from.
    """

    name: str
    args: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    repeats: int = 1
    compared_with: str | None = None
    weights_from: str | None = None


@dataclass(frozen=True)
class Run:
    """One run of a variant."""

    variant: Variant
    seed: int
    repeat: int


def schedule(variants: list[Variant]) -> Iterator[Run]:
    """Yield all runs in rounds with each variant once per round, so that a change in machine load affects all alike."""
    for repeat in range(max(variant.repeats for variant in variants)):
        for number in range(max(len(variant.seeds) for variant in variants)):
            for variant in variants:
                if repeat < variant.repeats and number < len(variant.seeds):
                    yield Run(variant, variant.seeds[number], repeat)


def read(path: Path) -> list[Variant]:
    """Read a suite file.

    Raises:
        MisconfigurationException: The file is not a valid suite; the message names the place and what is expected.
    """
    if not path.is_file():
        raise MisconfigurationException(
            f"--suite {path} does not exist. The project's suites are in configs/benchmark/."
        )
    try:
        suite = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MisconfigurationException(f"--suite {path} is not valid YAML: {' '.join(str(error).split())}") from error
    _check(suite, SUITE, str(path))
    if not suite.get("variants"):
        raise MisconfigurationException(f"{path} has no variants; expected a list of variants, each with a name.")
    variants: dict[str, Variant] = {}
    for number, entry in enumerate(suite["variants"], 1):
        where = f"{path}, variant {number}"
        _check(entry, VARIANT, where)
        variant = _variant(suite, entry, variants, where, path.parent)
        variants[variant.name] = variant
    return list(variants.values())


def _variant(suite: Options, entry: Options, before: dict[str, Variant], where: str, folder: Path) -> Variant:
    if not entry.get("name") or entry["name"] in before:
        raise MisconfigurationException(f"{where}: name is {entry.get('name')!r}; expected a unique, non-empty name.")
    for key in ("extends", "weights_from"):
        if key in entry and entry[key] not in before:
            names = ", ".join(before) or "none, this is the first variant"
            raise MisconfigurationException(f"{where}: {key} is {entry[key]!r}; expected an earlier variant: {names}.")
    base = before.get(entry.get("extends", ""))
    both = {**suite, **entry}
    return Variant(
        name=entry["name"],
        args=(base.args if base else _args(suite, where, folder)) + _args(entry, where, folder),
        seeds=tuple(both.get("seeds", [0])),
        repeats=both.get("repeats", 1),
        compared_with=entry.get("extends", list(before)[-1] if before else None),
        weights_from=entry.get("weights_from", base.weights_from if base else None),
    )


def _args(entry: Options, where: str, folder: Path) -> tuple[str, ...]:
    """Return the arguments of ``fit`` for the files and options of one entry."""
    files = [Path(os.path.relpath(folder / file)) for file in entry.get("config", [])]
    for file in files:
        if not file.is_file():
            raise MisconfigurationException(
                f"{where}: config {file} does not exist. Paths are relative to the suite file."
            )
    epochs = {"trainer.max_epochs": entry["epochs"]} if "epochs" in entry else {}
    options = {**epochs, **entry.get("options", {})}
    return (
        *(f"--config={file}" for file in files),
        *(f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()),
    )


def _check(entry: Any, types: dict[str, type], where: str) -> None:
    """Reject unknown keys and values of the wrong type."""
    if not isinstance(entry, dict):
        raise MisconfigurationException(f"{where}: {entry!r} is not a mapping; expected the keys {', '.join(types)}.")
    for key, value in entry.items():
        if key not in types:
            near = difflib.get_close_matches(str(key), types, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise MisconfigurationException(f"{where}: unrecognized key {key!r}. Allowed: {', '.join(types)}.{hint}")
        if type(value) is not types[key]:
            raise MisconfigurationException(f"{where}: {key} is {value!r}; expected {types[key].__name__}.")
    for key in ("repeats", "epochs"):
        if entry.get(key, 1) < 1:
            raise MisconfigurationException(f"{where}: {key} is {entry[key]}; expected at least 1.")
    if not all(type(seed) is int for seed in entry.get("seeds", [0])) or entry.get("seeds") == []:
        raise MisconfigurationException(f"{where}: seeds is {entry['seeds']!r}; expected a non-empty list of int.")
