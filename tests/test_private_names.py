"""Private names of libraries that this project uses: each has a reason, and fails here when a release renames it."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import jsonargparse
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "vit_finetune"


def private_uses(path: Path) -> list[tuple[int, str]]:
    """Line and name of every private attribute that the file itself does not define."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and _is_self(n)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = [(n.lineno, n.attr) for n in nodes if isinstance(n, ast.Attribute) and re.match(r"_[a-z]", n.attr)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("vit_finetune"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [(node.lineno, name) for name in names if re.match(r"_[A-Za-z]", name) and name != "__future__"]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and str(name.value).startswith("_"):
                found.append((node.lineno, str(name.value)))
    return [(line, name) for line, name in found if name not in own and name not in {"_asdict", "__future__"}]


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


USES = [(path, line, name) for path in sorted(PACKAGE.rglob("*.py")) for line, name in private_uses(path)]


def test_there_are_few() -> None:
    assert len(USES) <= 16, [(path.name, line, name) for path, line, name in USES]


@pytest.mark.parametrize(("path", "line", "name"), USES, ids=lambda value: getattr(value, "stem", str(value)))
def test_each_has_its_reason(path: Path, line: int, name: str) -> None:
    """A comment on the line, or on one of the three lines before it."""
    lines = path.read_text().splitlines()[max(0, line - 4) : line]
    assert any("#" in text for text in lines), f"{path.name}:{line} uses {name} without a comment"


def _ddp_options() -> bool:
    from lightning.pytorch.strategies import DDPStrategy

    return isinstance(DDPStrategy()._ddp_kwargs, dict)


def _tensor_parallel_size() -> bool:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(tensor_parallel_size=2)._tensor_parallel_size == 2


def _fused_optimizer_flag() -> bool:
    parameter = torch.nn.Parameter(torch.zeros(1))
    return torch.optim.AdamW([parameter], fused=True)._step_supports_amp_scaling is True


def _option_types() -> bool:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--x", type=int | None)
    (action,) = [action for action in parser._actions if action.dest == "x"]
    return action._typehint == int | None  # type: ignore[attr-defined]


def _subcommand_parsers() -> bool:
    return "self._subcommand_parsers" in inspect.getsource(LightningCLI)


def _hugging_face() -> bool:
    transformers = pytest.importorskip("transformers")
    return callable(transformers.Trainer._prepare_inputs)


# Each private name with a check that it still exists and means what this project takes it for.
EXISTS: dict[str, Callable[[], bool]] = {
    "_accelerator_connector": lambda: hasattr(Trainer()._accelerator_connector, "cluster_environment"),
    "_actions": _option_types,
    "_can_stop_early": lambda: Trainer().fit_loop._can_stop_early in (True, False),
    "_data_fetcher": lambda: Trainer().fit_loop._data_fetcher is None,
    "_ddp_kwargs": _ddp_options,
    "_prepare_inputs": _hugging_face,
    "_restarting": lambda: Trainer().fit_loop._restarting is False,
    "_should_check_val_fx": lambda: callable(Trainer().fit_loop.epoch_loop._should_check_val_fx),
    "_step_supports_amp_scaling": _fused_optimizer_flag,
    "_subclasses": lambda: importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode is not None,
    "_subcommand_parsers": _subcommand_parsers,
    "_tensor_parallel_size": _tensor_parallel_size,
    "_trainer": lambda: LightningModule()._trainer is None,
    "_typehint": _option_types,
}


def test_every_private_name_has_a_check() -> None:
    assert {name for _, _, name in USES} == set(EXISTS)


@pytest.mark.parametrize("name", sorted(EXISTS))
def test_library_still_has_it(name: str) -> None:
    assert EXISTS[name]()
