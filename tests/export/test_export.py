"""Exported files, loaded by other libraries alone, predict as the checkpoint does; files that differ are refused."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import CPU, REPOSITORY, TINY_KWARGS, make_tree, noise_image, only
from vit_finetune import ViTClassifier, main
from vit_finetune.export import export, formats, verify

KWARGS = TINY_KWARGS | {"class_token": False, "global_pool": "avg", "proj_drop_rate": 0.1}


def train(folder: Path, *more: str) -> Path:
    """Train a network with input size 32 on 24-pixel images; return the best checkpoint."""
    tree = folder / "images"
    if not tree.exists():
        make_tree(tree, {"train": 6, "val": 3}, side=24)
    model = ["--model.name=vit_tiny_patch16_224", "--model.pretrained=false", "--model.img_size=32"]
    model += [f"--model.timm_kwargs={KWARGS}", "--model.drop_path=0.1", "--model.lr=1e-3"]
    data = ["--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4"]
    run = ["--trainer.max_epochs=1", f"--trainer.default_root_dir={folder / 'runs'}", *CPU]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["vit-finetune"])
        main(["fit", *model, *data, *run, *more])
    return only(folder / "runs", "best-*.ckpt")


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


def need(name: str) -> None:
    """Skip the test if the extra ``export`` is not installed."""
    for package in formats.FORMATS[name].missing_packages():
        pytest.skip(f"needs {package}")


@pytest.fixture(scope="module")
def exported(best: Path) -> Callable[[str], Path]:
    """Return a function that exports a format once and returns its folder."""

    @functools.cache
    def export(name: str) -> Path:
        main(["export", f"--ckpt_path={best}", f"--format={name}"])
        return best.parent.parent / "export" / f"{best.stem}-{name}"

    return export


def read_onnx(folder: Path) -> tuple[Callable[[Tensor], Any], list[str]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert session.get_inputs()[0].shape == ["batch", 3, 24, 24] and session.get_inputs()[0].type == "tensor(uint8)"
    names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
    return lambda images: session.run(None, {"images": images.numpy()})[0], names


def read_torch_export(folder: Path) -> tuple[Callable[[Tensor], Any], list[str]]:
    extra = {"metadata.json": ""}
    program = torch.export.load(folder / "model.pt2", extra_files=extra).module()
    return lambda images: program(images).detach().numpy(), json.loads(extra["metadata.json"])["class_names"]


def read_timm(folder: Path) -> tuple[Callable[[Tensor], Any], list[str]]:
    import timm

    net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert net.cls_token is None and len(net.blocks) == 2 and net.patch_embed.patch_size == (8, 8)
    format = timm.data.resolve_model_data_config(net)
    assert tuple(format["input_size"]) == (3, 32, 32)
    config = json.loads((folder / "config.json").read_text())

    def run(images: Tensor) -> Any:
        mean, std = (torch.tensor(format[key])[:, None, None] for key in ("mean", "std"))
        x = F.interpolate((images / 255 - mean) / std, (32, 32), mode=format["interpolation"], antialias=True)
        with torch.no_grad():
            return (net(x) / config["temperature"]).softmax(-1).numpy()

    return run, config["label_names"]


READERS = {"onnx": read_onnx, "torch_export": read_torch_export, "timm": read_timm}


@pytest.mark.parametrize("name", READERS)
def test_file_predicts_as_the_checkpoint(name: str, best: Path, exported: Callable[[str], Path]) -> None:
    need(name)
    run, names = READERS[name](exported(name))
    model = ViTClassifier.load_from_checkpoint(best, map_location="cpu").eval()
    assert names == model.class_names == ["a", "b", "c"] and model.temperature != 1
    for count in (1, 5):
        images = torch.randint(0, 256, (count, 3, 24, 24), dtype=torch.uint8)
        with torch.no_grad():
            expected = model.probabilities(model(images))
        found = run(images)
        assert found.shape == (count, 3) and found.dtype == np.float32
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4, rtol=0)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("onnx", "torch_export")]


@pytest.mark.parametrize("name", [*SLOW, "timm"])
def test_input_that_is_not_square(name: str, tmp_path: Path) -> None:
    """The export is verified on the validation images; the file keeps the size and predicts as the checkpoint."""
    need(name)
    checkpoint = train(tmp_path, "--model.img_size=[16, 48]")
    main(["export", f"--ckpt_path={checkpoint}", f"--format={name}", "--output=exported"])
    assert "`img_size: [16, 48]`" in (tmp_path / "exported" / "README.md").read_text()
    model = ViTClassifier.load(checkpoint)
    images = torch.randint(0, 256, (5, 3, 24, 24), dtype=torch.uint8)
    with torch.no_grad():
        expected = model.probabilities(model(images))
        found = formats.FORMATS[name].load(tmp_path / "exported")(images)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    if name == "timm":
        import timm

        config = timm.data.resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'exported'}"))
        transform = timm.data.create_transform(**config, is_training=False)
        assert transform(noise_image(0, np.random.default_rng(0))).shape == (3, 16, 48)


def test_file_does_not_contain_test_time_augmentation(best: Path, tmp_path: Path) -> None:
    """The file is verified against single passes, and a warning says so."""
    with pytest.warns(UserWarning, match=r"classifies each image once, without --model.tta flip"):
        main(
            ["export", f"--ckpt_path={best}", "--format=torch_export", "--model.tta=flip", f"--output={tmp_path / 'e'}"]
        )
    assert (tmp_path / "e" / "model.pt2").is_file()


@pytest.mark.parametrize("name", ["onnx", "torch_export", pytest.param("timm", marks=pytest.mark.slow)])
def test_usage_on_the_card_runs_without_this_project(
    name: str, best: Path, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    need(name)
    folder = exported(name)
    noise_image(1, np.random.default_rng(3), 24).save(folder / "image.png")
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    script = "import sys; sys.modules['vit_finetune'] = None\n" + code.group(1)
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    label, probability = done.stdout.split()
    model = ViTClassifier.load_from_checkpoint(best, map_location="cpu").eval()
    pixels = torch.from_numpy(np.array(noise_image(1, np.random.default_rng(3), 24)).transpose(2, 0, 1))[None]
    with torch.no_grad():
        expected = model.probabilities(model(pixels))[0]
    assert label == "abc"[int(expected.argmax())]
    # timm's transform rounds the resized image to 8 bits.
    assert float(probability) == pytest.approx(float(expected.max()), abs=5e-3 if name == "timm" else 1e-4)


def test_folder_and_card(best: Path, exported: Callable[[str], Path]) -> None:
    folder = exported("timm")
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".png") == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    text = (folder / "README.md").read_text()
    stored = torch.load(best, weights_only=True)["vit_finetune"]
    assert stored["class_counts"] == {"train": [6, 6, 6], "val": [3, 3, 3]}
    for expected in (
        "| class | train | val |",
        "| a | 6 | 3 |",
        "| **all 3** | 18 | 9 |",
        f"`{stored['split_fingerprint']}`",
        "5 optimizer steps",
        "precision 32-true",
        "`drop_path: 0.1`, `img_size: 32`, `lr: 0.001`, `name: vit_tiny_patch16_224`, `pretrained: False`",
        "| 9 validation images, float32, CPU | checkpoint | this file |",
        f"temperature {stored['temperature']:.4g}",
        "Trained from scratch",
    ):
        assert expected in text, expected


def test_card_has_the_precision_of_a_plugin_and_unusual_class_names(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3}, side=24)
    for split in ("train", "val"):
        (tree / split / "a").rename(tree / split / "a|*")
    best = train(tmp_path, f"--config={REPOSITORY / 'configs' / 'precision' / '16-mixed-cpu.yaml'}")
    main(["export", f"--ckpt_path={best}", "--format=timm", "--output=card"])
    text = (tmp_path / "card" / "README.md").read_text()
    assert "precision 16-mixed" in text and r"| a\|\* | 6 | 3 |" in text


def test_broken_images_are_not_listed_in_the_working_directory(tmp_path: Path) -> None:
    best = train(tmp_path, "--data.skip_broken=true")
    (tmp_path / "skipped-validate.txt").write_text("mine")
    (tmp_path / "images" / "val" / "a" / "broken.png").write_bytes(b"")
    main(["export", f"--ckpt_path={best}", "--format=timm", "--output=card"])
    assert (tmp_path / "skipped-validate.txt").read_text() == "mine"


def test_half_precision_and_compiled_runs_are_exported_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best = train(tmp_path, "--trainer.precision=bf16-true")
    checkpoint = torch.load(best, weights_only=True)
    assert checkpoint["state_dict"]["net.head.weight"].dtype == torch.bfloat16
    checkpoint["hyper_parameters"] |= {"compile": True, "grad_checkpointing": True}
    torch.save(checkpoint, best)
    monkeypatch.setattr(torch.nn.Module, "compile", None)
    report = best.parent.parent / "test-report" / "report.json"
    report.parent.mkdir()
    about = {"checkpoint": str(best), "data": "ImageFolder, photos", "precision": "bf16-true"}
    top1 = {"value": 6 / 7, "low": 0.5, "high": 0.9}
    report.write_text(json.dumps({"macro": {"support": 7}, "top1": top1, "about": about}))
    main(["export", f"--ckpt_path={best}", "--format=timm", "--output=out/mine"])
    printed = capsys.readouterr().out
    accuracy = re.findall(r"^(checkpoint|file) +val/acc ([\d.]+)", printed, re.MULTILINE)
    assert [name for name, _ in accuracy] == ["checkpoint", "file"] and accuracy[0][1] == accuracy[1][1]
    assert "top-1 equal for 9 of 9 images, largest difference of a probability" in printed
    assert Path("out/mine/model.safetensors").is_file() and not list(best.parent.parent.glob("export"))
    text = Path("out/mine/README.md").read_text()
    assert "precision bf16-true" in text
    assert "On 7 test images (ImageFolder, photos, bf16-true): top-1 accuracy 0.8571" in text


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run an export whose file differs; return the output."""
    with pytest.raises(SystemExit) as stop:
        main(["export", *args, "--output=out/wrong"])
    assert stop.value.code == 1
    assert not list(Path("out").iterdir())
    printed = capsys.readouterr()
    assert "differ from those of" in printed.err and "Traceback" not in printed.err
    return printed.out


def test_other_temperature_in_the_file_is_refused(
    best: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = export.build_metadata

    def changed(*args: Any) -> Any:
        metadata = original(*args)
        return metadata | {"temperature": 1.02 * metadata["temperature"]}

    monkeypatch.setattr(export, "build_metadata", changed)
    assert "top-1 equal for 9 of 9" in refused(capsys, f"--ckpt_path={best}", "--format=timm")


def test_other_classes_in_the_graph_are_refused(
    best: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = formats.ExportWrapper.forward
    monkeypatch.setattr(formats.ExportWrapper, "forward", lambda self, images: original(self, images).roll(1, -1))
    assert "top-1 equal for 0 of 9" in refused(capsys, f"--ckpt_path={best}", "--format=torch_export")


@pytest.mark.parametrize(("change", "passed"), [(0.0, True), (9e-5, True), (1.1e-4, False), (float("nan"), False)])
def test_tolerance(change: float, passed: bool) -> None:
    probabilities = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    batch = {"image": torch.zeros(2, 3, 1, 1)}
    verified = verify.compare(probabilities, torch.tensor([1, 1]), lambda _: probabilities + change, [batch])
    assert verified.passed is passed and verified.images == 2 and verified.accuracy == 0.5


def test_nothing_is_overwritten(best: Path, exported: Callable[[str], Path], fails: Callable[..., str]) -> None:
    file = exported("timm") / "model.safetensors"
    before = file.stat()
    assert "already exists" in fails("export", f"--ckpt_path={best}", "--format=timm")
    Path("empty").mkdir()
    assert "empty already exists" in fails("export", f"--ckpt_path={best}", "--format=timm", "--output=empty")
    assert file.stat() == before


def test_package_is_missing(best: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]) -> None:
    def version(name: str) -> str:
        if name == "onnxruntime":
            raise formats.PackageNotFoundError(name)
        return "0.9" if name == "onnx" else "99"

    monkeypatch.setattr(formats, "version", version)
    message = fails("export", f"--ckpt_path={best}")
    assert "--format onnx needs onnx>=1.18, onnxruntime>=1.20: pip install 'vit_finetune[export]'" in message


def test_images_are_elsewhere(best: Path, fails: Callable[..., str], tmp_path: Path) -> None:
    options = ["export", f"--ckpt_path={best}", "--format=timm", "--output=out"]
    message = fails(*options, "--data.root=nowhere")
    assert "--data.root nowhere is not a folder" in message and "verifies the file on the validation images" in message
    moved = make_tree(tmp_path / "moved", {"train": 1, "val": 2}, side=24)
    main([*options, f"--data.root={moved}"])
    assert "| 6 validation images" in Path("out/README.md").read_text()


def test_needs_a_checkpoint(fails: Callable[..., str]) -> None:
    assert "export needs a trained model" in fails("export", "--format=timm")


def speed_rows(best: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    main(["export", f"--ckpt_path={best}", "--format=timm", "--output=out", "--benchmark=true", "--batch_sizes=[1,30]"])
    row = r"^batch (\d+) +(\w+) +[\d.]+ \([\d.]+ to [\d.]+\) +images/s  p50 [\d.]+  p95 [\d.]+  p99 [\d.]+ ms  4 calls$"
    printed = re.findall(row, capsys.readouterr().out, re.MULTILINE)
    assert printed == re.findall(row, Path("out/README.md").read_text(), re.MULTILINE)
    return printed


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 2), ("SECONDS", 0.0), ("MIN_CALLS", 2)):
        monkeypatch.setattr(f"vit_finetune.export.latency.{name}", value)


@pytest.mark.usefixtures("quick")
def test_speed_is_printed_and_on_the_card(
    best: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vit_finetune.environment.cpp_compiler", lambda: None)
    assert speed_rows(best, capsys) == [("1", "eager"), ("1", "timm"), ("30", "eager"), ("30", "timm")]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_speed_of_the_compiled_model(best: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [name for _, name in speed_rows(best, capsys)] == ["eager", "compiled", "timm"] * 2
