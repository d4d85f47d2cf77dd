"""List image files in folders of all kinds, and read many of them."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from vit_finetune.data import file_listing
from vit_finetune.data.decode import read_size
from vit_finetune.data.file_listing import find_images, list_classes, log_progress, try_files
from vit_finetune.errors import ImageDecodeError


def plant(root: Path, *names: str) -> None:
    """Create empty files."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def found(root: Path) -> list[str]:
    return [os.path.relpath(path, root) for path in find_images(root)]


@pytest.mark.parametrize(
    "name",
    [
        ".hidden.png",
        "._x.jpg",
        ".ipynb_checkpoints/x.png",
        "__MACOSX/x.png",
        "a/__MACOSX/._x.jpg",
        "@eaDir/x.jpg/thumb.jpg",
        "#recycle/x.png",
        "$RECYCLE.BIN/x.png",
        "System Volume Information/x.png",
        "lost+found/x.png",
        "Thumbs.db",
        "desktop.ini",
        ".DS_Store",
        "notes.txt",
        "x.png.part",
        "png",
    ],
)
def test_hidden_and_system_files_are_left_out(tmp_path: Path, name: str) -> None:
    plant(tmp_path, name, "x.png")
    assert found(tmp_path) == ["x.png"]
    assert set(list_classes(tmp_path)) <= {"a"}


def test_every_type_is_found_whatever_its_case_in_a_stable_order(tmp_path: Path) -> None:
    names = ["A.JPG", "b.Tiff", "c.webp", "folder.png/d.jfif", "z/e.pnm", "é.gif", "\udcff.bmp"]
    plant(tmp_path, *names)
    assert found(tmp_path) == ["A.JPG", "b.Tiff", "c.webp", "é.gif", "\udcff.bmp", "folder.png/d.jfif", "z/e.pnm"]


def test_links_are_followed_without_cycles(tmp_path: Path) -> None:
    plant(tmp_path / "tree", "a/x.png", "b/y.png")
    plant(tmp_path / "elsewhere", "z.png")
    (tmp_path / "tree" / "a" / "elsewhere").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tree" / "a" / "itself").symlink_to(tmp_path / "tree" / "a")
    (tmp_path / "tree" / "a" / "above").symlink_to(tmp_path / "tree")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "tree" / "a")
    assert found(tmp_path / "tree" / "a") == ["x.png", "elsewhere/z.png"]
    assert found(tmp_path / "tree") == ["a/x.png", "a/elsewhere/z.png", "b/y.png"]


def test_closed_folder_is_listed_like_a_broken_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, "closed/x.png", "open/x.png")
    true_scandir = os.scandir

    def scandir(folder: Any) -> Any:  # root, who may run the tests, is not stopped by permissions
        if os.path.basename(folder) == "closed":
            raise PermissionError(13, "Permission denied", folder)
        return true_scandir(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert found(tmp_path) == ["open/x.png", "closed"]
    with pytest.raises(ImageDecodeError, match="closed': not a regular file, or a folder that cannot be opened"):
        read_size(tmp_path / "closed")


def test_class_names_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    plant(tmp_path, "café/x.png", "raw\udcff/x.png")
    assert list(list_classes(tmp_path)) == ["café", "raw\udcff"]


def test_number_of_waiting_tasks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million files do not become a million tasks in memory; results and errors come in order."""
    monkeypatch.setattr(file_listing, "AT_ONCE", 4)
    tried: list[str] = []

    def attempt(path: str) -> int:
        tried.append(path)
        if path == "1":
            raise ImageDecodeError("'1': broken")
        return int(path)

    results = try_files(attempt, [str(number) for number in range(10)], "tried")
    assert next(results) == 0 and len(tried) <= 4
    error = next(results)
    assert str(error) == "'1': broken" and isinstance(error, ImageDecodeError) and error.__traceback__ is None
    assert list(results) == list(range(2, 10))


def test_slow_work_logs_progress(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert list(log_progress("abc", "letters", 3)) == list("abc") and not caplog.messages
        monkeypatch.setattr(file_listing, "REPORT_EVERY", 0.0)
        assert list(log_progress("ab", "letters", 2)) == list("ab")
    assert caplog.messages == ["letters: 1 of 2", "letters: 2 of 2"]
