"""Report of a dataset check, for the terminal and as files."""

import json
from pathlib import Path

import numpy as np

from vit_finetune.cli.check_data import DataCheck, ImageRecord
from vit_finetune.formatting import one_line, shorten

SHOWN = 20  # entries of a list on the terminal; report.json has all
PER_CLASS = 6  # images of each class on the contact sheet
SHEET = 300  # images on the contact sheet


def terminal(found: DataCheck) -> str:
    """Return counts, sizes and findings as text."""
    lines = [*_count_table(found), "", _sizes(found)]
    for finding in found.findings:
        number = f" ({len(finding.details)})" if finding.details else ""
        lines += ["", f"{'problem' if finding.problem else 'note'}: {finding.text}{number}"]
        lines += [f"  {one_line(detail)}" for detail in finding.details[:SHOWN]]
        if len(finding.details) > SHOWN:
            lines.append(f"  and {len(finding.details) - SHOWN} more")
    return "\n".join(lines)


def save(found: DataCheck, folder: Path) -> None:
    """Write ``report.json`` with all findings, and ``contact-sheet.png`` with some images of each class.

    Raises:
        FileExistsError: The folder already exists.
    """
    from vit_finetune.evaluation.plots import image_grid, thumbnail

    folder.mkdir(parents=True)
    counts = found.counts
    content = {
        "counts": {split: {name: counts[split, name] for name in _names(found)} for split in found.splits},
        "sizes": _size_values(found),
        "findings": [
            {"problem": finding.problem, "text": finding.text, "details": finding.details} for finding in found.findings
        ],
    }
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    chosen = choose(found)
    if chosen:
        captions = [f"{shorten(p.label, 26)}\n{one_line(p.path)}\n{p.width} x {p.height}" for p in chosen]
        sheet = image_grid([thumbnail(found.read(image)) for image in chosen], captions, columns=PER_CLASS)
        sheet.savefig(folder / "contact-sheet.png")


def choose(found: DataCheck) -> list[ImageRecord]:
    """Return the images of the contact sheet, evenly spaced in each class and the same in every run."""
    classes: dict[str, list[ImageRecord]] = {name: [] for name in _names(found)}
    for image in found.images:
        classes[image.label].append(image)
    most = max(1, min(PER_CLASS, SHEET // max(1, len(classes))))
    chosen = []
    for images in classes.values():
        places = np.linspace(0, len(images) - 1, min(most, len(images))).round().astype(int)
        chosen += [images[place] for place in places]
    return chosen[:SHEET]


def _names(found: DataCheck) -> list[str]:
    """Return the expected classes, then unknown ones."""
    return list(dict.fromkeys([*found.class_names, *(image.label for image in found.images)]))


def _count_table(found: DataCheck) -> list[str]:
    counts, names = found.counts, _names(found)
    if len(names) > SHOWN:
        names.sort(key=lambda name: counts[found.splits[0], name])
    rows = [(shorten(name, 30), [counts[split, name] for split in found.splits]) for name in names[:SHOWN]]
    rows.append(("all classes", [sum(counts[split, name] for name in names) for split in found.splits]))
    width = max(len(name) for name, _ in rows)
    lines = [f"{'class':{width}s}" + "".join(f"{split:>10s}" for split in found.splits)]
    lines += [f"{name:{width}s}" + "".join(f"{number:10d}" for number in numbers) for name, numbers in rows]
    if len(names) > SHOWN:
        lines.append(f"the {SHOWN} smallest of {len(names)} classes")
    return lines


def _size_values(found: DataCheck) -> dict[str, dict[str, float]]:
    values = {"width": [p.width for p in found.images], "height": [p.height for p in found.images]}
    return {
        name: {"least": min(side), "median": float(np.median(side)), "most": max(side)}
        for name, side in values.items()
        if side
    }


def _sizes(found: DataCheck) -> str:
    different = {(image.width, image.height) for image in found.images}
    if len(different) == 1:
        return "all images have {} x {} pixels".format(*different.pop())
    sides = [
        f"{name} {side['least']} to {side['most']} pixels, median {side['median']:g}"
        for name, side in _size_values(found).items()
    ]
    return "; ".join([f"{len(different)} different sizes", *sides])
