"""Export formats: write a model, and load it again as a program without this project would."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn
from typing_extensions import NotRequired, TypedDict, override

from vit_finetune.model.preprocess import Preprocess
from vit_finetune.module import ViTClassifier

InferenceFn = Callable[[Tensor], Tensor]
"""Maps uint8 images ``(B, 3, H, W)`` to float32 probabilities ``(B, C)``, both on the CPU."""
DYNAMIC_BATCH = ({0: torch.export.Dim("batch")},)


class Preprocessing(TypedDict):
    """Constants of the preprocessing inside the file."""

    size: list[int]
    mean: list[float]
    std: list[float]
    interpolation: str
    resize: str
    """``crop`` or ``stretch``: how images were brought to the size of the input."""
    crop_pct: float
    """Fraction of height and width that a crop keeps."""


class TensorSpec(TypedDict):
    """Input or output of the file."""

    name: str
    dtype: str
    shape: list[Any]
    """``"batch"``, then integers."""
    channels: NotRequired[str]


class ModelMetadata(TypedDict):
    """Description of the model that is stored in the file, in plain values."""

    class_names: list[str]
    temperature: float
    preprocessing: Preprocessing
    input: TensorSpec
    output: TensorSpec
    architecture: str
    vit_finetune: str


class Format(NamedTuple):
    """An export format.

    Attributes:
        requirements: Packages it needs, each with its minimum version.
        file: Name of the file with the weights.
        write: Writes the model and its metadata to a folder.
        load: Loads the folder without this project's code for the network.
    """

    requirements: dict[str, str]
    file: str
    write: Callable[[ViTClassifier, ModelMetadata, Path], None]
    load: Callable[[Path], InferenceFn]

    def missing_packages(self) -> list[str]:
        """Return the pip requirements that are not satisfied."""
        return [f"{name}>={minimum}" for name, minimum in self.requirements.items() if not _installed(name, minimum)]


def _installed(name: str, minimum: str) -> bool:
    try:
        return Version(version(name)) >= Version(minimum)
    except PackageNotFoundError:
        return False


class ExportWrapper(nn.Module):
    """Preprocessing, network and calibrated softmax as one module, for tracing."""

    def __init__(self, model: ViTClassifier) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 images ``(B, 3, H, W)`` to calibrated probabilities, float32 ``(B, C)``."""
        return self.model.probabilities(self.model(images))


def trace(model: ViTClassifier, metadata: ModelMetadata) -> torch.export.ExportedProgram:
    """Trace the model for a fixed image size and any batch size."""
    wrapper = ExportWrapper(model)
    example = torch.zeros(2, *metadata["input"]["shape"][1:], dtype=torch.uint8)  # a batch size of 1 would become fixed
    with torch.no_grad(), _quiet():
        wrapper(example)  # caches the resize matrices, which the tracer then takes as constants
        return torch.export.export(wrapper, (example,), dynamic_shapes=DYNAMIC_BATCH)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and log messages of the exporters; errors are still raised."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def write_onnx(model: ViTClassifier, metadata: ModelMetadata, folder: Path) -> None:
    """Write ``model.onnx`` with the model metadata as its metadata properties, each value as JSON."""
    program = trace(model, metadata)
    with _quiet():
        onnx = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            dynamic_shapes=DYNAMIC_BATCH,  # the program has them already, but only this keeps the dimension's name
            input_names=[metadata["input"]["name"]],
            output_names=[metadata["output"]["name"]],
        )
        assert onnx is not None
        onnx.model.metadata_props.update({key: json.dumps(value) for key, value in metadata.items()})
        onnx.save(folder / "model.onnx")


def load_onnx(folder: Path) -> InferenceFn:
    """Open ``model.onnx`` in onnxruntime on the CPU, with as many threads as PyTorch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def write_torch_export(model: ViTClassifier, metadata: ModelMetadata, folder: Path) -> None:
    """Write ``model.pt2`` with the model metadata as its extra file ``metadata.json``."""
    extra_files = {"metadata.json": json.dumps(metadata)}
    with _quiet():
        torch.export.save(trace(model, metadata), folder / "model.pt2", extra_files=extra_files)


def load_torch_export(folder: Path) -> InferenceFn:
    """Open ``model.pt2`` with ``torch.export.load``."""
    program = torch.export.load(folder / "model.pt2").module()

    def infer(images: Tensor) -> Tensor:
        probabilities: Tensor = program(images)
        return probabilities

    return infer


def write_timm(model: ViTClassifier, metadata: ModelMetadata, folder: Path) -> None:
    """Write only the network, as ``model.safetensors`` and ``config.json``, the layout of timm's models on the hub."""
    from timm.models import save_for_hf

    net: Any = model.net
    preprocessing = metadata["preprocessing"]
    (height, width), stored = preprocessing["size"], metadata["input"]["shape"][2:]
    stretched = height * stored[1] != width * stored[0]  # by the model itself
    net.pretrained_cfg = {
        **net.pretrained_cfg,
        "input_size": (3, *preprocessing["size"]),
        "crop_pct": preprocessing["crop_pct"],
        "crop_mode": "squash" if preprocessing["resize"] == "stretch" or stretched else "center",
        "custom_load": False,  # some architectures load .npz files from the hub
        "mean": preprocessing["mean"],
        "std": preprocessing["std"],
        "interpolation": preprocessing["interpolation"],
    }
    img_size = model.config.img_size
    save_for_hf(
        net,
        str(folder),
        model_config={"label_names": metadata["class_names"], "temperature": metadata["temperature"]},
        model_args=({"img_size": img_size} if img_size else {}) | model.config.timm_kwargs,
        safe_serialization=True,
    )


def load_timm(folder: Path) -> InferenceFn:
    """Build the network with ``timm.create_model``, and preprocessing and softmax from ``config.json``."""
    import timm

    net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(net)
    preprocess = Preprocess(config["input_size"][1:], config["mean"], config["std"], config["interpolation"])
    temperature = json.loads((folder / "config.json").read_text())["temperature"]
    return lambda images: (net(preprocess(images)) / temperature).softmax(-1)


# The same minimum versions as in the extra "export" of pyproject.toml, which gives the reasons.
ONNX = {"onnx": "1.18", "onnxruntime": "1.20", "onnxscript": "0.7.2"}
FORMATS = {
    "onnx": Format(ONNX, "model.onnx", write_onnx, load_onnx),
    "torch_export": Format({}, "model.pt2", write_torch_export, load_torch_export),
    "timm": Format({}, "model.safetensors", write_timm, load_timm),
}
