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

Contract = dict[str, Any]
"""What a file says about itself in plain values: classes, temperature, preprocessing, input and output."""
Runner = Callable[[Tensor], Tensor]
"""Maps uint8 pictures ``(B, 3, H, W)`` to float32 probabilities ``(B, C)``, both on the CPU."""
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
    write: Callable[[ViTClassifier, Contract, Path], None]
    load: Callable[[Path], Runner]

    def missing(self) -> list[str]:
        """The packages that have to be installed first, as pip requirements."""
        return [f"{name}>={oldest}" for name, oldest in self.needs.items() if not _installed(name, oldest)]


def _installed(name: str, oldest: str) -> bool:
    try:
        return Version(version(name)) >= Version(oldest)
    except PackageNotFoundError:
        return False


class Answer(nn.Module):
    """The whole way from stored pictures to probabilities as one module, for tracing."""

    def __init__(self, model: ViTClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Maps uint8 ``(B, 3, H, W)`` to calibrated probabilities, float32 ``(B, C)``."""
        return self.model.probabilities(self.model(images))


def trace(model: ViTClassifier, contract: Contract) -> torch.export.ExportedProgram:
    """Traces the model for pictures of one size and any number of them."""
    answer = Answer(model)
    example = torch.zeros(2, *contract["input"]["shape"][1:], dtype=torch.uint8)  # of one, the 1 would become fixed
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


def write_onnx(model: ViTClassifier, contract: Contract, folder: Path) -> None:
    """Writes ``model.onnx``; the contract goes into its metadata, each value as JSON."""
    program = trace(model, contract)
    with _quiet():
        onnx = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            dynamic_shapes=ANY_BATCH,  # traced so already, but else the name of the dimension is lost
            input_names=[contract["input"]["name"]],
            output_names=[contract["output"]["name"]],
        )
        assert onnx is not None
        onnx.model.metadata_props.update({key: json.dumps(value) for key, value in contract.items()})
        onnx.save(folder / "model.onnx")


def load_onnx(folder: Path) -> Runner:
    """Opens it in onnxruntime on the CPU, with as many threads as PyTorch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def write_torch_export(model: ViTClassifier, contract: Contract, folder: Path) -> None:
    """Writes ``model.pt2``; the contract is its extra file ``contract.json``."""
    with _quiet():
        torch.export.save(
            trace(model, contract), folder / "model.pt2", extra_files={"contract.json": json.dumps(contract)}
        )


def load_torch_export(folder: Path) -> Runner:
    """Opens it with ``torch.export.load``."""
    program = torch.export.load(folder / "model.pt2").module()

    def run(images: Tensor) -> Tensor:
        probabilities: Tensor = program(images)
        return probabilities

    return run


def write_timm(model: ViTClassifier, contract: Contract, folder: Path) -> None:
    """Writes the bare network as ``model.safetensors`` and ``config.json``, as timm's own models lie on the hub."""
    from timm.models import save_for_hf

    net: Any = model.net
    preprocessing = contract["preprocessing"]
    net.pretrained_cfg = {
        **net.pretrained_cfg,
        "input_size": (3, *preprocessing["size"]),
        # Square pictures are resized whole, others as in training: shorter side resized, centre cut.
        "crop_pct": 1.0,
        "crop_mode": "center",
        "custom_load": False,  # some architectures read .npz files from the hub
        **{key: preprocessing[key] for key in ("mean", "std", "interpolation")},
    }
    arguments = {"img_size": model.hparams["img_size"]} if model.hparams["img_size"] else {}
    save_for_hf(
        net,
        str(folder),
        model_config={"label_names": contract["class_names"], "temperature": contract["temperature"]},
        model_args=arguments | (model.hparams["timm_kwargs"] or {}),
        safe_serialization=True,
    )


def load_timm(folder: Path) -> Runner:
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
