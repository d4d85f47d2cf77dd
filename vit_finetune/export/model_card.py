"""The model card: a README with data, recipe, metrics, usage and limits of an exported model."""

import inspect
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vit_finetune.checkpoint import Checkpoint, public_items, read_header, run_folder
from vit_finetune.data import ImageDataModule
from vit_finetune.export.formats import FORMATS, ModelMetadata
from vit_finetune.export.verify import TOLERANCE, VerificationResult
from vit_finetune.formatting import escape_markdown, markdown_table
from vit_finetune.model import pretrained
from vit_finetune.module import ViTClassifier

OPEN_IMAGE = """\
from PIL import Image, ImageOps
image = ImageOps.exif_transpose(Image.open("image.png")).convert("RGB")"""
USAGE = {
    "onnx": """\
import json, numpy as np, onnxruntime
{open_image}
pixels = np.asarray({resize}).transpose(2, 0, 1)[None]
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
probabilities = session.run(None, {{"images": pixels}})[0][0]
print(names[probabilities.argmax()], probabilities.max())""",
    "torch_export": """\
import json, numpy as np, torch
{open_image}
pixels = np.array({resize}).transpose(2, 0, 1)[None]
extra = {{"metadata.json": ""}}
program = torch.export.load("model.pt2", extra_files=extra).module()
names = json.loads(extra["metadata.json"])["class_names"]
probabilities = program(torch.from_numpy(pixels))[0]
print(names[int(probabilities.argmax())], float(probabilities.max()))""",
    "timm": """\
import json, timm, torch
{open_image}
net = timm.create_model("local-dir:.", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net), is_training=False)
config = json.load(open("config.json"))
with torch.inference_mode():
    probabilities = (net(transform(image)[None]) / config["temperature"]).softmax(-1)[0]
print(config["label_names"][int(probabilities.argmax())], float(probabilities.max()))""",
}
TIMM_NOTE = (
    "The file contains only the network: its input is a normalized image, its output are logits. "
    "`timm.data.resolve_model_data_config` returns the preprocessing; divide logits by the temperature in "
    "`config.json`. timm's transforms round and clip the resized image to 8 bits, which training does not; the metrics "
    "above were measured without rounding."
)


class CardInputs(NamedTuple):
    """Contents of a model card.

    Attributes:
        model: As exported.
        data: With the validation images.
        checkpoint: The exported checkpoint.
        format: A key of :data:`vit_finetune.export.formats.FORMATS`.
        metadata: As stored in the file.
        verified: Comparison of the file with the checkpoint.
        speed: Table of the benchmark; empty if it was not run.
    """

    model: ViTClassifier
    data: ImageDataModule
    checkpoint: Path
    format: str
    metadata: ModelMetadata
    verified: VerificationResult
    speed: str


def write(inputs: CardInputs) -> str:
    """Return the card as Markdown."""
    header = read_header(inputs.checkpoint)
    sections = {
        "Data": _data(inputs, header),
        "Recipe": _recipe(inputs, header),
        "Metrics": _metrics(inputs),
        "Speed": f"```\n{inputs.speed}\n```" if inputs.speed else "",
        "Input and output": _input_and_output(inputs),
        "Usage": f"In this folder:\n\n```python\n{usage(inputs.format, inputs.metadata)}\n```",
        "Limits": _limits(inputs),
        "Versions": _versions(inputs),
        "License": _license(inputs.model),
    }
    title = f"# {inputs.metadata['architecture']}, fine-tuned: {FORMATS[inputs.format].file}\n"
    return "\n".join([title, *(f"## {name}\n\n{text}\n" for name, text in sections.items() if text)])


def usage(format: str, metadata: ModelMetadata) -> str:
    """Return a Python example that classifies one image with the file, without this project."""
    _, _, height, width = metadata["input"]["shape"]
    way, kept = metadata["preprocessing"]["resize"], metadata["preprocessing"]["crop_pct"]
    resize = f"image.resize(({width}, {height}), Image.Resampling.BICUBIC)"
    if way == "crop":  # a bleed is removed on each side
        bleed = f", bleed={(1 - kept) / 2:.4g}" if kept < 1 else ""
        resize = f"ImageOps.fit(image, ({width}, {height}), Image.Resampling.BICUBIC{bleed})"
    return USAGE[format].format(open_image=OPEN_IMAGE, resize=resize)


def _data(inputs: CardInputs, header: Checkpoint) -> str:
    training = header.get("vit_finetune", {})
    counts: dict[str, list[int]] = training.get("class_counts") or {"val": inputs.data.class_counts["val"]}
    names = inputs.metadata["class_names"]
    rows = [[escape_markdown(name), *map(str, row)] for name, *row in zip(names, *counts.values(), strict=True)]
    options = _non_default(type(inputs.data), public_items(inputs.data.hparams))
    rows.append([f"**all {len(names)}**", *(str(sum(column)) for column in counts.values())])
    return "\n\n".join(
        [
            f"{type(inputs.data).__name__}{_listed(options)}",
            markdown_table(("class", *counts), rows),
            f"Fingerprint of the training split: `{training.get('split_fingerprint')}`.",
        ]
    )


def _recipe(inputs: CardInputs, header: Checkpoint) -> str:
    hparams = inputs.model.hparams
    options = _non_default(ViTClassifier, public_items(hparams)) | {"name": hparams["name"]}
    options.pop("class_names", None)
    length = f"{header['global_step']} optimizer steps, epochs 0 to {header['epoch']}"
    run = run_folder(inputs.checkpoint)
    precision = f", precision {_precision(run / 'config.yaml')}" if run else ""
    return f"{length}{precision}. Options that differ from the defaults{_listed(options)}"


def _precision(config: Path) -> str:
    trainer = yaml.safe_load(config.read_text(encoding="utf-8")).get("trainer", {})
    plugins = [plugin for plugin in trainer.get("plugins") or [] if isinstance(plugin, dict)]
    from_plugins = [plugin.get("init_args", {}).get("precision") for plugin in plugins]  # as in 16-mixed-cpu.yaml
    precision: str = trainer.get("precision") or next(filter(None, from_plugins), "32-true")
    return precision


def _metrics(inputs: CardInputs) -> str:
    verified = inputs.verified
    header = (f"{verified.images} validation images, float32, CPU", "checkpoint", "this file")
    accuracy = ("top-1 accuracy", f"{verified.accuracy:.4f}", f"{verified.file_accuracy:.4f}")
    return "\n".join(
        [
            markdown_table(header, [accuracy]),
            "",
            "The predicted class is the same for all of them; the largest difference of a probability is "
            f"{verified.max_difference:.1e} (tolerance {TOLERANCE:.0e}). Probabilities are calibrated with temperature "
            f"{inputs.metadata['temperature']:.4g}, fitted on the validation images of the training run. If the "
            "checkpoint was also selected by its accuracy on them, expect a slightly lower accuracy on new images.",
            *_test_metrics(inputs.checkpoint),
        ]
    )


def _test_metrics(checkpoint: Path) -> list[str]:
    """Return the accuracy in the newest test report of this checkpoint, if the run has one."""
    run = run_folder(checkpoint)
    reports = sorted(run.glob("test-report*/report.json"), key=_modified, reverse=True) if run else []
    for path in reports:
        report = json.loads(path.read_text(encoding="utf-8"))
        about, top1, images = report["about"], report["top1"], report["macro"]["support"]
        if Path(about["checkpoint"]).name == checkpoint.name and _modified(path) > _modified(checkpoint):
            accuracy = f"top-1 accuracy {top1['value']:.4f} (95 % interval {top1['low']:.4f} to {top1['high']:.4f})"
            return ["", f"On {images} test images ({about['data']}, {about['precision']}): {accuracy}."]
    return []


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _input_and_output(inputs: CardInputs) -> str:
    if inputs.format == "timm":
        return TIMM_NOTE
    given, result = inputs.metadata["input"], inputs.metadata["output"]
    height, width = given["shape"][2:]
    place = "metadata properties, each value as JSON" if inputs.format == "onnx" else "extra file `metadata.json`"
    return "\n".join(
        [
            f"- Input `{given['name']}`: uint8, shape (batch, 3, {height}, {width}), RGB, any batch size, not "
            "normalized. Bring other images to this size as in the example below.",
            f"- Output `{result['name']}`: float32, shape (batch, {result['shape'][1]}), the probabilities of the "
            "classes in the order of the class names.",
            f"- Class names, temperature and preprocessing are stored in the file, in its {place}.",
        ]
    )


def _limits(inputs: CardInputs) -> str:
    return (
        f"The model always predicts one of its {len(inputs.metadata['class_names'])} classes, even if the image shows "
        "something else. Accuracy and calibration hold for images like those it was trained on. It was not evaluated "
        "for differences between groups of people or for robustness against adversarial inputs."
    )


def _versions(inputs: CardInputs) -> str:
    packages = ["torch", "timm", *FORMATS[inputs.format].requirements]
    versions = [f"vit_finetune {inputs.metadata['vit_finetune']}", *(f"{name} {version(name)}" for name in packages)]
    return f"Exported with {', '.join(versions)}."


def _license(model: ViTClassifier) -> str:
    """Describe the license of the weights that training started from."""
    import timm

    name, weights = model.hparams["name"], model.hparams["weights"]
    if weights == pretrained.BUNDLED:
        return "Training started from the weights bundled with vit_finetune, licensed under Apache-2.0."
    if weights:
        return f"Training started from the file `{weights}`; its license also applies to this file."
    if not model.hparams["pretrained"]:
        return "Trained from scratch: only the license of the training images may apply."
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    license = getattr(config, "license", None) or "not stated"
    return f"Training started from timm's weights `{name}`; their license according to timm: {license}."


def _non_default(owner: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the defaults of the class."""
    defaults = {
        name: parameter.default
        for base in reversed(owner.__mro__)
        for name, parameter in inspect.signature(base.__init__).parameters.items()  # type: ignore[misc]
    }
    return {key: value for key, value in options.items() if key not in defaults or value != defaults[key]}


def _listed(options: dict[str, Any]) -> str:
    return ": " + ", ".join(f"`{key}: {value}`" for key, value in sorted(options.items())) + "." if options else "."
