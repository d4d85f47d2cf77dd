"""Every file in configs/ runs through the real command line, with a tiny model and few batches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import CPU, REPOSITORY, TINY_MODEL, make_tree, only, scalars, weights
from vit_finetune import ViTClassifier, main

SUITES = sorted((REPOSITORY / "configs" / "benchmark").glob("*.yaml"))
CONFIGS = sorted(set((REPOSITORY / "configs").rglob("*.yaml")) - set(SUITES))
RECIPES = [path for path in CONFIGS if path.parent.name == "configs"]
OVERLAYS = [path for path in CONFIGS if path not in RECIPES]
# Strategies need several processes or GPUs: see model/test_parallel.py, test_distributed.py and gpu/.
RUNNABLE = [path for path in CONFIGS if path.parent.name != "strategy" and path.stem != "compile"]
SHRINK = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_config_runs(path: Path, cifar: Path, cifar100: Path, tmp_path: Path) -> None:
    text = path.read_text()
    if "lora_rank" in text:
        pytest.importorskip("peft")
    generated = "data: Shapes" in text or "Contours" in text
    data = ["--data.train_size=200", "--data.val_fraction=0.1"] if generated else [f"--data.root={cifar}"]
    data += ["--data.outlines=4", "--data.materials=4"] if "Contours" in text else []
    if "data: ImageFolder" in text:
        data = [f"--data.root={make_tree(tmp_path / 'images', {'train': 6, 'val': 3})}"]
    main(["fit", f"--config={path}", *CPU, *SHRINK, *([] if generated else TINY_MODEL), *data, "--data.batch_size=4"])
    run = tmp_path / "runs" / path.stem
    assert only(run, "last.ckpt") and only(run, "best-*.ckpt")
    monitor = yaml.safe_load(only(run, "config.yaml").read_text())["best_checkpoint"]["monitor"]
    assert monitor in scalars(run)


@pytest.mark.slow
def test_compile_runs_and_saves_plain_keys(cifar: Path, tmp_path: Path) -> None:
    config = REPOSITORY / "configs" / "speed" / "compile.yaml"
    main(["fit", f"--config={config}", *CPU, *SHRINK, *TINY_MODEL, f"--data.root={cifar}", "--data.batch_size=4"])
    last = only(tmp_path, "last.ckpt")
    assert not [key for key in weights(last) if "_orig_mod" in key]
    main(["test", f"--ckpt_path={last}", *CPU, "--model.compile=false"])


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: str(path.relative_to(REPOSITORY)))
@pytest.mark.parametrize("recipe", ["cifar10", "from_scratch"])
def test_overlay_fits_recipe(recipe: str, overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two recipes are enough: test_config_runs parses and runs each of the others."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", f"--config={REPOSITORY / 'configs' / recipe}.yaml", f"--config={overlay}", "--print_config"])
    assert stop.value.code in (0, None)
    printed = yaml.safe_load(capsys.readouterr().out)
    for section, options in yaml.safe_load(overlay.read_text()).items():
        for name, value in options.items() if isinstance(options, dict) else ():
            if not isinstance(value, (dict, list)):
                assert printed[section][name] == value


def test_fsdp_without_a_gpu_is_refused_in_a_line(fails: Callable[..., str]) -> None:
    config = REPOSITORY / "configs" / "strategy" / "fsdp.yaml"
    for options in ([f"--config={config}", "--trainer.accelerator=cpu"], ["--trainer.strategy=fsdp"]):
        if torch.cuda.is_available() and options[0].startswith("--trainer"):
            continue
        message = fails("fit", *options)
        assert "requires a GPU accelerator" in message and "configs/strategy/fsdp2.yaml" in message
        assert not Path("runs").exists()


def test_real_fp16_on_a_cpu(cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision of the plugin is kept: logits are float16 and the loss is scaled."""
    seen = []
    forward = ViTClassifier.forward
    monkeypatch.setattr(ViTClassifier, "forward", lambda self, x: seen.append(forward(self, x)) or seen[-1])
    config = REPOSITORY / "configs" / "precision" / "16-mixed-cpu.yaml"
    main(["fit", f"--config={config}", *CPU, *SHRINK, *TINY_MODEL, f"--data.root={cifar}", "--data.batch_size=4"])
    assert {logits.dtype for logits in seen} == {torch.float16}
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["MixedPrecision"]["scale"] > 1


@pytest.mark.parametrize("recipe", ["cifar10", "quickstart"])
def test_real_fp16_replaces_the_precision_of_a_recipe(recipe: str, cifar: Path, tmp_path: Path) -> None:
    configs = [f"--config={REPOSITORY / 'configs' / name}.yaml" for name in (recipe, "precision/16-mixed-cpu")]
    data = [*TINY_MODEL, f"--data.root={cifar}"] if recipe == "cifar10" else ["--data.train_size=200"]
    main(["fit", *configs, *CPU, *SHRINK, *data, "--data.batch_size=4"])
    assert "MixedPrecision" in torch.load(only(tmp_path, "last.ckpt"), weights_only=True)


def test_fsdp_switches_ema_off(capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP does not support EMA: with EMA, the command would be refused."""
    configs = [f"--config={REPOSITORY / 'configs' / name}.yaml" for name in ("cifar10", "strategy/fsdp")]
    with pytest.raises(SystemExit):
        main(["fit", *configs, "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["model"]["ema"] is None


@pytest.mark.parametrize("path", CONFIGS + SUITES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_header_has_command_purpose_hardware_and_measurement(path: Path) -> None:
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    option = "--suite" if path in SUITES else "--config"
    assert f"{option} {path.relative_to(REPOSITORY)}" in header[0]
    for word in ("Shows:", "Hardware:", "Measured:"):
        assert any(word in line for line in header), word


def test_quickstart_precision_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = REPOSITORY / "configs" / "quickstart.yaml"
    for units, precision in ((True, "bf16-mixed"), (False, "32-true")):
        monkeypatch.setattr("vit_finetune.environment.has_native_bf16", lambda units=units: units)
        main(["fit", f"--config={config}", *CPU, *SHRINK, "--data.train_size=200", f"--experiment=units-{units}"])
        saved = yaml.safe_load(only(Path("runs") / f"units-{units}", "config.yaml").read_text())
        assert saved["trainer"]["precision"] == precision
