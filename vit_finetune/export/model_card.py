"""The model card: what someone who receives the file has to know."""

import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vit_finetune.checkpoint import read_header, run_folder
from vit_finetune.data import ImageDataModule
from vit_finetune.export.formats import FORMATS, ModelMetadata
from vit_finetune.export.verify import LIMIT, VerificationResult
from vit_finetune.model import pretrained
from vit_finetune.module import ViTClassifier

OPEN_IMAGE = """\
from PIL import Image, ImageOps
image = ImageOps.exif_transpose(Image.open("image.png")).convert("RGB")"""
USAGE = {
    "onnx": """\
import json, numpy as np, onnxruntime
{open_image}
pixels = np.asarray(ImageOps.fit(image, ({width}, {height}), Image.Resampling.BICUBIC)).transpose(2, 0, 1)[None]
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
probabilities = session.run(None, {{"images": pixels}})[0][0]
print(names[probabilities.argmax()], probabilities.max())""",
    "torch_export": """\
import json, numpy as np, torch
{open_image}
pixels = np.array(ImageOps.fit(image, ({width}, {height}), Image.Resampling.BICUBIC)).transpose(2, 0, 1)[None]
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
    "This is the bare network: its input is a normalized image, its output logits. "
    "`timm.data.resolve_model_data_config` gives the preprocessing, `config.json` the temperature that divides logits. "
    "timm's transforms round resized images to 8 bits and clip them, which training did not; the figures above were "
    "measured without that."
)


class CardInputs(NamedTuple):
    """What a card is written from.

    Args:
        model: As exported.
        data: With the validation images.
        checkpoint: Where the weights came from.
        name: The format.
        file: Name of the model file.
        contract: What the file promises.
        agreed: How it compares with the checkpoint.
        speed: Table of the benchmark, or nothing.
    """

    model: ViTClassifier
    data: ImageDataModule
    checkpoint: Path
    name: str
    file: str
    metadata: ModelMetadata
    verified: VerificationResult
    speed: str


def write(facts: CardInputs) -> str:
    """Returns the card as Markdown."""
    header = read_header(facts.checkpoint)
    sections = {
        "Data": _data(facts, header),
        "Recipe": _recipe(facts, header),
        "Metrics": _metrics(facts),
        "Speed": f"```\n{facts.speed}\n```" if facts.speed else "",
        "Input and output": _input_and_output(facts),
        "Usage": f"In this folder:\n\n```python\n{usage(facts.name, facts.metadata)}\n```",
        "Limits": _limits(facts),
        "Versions": _versions(facts),
        "License": _license(facts.model),
    }
    title = f"# {facts.metadata['architecture']}, fine-tuned: {facts.file}\n"
    return "\n".join([title, *(f"## {name}\n\n{text}\n" for name, text in sections.items() if text)])


def usage(name: str, metadata: ModelMetadata) -> str:
    """A few lines of Python that answer one image with the file, without this project."""
    _, _, height, width = metadata["input"]["shape"]
    return USAGE[name].format(open_image=OPEN_IMAGE, height=height, width=width)


def _data(facts: CardInputs, header: dict[str, Any]) -> str:
    trained = header.get("vit_finetune", {})
    counts = trained.get("class_counts") or {"val": facts.data.class_counts["val"]}
    names = facts.metadata["class_names"]
    table = [f"| class | {' | '.join(counts)} |", "|---" * (len(counts) + 1) + "|"]
    for index, name in enumerate(names):
        table.append(f"| {_cell(name)} | {' | '.join(str(column[index]) for column in counts.values())} |")
    table.append(f"| **all {len(names)}** | {' | '.join(str(sum(column)) for column in counts.values())} |")
    options = _different(type(facts.data), facts.data.hparams)
    split = f"Split fingerprint of the training images: `{trained.get('split_fingerprint')}`."
    return "\n".join([f"{type(facts.data).__name__}{_listed(options)}", "", *table, "", split])


def _recipe(facts: CardInputs, header: dict[str, Any]) -> str:
    run = run_folder(facts.checkpoint)
    options = _different(ViTClassifier, facts.model.hparams) | {"name": facts.model.hparams["name"]}
    options.pop("class_names", None)
    done = f"{header['global_step']} optimizer steps, epochs 0 to {header['epoch']}"
    precision = ""
    if run is not None:
        trainer = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")).get("trainer", {})
        plugins = [plugin for plugin in trainer.get("plugins") or [] if isinstance(plugin, dict)]
        brought = [plugin.get("init_args", {}).get("precision") for plugin in plugins]  # by 16-mixed-cpu.yaml
        precision = f", in precision {trainer.get('precision') or next(filter(None, brought), '32-true')}"
    return f"{done}{precision}. Options that differ from the defaults{_listed(options)}"


def _metrics(facts: CardInputs) -> str:
    verified = facts.verified
    return "\n".join(
        [
            f"| On {verified.images} validation images, float32, CPU | checkpoint | this file |",
            "|---|---|---|",
            f"| top-1 accuracy | {verified.accuracy:.4f} | {verified.accuracy_of_file:.4f} |",
            "",
            f"Top-1 is equal on all of them; the largest difference of a probability is {verified.difference:.1e} (limit "
            f"{LIMIT:.0e}). Probabilities are calibrated by temperature {facts.metadata['temperature']:.4g}, fitted on "
            "the validation images of the training. The checkpoint may have been chosen by its accuracy on them too: "
            "expect a little less on new images.",
            *_tested(facts.checkpoint),
        ]
    )


def _tested(checkpoint: Path) -> list[str]:
    """The accuracy of the newest test report of this checkpoint, if the run has one."""
    run = run_folder(checkpoint)
    reports = sorted(run.glob("test-report*/report.json"), key=_modified, reverse=True) if run else []
    for path in reports:
        report = json.loads(path.read_text(encoding="utf-8"))
        about, top1 = report["about"], report["top1"]
        if Path(about["checkpoint"]).name == checkpoint.name and _modified(path) > _modified(checkpoint):
            figures = f"top-1 accuracy {top1['value']:.4f} (95 % interval {top1['low']:.4f} to {top1['high']:.4f})"
            return ["", f"On {report['images']} test images ({about['data']}, {about['precision']}): {figures}."]
    return []


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _input_and_output(facts: CardInputs) -> str:
    given, result = facts.metadata["input"], facts.metadata["output"]
    if facts.name == "timm":
        return TIMM_NOTE
    height, width = given["shape"][2:]
    return "\n".join(
        [
            f"- Input `{given['name']}`: uint8, shape (batch, 3, {height}, {width}), RGB, any batch; not normalized. "
            "Other images: shorter side resized, center cut, as below.",
            f"- Output `{result['name']}`: float32, shape (batch, {result['shape'][1]}), each row adding up to 1, in "
            "the order of the class names.",
            "- Class names, temperature and preprocessing are in the file: "
            + ("its metadata, each value as JSON." if facts.name == "onnx" else "its extra file `metadata.json`."),
        ]
    )


def _limits(facts: CardInputs) -> str:
    return (
        f"It answers with one of its {len(facts.metadata['class_names'])} classes whatever the image shows, also "
        "where that is something else. Accuracy and calibration hold for images like those it "
        "was trained on. It was not examined for differences between groups of people or for deliberate deception."
    )


def _versions(facts: CardInputs) -> str:
    packages = ["torch", "timm", *FORMATS[facts.name].needs]
    ours = f"vit_finetune {facts.metadata['vit_finetune']}"
    return f"Written with {ours}, {', '.join(f'{name} {version(name)}' for name in packages)}."


def _license(model: ViTClassifier) -> str:
    """What is known about the weights that the training started from."""
    import timm

    name = model.hparams["name"]
    if model.hparams["weights"] == pretrained.BUNDLED:
        return "Training started from the weights that come with vit_finetune, which are under Apache-2.0."
    if model.hparams["weights"]:
        return f"Training started from the file `{model.hparams['weights']}`; its license applies to this one too."
    if not model.hparams["pretrained"]:
        return "Trained from scratch: only the license of the training images may apply."
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    license = getattr(config, "license", None) or "not stated"
    return f"Training started from timm's weights `{name}`; their license, by timm's record: {license}."


def _different(owner: type, options: Any) -> dict[str, Any]:
    """The options that are not at their defaults."""
    defaults = {
        name: parameter.default
        for base in reversed(owner.__mro__)
        for name, parameter in inspect.signature(base.__init__).parameters.items()  # type: ignore[misc]
    }
    shown = {key: value for key, value in options.items() if not key.startswith("_")}
    return {key: value for key, value in shown.items() if key not in defaults or value != defaults[key]}


def _listed(options: dict[str, Any]) -> str:
    return ": " + ", ".join(f"`{key}: {value}`" for key, value in sorted(options.items())) + "." if options else "."


def _cell(text: str) -> str:
    """Any class name as the text of a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
