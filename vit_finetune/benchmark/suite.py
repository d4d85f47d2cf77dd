"""A suite file: which configurations are compared, and how often each is run.

::

    epochs: 3                        # for all variants; so are config, options, seeds and repeats
    repeats: 2
    config: [../quickstart.yaml]     # fit --config, relative to this file
    variants:
      - name: 32-true
        options: {trainer.precision: 32-true}
      - name: bf16-mixed
        extends: 32-true           # files and options of that variant, and more
        options: {trainer.precision: bf16-mixed}
      - name: fine-tuned
        weights_from: bf16-mixed     # fit --model.weights, the best checkpoint of that variant
        seeds: [0, 1, 2]

A variant without ``extends`` builds on nothing but what stands at the top, and is compared with the variant before it.
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

COMMON = {"config": list, "options": dict, "epochs": int, "seeds": list, "repeats": int}
SUITE = {**COMMON, "variants": list}
VARIANT = {**COMMON, "name": str, "extends": str, "weights_from": str}
WORDS = {list: "a list", dict: "names with values", int: "a whole number", str: "text"}


@dataclass(frozen=True)
class Variant:
    """One configuration.

    Attributes:
        name: Of the variant.
        words: What makes it, after ``python -m vit_finetune fit``; later words win, files and options alike.
        seeds: For ``--seed_everything``.
        repeats: Runs of each seed.
        compared_with: The variant that it is set against, ``None`` for the first.
        weights_from: The variant whose best weights it starts from.
    """

    name: str
    words: tuple[str, ...] = ()
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
    """Yields all runs round by round, each variant once a round, so that a machine that gets slower slows all alike."""
    for repeat in range(max(variant.repeats for variant in variants)):
        for number in range(max(len(variant.seeds) for variant in variants)):
            for variant in variants:
                if repeat < variant.repeats and number < len(variant.seeds):
                    yield Run(variant, variant.seeds[number], repeat)


def read(path: Path) -> list[Variant]:
    """Reads a suite file.

    Raises:
        MisconfigurationException: It has a mistake; the message names the place and what is allowed there.
    """
    if not path.is_file():
        raise MisconfigurationException(f"--suite {path}: no such file. The project's own are in configs/benchmark/.")
    try:
        suite = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise MisconfigurationException(f"--suite {path} is no YAML: {' '.join(str(error).split())}") from error
    _check(suite, SUITE, str(path))
    if not suite.get("variants"):
        raise MisconfigurationException(f"{path}: no variants. Give a list of them, each with a name.")
    variants: dict[str, Variant] = {}
    for number, entry in enumerate(suite["variants"], 1):
        where = f"{path}, variant {number}"
        _check(entry, VARIANT, where)
        variant = _variant(suite, entry, variants, where, path.parent)
        variants[variant.name] = variant
    return list(variants.values())


def _variant(
    suite: dict[str, Any], entry: dict[str, Any], before: dict[str, Variant], where: str, folder: Path
) -> Variant:
    if not entry.get("name") or entry["name"] in before:
        raise MisconfigurationException(
            f"{where}: each variant needs a name of its own; this one has {entry.get('name')!r}."
        )
    for key in ("extends", "weights_from"):
        if key in entry and entry[key] not in before:
            names = ", ".join(before) or "none, this is the first"
            raise MisconfigurationException(
                f"{where}: {key} {entry[key]!r} is no variant before it. Those are: {names}."
            )
    base = before.get(entry.get("extends", ""))
    both = {**suite, **entry}
    return Variant(
        name=entry["name"],
        words=(base.words if base else _words(suite, where, folder)) + _words(entry, where, folder),
        seeds=tuple(both.get("seeds", [0])),
        repeats=both.get("repeats", 1),
        compared_with=entry.get("extends", list(before)[-1] if before else None),
        weights_from=entry.get("weights_from", base.weights_from if base else None),
    )


def _words(entry: dict[str, Any], where: str, folder: Path) -> tuple[str, ...]:
    """Files and options that an entry itself names."""
    files = [Path(os.path.relpath(folder / file)) for file in entry.get("config", [])]
    for file in files:
        if not file.is_file():
            raise MisconfigurationException(f"{where}: config {file}: no such file. Paths start at the suite's folder.")
    epochs = {"trainer.max_epochs": entry["epochs"]} if "epochs" in entry else {}
    options = {**epochs, **entry.get("options", {})}
    return (
        *(f"--config={file}" for file in files),
        *(f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()),
    )


def _check(entry: Any, kinds: dict[str, type], where: str) -> None:
    """Refuses unknown keys and values of the wrong kind."""
    if not isinstance(entry, dict):
        raise MisconfigurationException(f"{where}: {entry!r} is not a set of keys. Allowed: {', '.join(kinds)}.")
    for key, value in entry.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, 1)
            similar = f" Similar: {near[0]}." if near else ""
            raise MisconfigurationException(f"{where}: there is no key {key!r}. Allowed: {', '.join(kinds)}.{similar}")
        if type(value) is not kinds[key]:
            raise MisconfigurationException(f"{where}: {key} is {value!r}; it must be {WORDS[kinds[key]]}.")
    if entry.get("repeats", 1) < 1 or entry.get("epochs", 1) < 1:
        raise MisconfigurationException(f"{where}: repeats and epochs must be at least 1.")
    if not all(type(seed) is int for seed in entry.get("seeds", [0])) or entry.get("seeds") == []:
        raise MisconfigurationException(f"{where}: seeds is {entry['seeds']!r}; it must be a list of whole numbers.")
