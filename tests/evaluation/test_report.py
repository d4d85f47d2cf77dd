"""The test report: metrics against values computed by hand, files, TensorBoard, unusual names."""

import base64
import io
import json
import math
import shlex
import shutil
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.conftest import CPU, make_tree, only, read_events
from vit_finetune import main
from vit_finetune.evaluation.report import Report
from vit_finetune.evaluation.report_writer import markdown, save, terminal
from vit_finetune.evaluation.runs import read_scalars

NAMES = ["ant", "b|ee", "cat_*", "gone"]
# Six images: three ants (one predicted as bee), two bees (one predicted as ant), a cat predicted as bee.
LABELS = torch.tensor([0, 0, 0, 1, 1, 2])
PREDICTED = torch.tensor([0, 0, 1, 1, 0, 1])
CONFIDENCE = torch.tensor([2.0, 2.0, 3.0, 2.0, 1.0, 4.0])


def small_report(temperature: float = 2.0) -> Report:
    logits = CONFIDENCE[:, None] * F.one_hot(PREDICTED, 4)
    paths = [f"photos/{i}.png" for i in range(5)] + ["photos/\udcff|.png"]
    return Report.from_logits(logits, LABELS, NAMES, temperature, paths, {"data": "photos"})


def test_metrics_by_hand() -> None:
    report = small_report()
    assert report.images == 6 and report.top1.value == 0.5 and report.top5 is None
    # Wilson (1927) for 3 of 6, z = 1.96: (0.5 + z^2/12 -+ z sqrt(0.25/6 + z^2/144)) / (1 + z^2/6)
    assert (report.top1.low, report.top1.high) == pytest.approx((0.18761, 0.81239), abs=1e-5)
    assert report.confusion.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    rows = [(c.precision, c.recall, c.f1, c.support) for c in report.classes]
    assert rows[0] == pytest.approx((2 / 3, 2 / 3, 2 / 3, 3)) and rows[1] == pytest.approx((1 / 3, 1 / 2, 2 / 5, 2))
    assert rows[2] == (None, 0, 0, 1) and rows[3] == (None, None, None, 0)
    assert report.macro.precision == pytest.approx(1 / 2) and report.macro.recall == pytest.approx(7 / 18)
    assert report.acc_macro == report.macro.recall
    assert report.macro.f1 == pytest.approx((2 / 3 + 2 / 5) / 3)

    def probability(logit: float) -> float:
        return math.exp(logit) / (math.exp(logit) + 3)

    right = CONFIDENCE[LABELS == PREDICTED]
    losses = [-math.log(probability(float(s))) for s in right] + [
        math.log(math.exp(float(s)) + 3) for s in CONFIDENCE[LABELS != PREDICTED]
    ]
    assert report.uncalibrated.loss == pytest.approx(sum(losses) / 6)
    assert [(m.index, m.true, m.predicted) for m in report.mistakes] == [
        (5, "cat_*", "b|ee"),
        (2, "ant", "b|ee"),
        (4, "b|ee", "ant"),
    ]
    assert [m.probability for m in report.mistakes] == pytest.approx([probability(s / 2) for s in (4, 3, 1)])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_calibration_error_is_that_of_its_diagram(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(500, 7, generator=generator), torch.randint(0, 7, (500,), generator=generator)
    report = Report.from_logits(logits.bfloat16(), labels, list("abcdefg"), temperature)
    for calibration, divisor in ((report.uncalibrated, 1), (report.calibrated, temperature)):
        confidence, predicted = (logits.bfloat16().float() / divisor).softmax(-1).max(-1)
        expected = 0.0
        for k in range(15):
            inside = (confidence >= k / 15) & (confidence < (k + 1) / 15)
            if inside.any():
                gap = confidence[inside].mean() - (predicted == labels)[inside].float().mean()
                expected += float(gap.abs() * inside.sum() / 500)
        assert calibration.ece == pytest.approx(expected, abs=1e-6)
        filled = calibration.bins.images > 0
        gaps = (calibration.bins.confidence - calibration.bins.accuracy).abs() * calibration.bins.images / 500
        assert float(gaps[filled].sum()) == pytest.approx(expected, abs=1e-6)
    assert report.top5 is not None
    hits = (logits.bfloat16().topk(5).indices == labels[:, None]).any(1)
    assert report.top5.value == pytest.approx(float(hits.float().mean()))


def test_text_has_no_nan_and_escapes_names() -> None:
    report = small_report()
    text = markdown(report, ["confusion", "reliability", "mistakes"])
    assert r"| b\|ee | 0.3333 | 0.5000 | 0.4000 | 2 |" in text
    assert "| test/acc_macro | 0.3889 | mean recall of the 3 classes that have images |" in text
    assert "test/acc_macro 0.3889" in terminal(report)
    assert r"| cat\_\* | - | 0.0000 | 0.0000 | 1 |" in text and "| gone | - | - | - | 0 |" in text
    assert r"| photos/\\xff\|.png | cat\_\* | b\|ee | 71.1 % |" in text
    assert r"| ant | b\|ee | 1 |" in text and "- data: photos" in text
    assert "nan" not in (text + terminal(report)).lower()
    assert "no temperature was fitted" in terminal(small_report(temperature=1.0))
    json.loads(json.dumps(report.to_dict(), allow_nan=False))


def test_terminal_shows_the_classes_with_the_lowest_f1() -> None:
    labels = torch.arange(100)
    logits = F.one_hot(labels, 100).float()
    logits[7] = logits[8]
    lines = terminal(Report.from_logits(logits, labels, [f"class {i}" for i in range(100)])).splitlines()
    assert lines[0].startswith("test/acc ") and "0.9900" in lines[0] and "100 images" in lines[0]
    assert lines[-1] == "the 20 of 100 classes with the lowest F1" and len(lines) < 30
    assert [line.split()[1] for line in lines[7:9]] == ["7", "8"]


class Page(HTMLParser):
    """Elements of a page; every one that is opened has to be closed."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_page_shows_everything_and_loads_nothing(tmp_path: Path) -> None:
    """Images are in the page, small ones without loss and large ones reduced; cells can be sorted by exact values."""
    report = small_report()
    images = [torch.full((3, 8, 12), 200), torch.zeros(3, 600, 300), torch.zeros(3, 64, 64)]
    save(report, tmp_path, [image.byte() for image in images])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    sources = [str(image["src"]) for image in page.all("img")]
    assert [source.partition(";")[0] for source in sources] == [
        *["data:image/svg+xml"] * 2,
        *("data:image/png", "data:image/jpeg", "data:image/png"),
    ]
    decoded = [Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) for source in sources[2:]]
    assert [image.size for image in decoded] == [(12, 8), (128, 256), (64, 64)]
    assert decoded[0].getpixel((3, 3)) == (200, 200, 200)
    assert all(image["alt"] for image in page.all("img"))
    assert "http" not in text and page.all("link") == [] and all(not script for script in page.all("script"))
    values = [str(cell["data-value"]) for cell in page.all("td") if "data-value" in cell]
    rows = [
        (c.name, *("" if v is None else str(v) for v in (c.precision, c.recall, c.f1)), c.support)
        for c in report.classes
    ]
    assert values[: 5 * len(rows)] == [str(value) for row in rows for value in row]
    assert "photos/\\xff|.png" in text and "95 % interval 0.1876 to 0.8124" in text


def test_names_cannot_inject_markup(tmp_path: Path) -> None:
    name = "<script>alert('1')</script>\"\n&"
    report = Report.from_logits(torch.eye(2).flip(0), torch.arange(2), [name, "b"], 1.0, [name] * 2, {name: name})
    save(report, tmp_path, [torch.zeros(3, 4, 4).byte()] * 2)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(page.all("script")) == 1
    shown = "<script>alert('1')</script>\"\\n&"
    assert next(cell["data-value"] for cell in page.all("td") if "data-value" in cell) == shown
    assert page.all("img")[2]["alt"] in (f"{shown} predicted as b", f"b predicted as {shown}")


def test_no_images_and_no_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one image"):
        Report.from_logits(torch.zeros(0, 2), torch.zeros(0).long(), ["a", "b"])
    report = Report.from_logits(torch.eye(2), torch.arange(2), ["a", "b"])
    save(report, tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "confusion.png",
        "reliability.png",
        "report.html",
        "report.json",
        "report.md",
    ]
    assert (tmp_path / "new" / "report.md").read_text().endswith("## Worst mistakes\n\nNone.\n")


def test_command_saves_a_report_and_keeps_older_ones(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of nine test images those in folder b are green and red; class c is missing."""
    main(["fit", *folder_args, "--trainer.max_epochs=8", "--model.lr=0.01"])
    tree = make_tree(tmp_path / "later", {"test": 3})
    shutil.rmtree(tree / "test" / "c")
    (tree / "test" / "a" / "00.png").rename(tree / "test" / "b" / "odd | 猫\udcff.png")
    run = only(tmp_path / "runs", "config.yaml").parent
    command = ["test", "--ckpt_path=best", f"--data.root={tree}", *CPU]
    capsys.readouterr()
    main(command)
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "test/acc" in line)
    assert "0.8333" in row and "6 images" in row and "runs/imagefolder/version_0/test-report" in out
    folder = run / "test-report"
    files = ["confusion.png", "mistakes.png", "reliability.png", "report.html", "report.json", "report.md"]
    assert sorted(path.name for path in folder.iterdir()) == files
    report = json.loads((folder / "report.json").read_text())
    assert report["about"]["command"] == shlex.join(["python", "-m", "vit_finetune", *command])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert escape(report["about"]["command"]) in page and page.count("<figure>") == len(report["mistakes"]) == 1
    assert report["confusion"] == [[2, 0, 0], [1, 3, 0], [0, 0, 0]]
    assert report["mistakes"][0]["path"] == str(tree / "test" / "b" / "odd | 猫\udcff.png")
    assert report["classes"][2] == {"name": "c", "precision": None, "recall": None, "f1": None, "support": 0}
    stored = torch.load(only(run, "best-*.ckpt"), weights_only=True)["vit_finetune"]["temperature"]
    assert report["temperature"] == stored and report["about"]["checkpoint"].endswith(only(run, "best-*.ckpt").name)

    newest = max(run.glob("events*"), key=lambda path: path.stat().st_mtime_ns)
    events = read_events(newest)
    assert set(events.Tags()["images"]) == {"test/confusion", "test/mistakes", "test/reliability"}
    logged = {tag: points[0].value for tag, points in read_scalars(newest).items()}
    assert logged["test/ece"] == pytest.approx(report["uncalibrated"]["ece"]) and "test/f1" in logged
    assert logged["test/acc_macro"] == pytest.approx(7 / 8) == report["acc_macro"] == logged["test/recall"]
    assert logged["test/loss"] == pytest.approx(report["uncalibrated"]["loss"])
    assert logged["test/acc"] == pytest.approx(5 / 6) == report["top1"]["value"]

    before = (folder / "report.json").read_bytes()
    main([*command, "--trainer.precision=bf16-mixed"])
    assert (folder / "report.json").read_bytes() == before
    assert sorted(path.name for path in (run / "test-report-1").iterdir()) == files
    assert json.loads((run / "test-report-1" / "report.json").read_text())["about"]["precision"] == "bf16-mixed"
