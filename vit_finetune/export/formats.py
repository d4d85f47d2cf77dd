"""The formats: how each is written, and how a program without this project reads it again."""

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

from vit_finetune.model.preprocess import Preprocess
from vit_finetune.module import ViTClassifier

ModelMetadata = dict[str, Any]
"""What a file says about itself in plain values: classes, temperature, preprocessing, input and output."""
InferenceFn = Callable[[Tensor], Tensor]
"""Maps uint8 images ``(B, 3, H, W)`` to float32 probabilities ``(B, C)``, both on the CPU."""
ANY_BATCH = ({0: torch.export.Dim("batch")},)


class Format(NamedTuple):
    """One format.

    Args:
        needs: Packages to write and check it, each with its oldest release that can.
        file: Name of the file with the weights.
        write: Puts the model and its contract into a folder.
        load: Reads the folder with the foreign library and returns what runs it.
    """

    needs: dict[str, str]
    file: str
    write: Callable[[ViTClassifier, ModelMetadata, Path], None]
    load: Callable[[Path], InferenceFn]

    def missing(self) -> list[str]:
        """The packages that have to be installed first, as pip requirements."""
        return [f"{name}>={oldest}" for name, oldest in self.needs.items() if not _installed(name, oldest)]


def _installed(name: str, oldest: str) -> bool:
    try:
        return Version(version(name)) >= Version(oldest)
    except PackageNotFoundError:
        return False


class ExportWrapper(nn.Module):
    """The whole way from stored images to probabilities as one module, for tracing."""

    def __init__(self, model: ViTClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Maps uint8 ``(B, 3, H, W)`` to calibrated probabilities, float32 ``(B, C)``."""
        return self.model.probabilities(self.model(images))


def trace(model: ViTClassifier, metadata: ModelMetadata) -> torch.export.ExportedProgram:
    """Traces the model for images of one size and any number of them."""
    answer = ExportWrapper(model)
    example = torch.zeros(2, *metadata["input"]["shape"][1:], dtype=torch.uint8)  # of one, the 1 would become fixed
    with torch.no_grad(), _quiet():
        answer(example)  # leaves the resize weights in their cache: constants to the tracer, not something to compute
        return torch.export.export(answer, (example,), dynamic_shapes=ANY_BATCH)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what exporters tell about their own insides; errors are raised all the same."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def write_onnx(model: ViTClassifier, metadata: ModelMetadata, folder: Path) -> None:
    """Writes ``model.onnx``; the contract goes into its metadata, each value as JSON."""
    program = trace(model, metadata)
    with _quiet():
        onnx = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            dynamic_shapes=ANY_BATCH,  # traced so already, but else the name of the dimension is lost
            input_names=[metadata["input"]["name"]],
            output_names=[metadata["output"]["name"]],
        )
        assert onnx is not None
        onnx.model.metadata_props.update({key: json.dumps(value) for key, value in metadata.items()})
        onnx.save(folder / "model.onnx")


def load_onnx(folder: Path) -> InferenceFn:
    """Opens it in onnxruntime on the CPU, with as many threads as PyTorch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def write_torch_export(model: ViTClassifier, metadata: ModelMetadata, folder: Path) -> None:
    """Writes ``model.pt2``; the contract is its extra file ``metadata.json``."""
    with _quiet():
        torch.export.save(
            trace(model, metadata), folder / "model.pt2", extra_files={"metadata.json": json.dumps(metadata)}
        )


def load_torch_export(folder: Path) -> InferenceFn:
    """Opens it with ``torch.export.load``."""
    program = torch.export.load(folder / "model.pt2").module()

    def run(images: Tensor) -> Tensor:
        probabilities: Tensor = program(images)
        return probabilities

    return run


def write_timm(model: ViTClassifier, metadata: ModelMetadata, folder: Path) -> None:
    """Writes the bare network as ``model.safetensors`` and ``config.json``, as timm's own models lie on the hub."""
    from timm.models import save_for_hf

    net: Any = model.net
    preprocessing = metadata["preprocessing"]
    net.pretrained_cfg = {
        **net.pretrained_cfg,
        "input_size": (3, *preprocessing["size"]),
        # Square images are resized whole, others as in training: shorter side resized, center cut.
        "crop_pct": 1.0,
        "crop_mode": "center",
        "custom_load": False,  # some architectures read .npz files from the hub
        **{key: preprocessing[key] for key in ("mean", "std", "interpolation")},
    }
    arguments = {"img_size": model.hparams["img_size"]} if model.hparams["img_size"] else {}
    save_for_hf(
        net,
        str(folder),
        model_config={"label_names": metadata["class_names"], "temperature": metadata["temperature"]},
        model_args=arguments | (model.hparams["timm_kwargs"] or {}),
        safe_serialization=True,
    )


def load_timm(folder: Path) -> InferenceFn:
    """Builds the network with ``timm.create_model``, and the rest from what ``config.json`` says."""
    import timm

    net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(net)
    preprocess = Preprocess(config["input_size"][1:], config["mean"], config["std"], config["interpolation"])
    temperature = json.loads((folder / "config.json").read_text())["temperature"]
    return lambda images: (net(preprocess(images)) / temperature).softmax(-1)


# The bounds of the extra "export" in pyproject.toml, which gives the reasons.
ONNX = {"onnx": "1.18", "onnxruntime": "1.20", "onnxscript": "0.7.2"}
FORMATS = {
    "onnx": Format(ONNX, "model.onnx", write_onnx, load_onnx),
    "torch_export": Format({}, "model.pt2", write_torch_export, load_torch_export),
    "timm": Format({}, "model.safetensors", write_timm, load_timm),
}
