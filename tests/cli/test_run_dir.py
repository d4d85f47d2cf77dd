"""Options that select a checkpoint are read before the parser runs; both must agree."""

from pathlib import Path

import pytest

from vit_finetune.cli.ckpt_path import experiment_name, peek
from vit_finetune.cli.main import parse
from vit_finetune.evaluation.find_checkpoint import RUNS

FILES = {
    "one.yaml": "experiment: first\ntrainer: {default_root_dir: elsewhere}\n",
    "two.yaml": "model: {lr: 0.1}\nexperiment: second\n",
    "three.yaml": "trainer: {default_root_dir: third, max_epochs: 2}\n",
    "null.yaml": "experiment: null\n",
    "list.yaml": "trainer: {callbacks: []}\n",
}


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--config=one.yaml"],
        ["-c", "two.yaml", "--config", "one.yaml"],
        ["--config=one.yaml", "--config=two.yaml", "--config=three.yaml"],
        ["--config=three.yaml", "--config=one.yaml", "--experiment=typed"],
        ["--config=one.yaml", "--trainer.default_root_dir=typed", "--config=three.yaml"],
        ["--config=one.yaml", "--config=null.yaml"],
        ["--experiment=typed", "--config=two.yaml"],
        ["--config=list.yaml", "--experiment", "typed", "--trainer.default_root_dir", "typed"],
        ["--experiment=a", "--experiment=b", "--model.lr", "0.2"],
    ],
)
def test_peek_agrees_with_the_parser(args: list[str], tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    args = [*args, "--ckpt_path=restart"] if "--experiment=a" not in args else args  # restart: of nothing, here
    found, parsed = peek(["fit", *args]), parse(["fit", *args])
    assert found.ckpt_path == ("restart" if "--ckpt_path=restart" in args else parsed["ckpt_path"])
    assert found.experiment == parsed["experiment"]
    typed_roots = any("default_root_dir" in arg or arg.endswith(("one.yaml", "three.yaml")) for arg in args)
    assert found.default_root_dir == parsed["trainer"]["default_root_dir"]
    assert typed_roots or found.default_root_dir == RUNS
    files = [value for value in " ".join(args).replace("=", " ").split() if value.endswith(".yaml")]
    assert experiment_name(found) == (parsed["experiment"] or (Path(files[0]).stem if files else None))
