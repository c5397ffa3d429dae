"""Reports: what the page says against the records, and how it behaves in a real browser (headless Chromium)."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestfed_papers import page as reproduced
from nestfed_papers.results import held
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

from nestfed.core import Metric, NestfedError
from nestfed.experiment.compare import compare
from nestfed.experiment.spec import from_tables
from nestfed.metrics import find
from nestfed.report.html import render, write
from nestfed.report.machine import describe
from nestfed.report.page import Claim, Curve, Curves, Figure, Image, Line, Page, Series, Table
from nestfed.report.scores import TOLERANCE, curves_of
from nestfed.report.summary import (
    MethodResult,
    curves_of_runs,
    final_table,
    page_of_comparison,
    page_of_run,
    reached,
    series_of,
    spread,
    target_table,
)
from nestfed.report.svg import Drawn, label, ticks, view

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"
TABLES = {
    "data": {"name": "digits", "binary": True, "test": 0.25, "validation": 0.25},
    "partition": {"clients": 4},
    "model": {"name": "mlp", "hidden": []},
    "problem": {"name": "auprc", "outer": 4, "inner": 16},
    "run": {"rounds": 12, "q": 2},
    "evaluation": {"metric": "ap"},
    "execution": {"mode": "loop"},
    "methods": {
        "fedavg": {"problem": {"name": "classify", "batch": 20}, "algorithm": {"name": "fedavg", "eta": 0.1}},
        "fcsg-m": {"algorithm": {"name": "fcsg-m", "alpha": 0.3, "beta": 0.5}},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[MethodResult]]:
    """Two methods with two seeds each, really run."""
    place = tmp_path_factory.mktemp("runs") / "comparison"
    experiment = from_tables(TABLES)
    metric, outcomes = compare(experiment, ["fedavg", "fcsg-m"], 2, place, workers=1)
    assert metric == find("ap")
    return place, outcomes


def history(*rows: tuple[int, float | None], scale: int = 1) -> list[dict[str, Any]]:
    """A record in which round r cost 100·r examples, 8·r bytes and r/10 seconds, times scale."""
    costs = [
        {"round": r, "examples": 100 * r * scale, "bytes_up": 5 * r * scale, "bytes_down": 3 * r * scale}
        for r, _ in rows
    ]
    return [{**cost, "seconds": cost["round"] * scale / 10, "ap": value} for cost, (_, value) in zip(costs, rows)]


# ------------------------------------------------------------------------------------------ numbers and text


def test_a_table_shows_means_deviations_and_costs() -> None:
    runs = {
        "a": [history((0, 0.1), (1, 0.7), (2, 0.5)), history((0, 0.1), (1, 0.2), (2, 0.7))],
        "b": [history((0, 0.1), (1, None), (2, 0.8), scale=1000)],
    }
    table = final_table(runs, "ap", {"trials": {"a": 6}})
    assert table.columns == ["method", "ap", "rounds", "examples", "sent", "seconds", "trials"]
    deviation = 0.1 * 2**0.5  # of 0.5 and 0.7
    assert list(table.rows[0]) == ["a", f"0.6000 ± {deviation:.4f}", "2", "200", "16 B", "0.20", 6]
    assert list(table.rows[1]) == ["b", "0.8000", "2", "200,000", "16 kB", "200", None]
    assert list(table.best) == [1]


def test_the_cost_of_a_target_is_reported_per_seed() -> None:
    seeds = [history((0, 0.1), (2, 0.6), (4, 0.5)), history((0, 0.1), (2, 0.5), (4, 0.6)), history((0, 0.1), (4, 0.4))]
    table = target_table({"a": seeds, "b": [history((0, 0.2))]}, "ap", 0.55)
    assert list(table.rows[0]) == ["a", "3 ± 1.4", "300 ± 141", "24 B ± 11.3 B", "0.30 ± 0.14", "2 of 3"]
    assert list(table.rows[1]) == ["b", None, None, None, None, "0 of 1"]
    falling = [{"round": 0, "loss": 2.0}, {"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.4}]
    assert reached(falling, "loss", 0.5) == falling[1]
    assert spread([3.0, 3.0]) == "3.0000"


@pytest.mark.parametrize(("metric", "best"), [("rmse", 0), ("log_likelihood", 1), (Metric("own", higher=False), 0)])
def test_a_table_marks_the_best_by_the_metrics_direction(metric: str | Metric, best: int) -> None:
    """rmse was once taken for a metric to be maximised, because its name ends in none of the known ways."""
    name = metric if isinstance(metric, str) else metric.name
    runs = {
        method: [[{**r, name: r["ap"]} for r in history((0, 0.5), (1, 0.5 + step), (2, 0.5 + 2 * step))]]
        for method, step in (("a", -0.1), ("b", 0.1))
    }
    assert list(final_table(runs, metric).best) == [best]
    hits = [row[-1] for row in target_table(runs, metric, 0.5).rows]
    assert hits == [f"{int(i == best)} of 1" for i in (0, 1)]


def test_a_metric_without_direction_is_refused(runs: tuple[Path, list[MethodResult]]) -> None:
    place, outcomes = runs
    with pytest.raises(NestfedError, match="declare whether higher is better"):
        page_of_comparison(place, "my_score", outcomes)


def test_a_curve_is_the_mean_over_seeds_at_the_rounds_that_all_have() -> None:
    seeds = [history((0, 0.1), (2, 0.3), (4, 0.9)), history((0, 0.2), (2, 0.7), (3, 0.4), scale=3)]
    series = series_of("a", seeds, "ap")
    assert series is not None
    assert series.at["round"] == [0, 2]
    assert series.at["bytes"] == [0, (16 + 48) / 2]
    assert series.mean == pytest.approx(np.mean([[0.1, 0.3], [0.2, 0.7]], axis=0))
    assert series.sd == pytest.approx(np.std([[0.1, 0.3], [0.2, 0.7]], axis=0, ddof=1))
    assert series_of("a", seeds, "auroc") is None


@pytest.mark.parametrize("seed", range(3))
def test_kept_curves_are_those_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.random(1500) < 0.1
    scores = np.round(rng.normal(size=1500) * 300 + 400 * labels, seed)  # large, some tied
    kept = curves_of(scores, labels)
    assert kept is not None
    assert kept["auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert kept["ap"] == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    x, y, _ = roc_curve(labels, scores, drop_intermediate=False)
    precision, recall, _ = precision_recall_curve(labels, scores)
    for name, whole in (("roc", np.c_[x, y]), ("pr", np.c_[recall, precision][:-1])):
        points = np.c_[kept[name]["x"], kept[name]["y"]]
        assert len(points) < 600
        assert all(np.abs(whole - p).sum(axis=1).min() < 1e-12 for p in points)  # kept points are points of the curve
        assert max(distance(p, points) for p in whole) <= TOLERANCE * 1.001  # and no other is far from them
    assert curves_of([0.1, 0.2], [1, 1]) is None
    assert curves_of([0.1, float("nan")], [1, 0]) is None


def distance(point: np.ndarray, line: np.ndarray) -> float:
    a, b = line[:-1], line[1:]
    along = np.clip(((point - a) * (b - a)).sum(1) / np.maximum(((b - a) ** 2).sum(1), 1e-300), 0, 1)
    return float(np.sqrt(((a + along[:, None] * (b - a) - point) ** 2).sum(1)).min())


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e6))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    high = low + span
    found = ticks(low, high)
    assert 3 <= len(found) <= 12
    assert low - 1e-6 * span <= found[0]
    assert found[-1] <= high + 1e-6 * span
    assert len({label(v, found[1] - found[0]) for v in found}) == len(found) or span < 1e-6 * abs(low)


def test_a_chart_shows_the_part_that_matters() -> None:
    jump = Drawn(0, range(40), [0.1] + [0.9 + i / 1000 for i in range(39)])
    found = view([jump])
    assert found.whole[0] < 0.1 < 0.89 < found.shown[0] < 0.91
    level = Drawn(0, range(40), [i / 40 for i in range(40)])
    assert view([level]).whole == view([level]).shown
    assert view([Drawn(0, range(3), [1e-4, 1.0, 50.0])]).log
    assert view([]).shown == (0.0, 1.0)


def test_mistakes_are_reported() -> None:
    with pytest.raises(NestfedError, match="must not decrease"):
        Line("a", [0, 1, 0.5], [0, 0, 0])
    with pytest.raises(NestfedError, match="a row has 1 cells, but there are 2 columns"):
        Table("t", ["a", "b"], [["x"]])
    with pytest.raises(NestfedError, match="verdict must be confirmed, "):
        Claim("so", "maybe", "")  # type: ignore[arg-type]
    with pytest.raises(NestfedError, match="must have the same length"):
        Series("a", {"round": [0, 1]}, [1.0])


def test_text_cannot_become_markup() -> None:
    series = Series(HOSTILE, {"round": [0, 1]}, [float("nan"), 1.0])
    text = render(
        Page(
            HOSTILE, HOSTILE, [Claim(HOSTILE, "confirmed", HOSTILE)], [Table(HOSTILE, [HOSTILE], [[HOSTILE]], HOSTILE)],
            [Curves(HOSTILE, [Curve(HOSTILE, [series])], HOSTILE)],
            [Figure(HOSTILE, HOSTILE, HOSTILE, [Line(HOSTILE, [0], [0])], HOSTILE)],
            [Image(HOSTILE, b"", HOSTILE, HOSTILE)], {HOSTILE: HOSTILE}, {HOSTILE: {HOSTILE: HOSTILE}},
        )
    )  # fmt: skip
    assert "<img src=x" not in text
    assert text.count("</script>") == 2
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])  # type: ignore[index]
    assert data[0]["series"][0]["name"] == HOSTILE
    assert data[0]["series"][0]["mean"] == [None, 1.0]
    assert not re.findall(r'(?:src|href)="(?!data:)', text)


def test_what_is_not_there_leaves_no_trace() -> None:
    alone = Series("a", {"round": [0, 1], "bytes": [0, 0]}, [0.1, 0.2])
    text = render(Page("t", curves=[curves_of_runs({}, ["ap"]), Curves("c", [Curve("ap", [alone])])]))
    assert re.findall("<h2>(.*?)</h2>", text) == ["c"]
    assert 'class="controls"' not in text  # one axis, one seed, nothing trimmed: nothing to choose


def test_a_single_evaluation_is_a_dot_and_a_wide_picture_is_wide() -> None:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (200, 50)).save(buffer, "PNG")
    once = Curves("c", [Curve("ap", [Series("a", {"round": [3]}, [0.2])])])
    text = render(Page("t", curves=[once], images=[Image("i", buffer.getvalue(), "a")]))
    assert '<circle class="f0"' in text
    assert '<img class="panorama" src="data:image/png;base64,' in text


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    at = {"round": [float(i) for i in range(5000)]}
    text = render(Page("t", curves=[Curves("c", [Curve("m", [Series("a", at, at["round"])])])]))
    kept = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])[0]["series"][0]  # type: ignore[index]
    assert len(kept["mean"]) <= 401
    assert kept["mean"][0] == 0
    assert kept["mean"][-1] == kept["at"]["round"][-1] == 4999


# ----------------------------------------------------------------------------------------- directories of runs


def test_the_page_of_a_run_shows_its_record(runs: tuple[Path, list[MethodResult]]) -> None:
    place, outcomes = runs[0] / "fcsg-m" / "seed-0", runs[1]
    page = page_of_run(place)
    end = outcomes[1].histories[0][-1]
    assert page.title == "fcsg-m on digits"
    assert ["ap", f"{end['ap']:.4f}", f"{end['val_ap']:.4f}"] in [list(row) for row in page.tables[0].rows]
    assert f"{end['examples']:,} examples" in page.summary
    assert "unfinished" not in page.summary
    assert page.facts["Method"] == "fcsg-m, alpha = 0.3, beta = 0.5"
    assert page.settings["run"]["q"] == 2
    ap = page.curves[0].curves[0]
    assert (ap.metric, [s.name for s in ap.series]) == ("ap", ["test", "validation"])
    with pytest.raises(NestfedError, match=r"experiment\.json is missing"):
        page_of_run(runs[0])


def test_the_page_of_a_comparison_agrees_with_its_outcomes(runs: tuple[Path, list[MethodResult]]) -> None:
    place, outcomes = runs
    page = page_of_comparison(place, "ap", outcomes)
    assert [row[0] for row in page.tables[0].rows] == ["fedavg", "fcsg-m"]
    values = outcomes[1].final("ap")
    assert page.tables[0].rows[1][1] == f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
    assert page.facts["Seeds"] == "0, 1"
    assert page.settings["problem of fedavg"]["name"] == "classify"
    assert "name" not in page.settings["problem"]
    assert page.curves[0].curves[0].metric == "ap"
    with pytest.raises(NestfedError, match="no runs of other"):
        page_of_comparison(place, "ap", [MethodResult("other", {}, 0, [])])


def test_files_beside_the_record_are_shown(runs: tuple[Path, list[MethodResult]]) -> None:
    place = runs[0] / "fcsg-m" / "seed-1"
    rng = np.random.default_rng(0)
    (place / "roc.json").write_text(json.dumps(curves_of(rng.normal(size=50), np.arange(50) % 2)))
    (place / "machine.json").write_text(json.dumps(describe()))
    page = page_of_run(place)
    assert [f.title for f in page.figures] == ["ROC curve", "Precision-recall curve"]
    assert "nestfed" in page.facts["Versions"]
    assert "core" in page.facts["Machine"]


# ------------------------------------------------------------------------------------------------ in a browser


class Browser:
    """One tab of headless Chromium, spoken to by its DevTools protocol."""

    def __init__(self, program: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="nestfed-chromium-")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        command = [program, *options, f"--user-data-dir={self.folder}", "about:blank"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        port, deadline = Path(self.folder) / "DevToolsActivePort", time.monotonic() + 60
        while not port.exists() or "\n" not in port.read_text():
            assert self.process.poll() is None, "Chromium ended at once."
            assert time.monotonic() < deadline, "Chromium does not answer."
            time.sleep(0.05)
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"))
        from websockets.sync.client import connect

        address = next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page")
        self.connection = connect(address, max_size=None, open_timeout=30)
        self.socket = self.connection.__enter__()
        self.count = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.count)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv(timeout=30))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self.events.append(message)

    def open(self, path: Path, width: int = 1000, height: int = 900, media: str = "", **features: str) -> Self:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        wanted = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", media=media, features=wanted)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self.events.append(json.loads(self.socket.recv(timeout=30)))
        return self

    def run(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, selector: str, across: float = 0.5, down: float = 0.5, *, click: bool = False) -> None:
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"JSON.parse(JSON.stringify(document.querySelector({selector!r}).getBoundingClientRect()))")
        at = {"x": box["x"] + across * box["width"], "y": box["y"] + down * box["height"]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, text=" " if name == "Space" else "")
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")

    def picture(self, *, whole: bool = False) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and every request beside the file itself."""
        self.run("1")
        found = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif method == "Network.requestWillBeSent" and params["request"]["url"].split(":")[0] not in (
                "file",
                "data",
            ):
                found.append(f"request of {params['request']['url']}")
        return found

    def close(self) -> None:
        self.connection.__exit__(None, None, None)
        self.process.terminate()
        self.process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        pytest.skip("Chromium is not here: apt-get install chromium, or install Chrome.")
    pytest.importorskip("websockets", reason="The browser is spoken to by websockets: pip install websockets")
    found = Browser(program)
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(runs: tuple[Path, list[MethodResult]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything in it."""
    place, outcomes = runs
    rng = np.random.default_rng(0)
    for method in ("fedavg", "fcsg-m"):
        kept = curves_of(rng.normal(size=300) + np.arange(300) % 2, np.arange(300) % 2)
        (place / method / "seed-0" / "roc.json").write_text(json.dumps(kept))
    made = page_of_comparison(place, "ap", outcomes, title=f"A comparison {HOSTILE}")
    x = np.linspace(-5, 5, 50)
    sine = Figure("Fitted curve", "x", "y", [Line("truth", x, np.sin(x), "dashed"), Line("fit", x, 0.9 * np.sin(x)), Line("points", x[::10], np.sin(x[::10]), "points")])  # fmt: skip
    wide = Table("Wide", [f"a long column {i}" for i in range(12)], [["method", *range(11)]])
    claims = [Claim("It is so.", "confirmed", "0.9 against 0.8"), Claim("And so.", "not testable here", "No data.")]
    everything = Page(
        made.title, made.summary, claims, [*made.tables, wide], made.curves, [*made.figures, sine], made.images,
        made.facts, made.settings,
    )  # fmt: skip
    return write(everything, tmp_path_factory.mktemp("page") / "report.html")


PLOT = "document.querySelector('.board').plots()[0]"
TIP = "(e => e.hidden ? '' : e.innerText)(document.querySelector('#curves-0-0 .tip'))"
AREA = "#curves-0-0 .u-over"


def test_it_renders_without_a_complaint(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.complaints() == []
    drawn = browser.run(
        "[...document.querySelectorAll('canvas')].map(c => new Set(c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data).size)"
    )
    assert len(drawn) == browser.run("document.querySelectorAll('.chart').length") >= 7
    assert min(drawn) > 10  # a canvas with nothing on it has one value
    assert "<img src=x" in browser.run("document.title")
    assert browser.run("[...document.querySelectorAll('.static')].every(e => e.offsetHeight === 0)")
    assert browser.run(f"{PLOT}.axes[0]._splits.every(Number.isInteger)")  # there is no half round


RECORDS = Path(__file__).parents[2] / "papers" / "records"


@pytest.mark.parametrize("name", held(RECORDS))
@pytest.mark.long
def test_a_reproductions_report_opens(browser: Browser, name: str, tmp_path: Path) -> None:
    """Made anew from the records that papers/results.md is made from."""
    evidence = held(RECORDS)[name]
    for figure in evidence.numbers.get("figures", ()):
        shutil.copyfile(RECORDS.parent / "figures" / f"{name}-{figure}", tmp_path / figure)
    browser.open(reproduced.report(evidence, tmp_path))
    assert browser.complaints() == []
    text = browser.run("document.body.innerText")
    for claim, verdict in reproduced.verdicts(evidence):
        assert claim in text
        assert verdict.figures in text
    for data in evidence.data():
        for row in reproduced.rows(evidence, data):
            assert f"{row['mean']:.4f}" in text


def test_hovering_shows_the_values_of_the_record(
    browser: Browser, page: Path, runs: tuple[Path, list[MethodResult]]
) -> None:
    browser.open(page)
    assert browser.run(TIP) == ""
    rounds = len(browser.run(f"{PLOT}.data[0]")) - 1
    browser.mouse(AREA, 8 / rounds, 0.5)
    tip = browser.run(TIP)
    assert "round 8" in tip
    for outcome in runs[1]:
        values = [next(r["ap"] for r in h if r["round"] == 8) for h in outcome.histories]
        assert outcome.method in tip
        assert f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}" in tip
    browser.mouse("h1")
    assert browser.run(TIP) == ""


def test_the_legend_hides_and_shows(browser: Browser, page: Path) -> None:
    browser.open(page)
    shown = f"{PLOT}.series.slice(1).map(s => s.show)"
    assert browser.run(shown) == [True] * 6
    before = browser.picture()
    browser.mouse('#curves-0 [data-slot="0"]', click=True)
    assert browser.run(shown) == [False] * 3 + [True] * 3
    assert browser.run("document.querySelector('#curves-0 [data-slot=\"0\"]').ariaPressed") == "false"
    browser.mouse(AREA)
    assert "fcsg-m" in browser.run(TIP)
    assert "fedavg" not in browser.run(TIP)
    assert browser.picture() != before
    browser.mouse('#curves-0 [data-slot="0"]', click=True)
    assert browser.run(shown) == [True] * 6


def test_the_axis_is_switched(browser: Browser, page: Path, runs: tuple[Path, list[MethodResult]]) -> None:
    browser.open(page)
    ends = [h[-1] for o in runs[1] for h in o.histories]
    totals = {"round": 12, "examples": max(e["examples"] for e in ends)}
    totals |= {"bytes": max(e["bytes_up"] + e["bytes_down"] for e in ends)}
    for axis, total in totals.items():
        browser.mouse(f'#curves-0 [value="{axis}"]', click=True)
        assert browser.run(f"{PLOT}.data[0].at(-1)") == pytest.approx(total, rel=1e-5)
    browser.mouse(AREA, 0.99)
    assert "B sent" in browser.run(TIP)
    browser.mouse('#curves-0 [value="seeds"]', click=True)
    assert browser.run(f"{PLOT}.series.length") == 1 + 2 * (3 + 2)
    assert browser.complaints() == []


def test_the_keyboard_is_enough(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('#curves-0 input:checked').focus()")
    browser.key("ArrowRight")
    assert browser.run("document.querySelector('#curves-0 input:checked').value") == "examples"
    browser.run("document.querySelector('#curves-0-0 .plot').focus()")
    browser.key("ArrowRight")
    assert "0 examples" in browser.run(TIP)
    browser.key("End")
    assert browser.run(TIP)
    browser.key("Escape")
    assert browser.run(TIP) == ""
    unreachable = "[...document.querySelectorAll('button, input, .plot, .scroll, summary')].filter(e => e.tabIndex < 0)"
    assert browser.run(f"{unreachable}.length") == 0


@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_scrolls_one_way_only(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width, 800)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)")
    browser.mouse(AREA, 0.95)
    assert browser.run("document.documentElement.scrollWidth") <= width
    box = browser.run("JSON.parse(JSON.stringify(document.querySelector('.tip').getBoundingClientRect()))")
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_dark_is_dark_and_follows_the_system(browser: Browser, page: Path) -> None:
    browser.open(page, prefers_color_scheme="light")
    ground, line = "getComputedStyle(document.body).backgroundColor", f"{PLOT}.series[1].stroke()"
    light, bright = browser.run(ground), browser.run(line)
    dark_wanted = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", features=dark_wanted)
    assert light == "rgb(255, 255, 255)"
    until = time.monotonic() + 10  # a busy machine redraws late
    while browser.run(line) == bright and time.monotonic() < until:
        time.sleep(0.02)
    assert browser.run(line) != bright
    assert max(map(int, re.findall(r"\d+", browser.run(ground)))) < 50
    assert browser.complaints() == []


def test_paper_is_light_and_has_no_controls(browser: Browser, page: Path) -> None:
    browser.open(page, media="print", prefers_color_scheme="dark")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("[...document.querySelectorAll('.controls, .plot')].every(e => e.offsetHeight === 0)")
    assert browser.run(
        "[...document.querySelectorAll('.static svg')].every(e => e.getBoundingClientRect().height > 50)"
    )
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("document.querySelector('details').open")
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert not browser.run("document.querySelector('details').open")


def test_without_javascript_there_are_tables_and_pictures(browser: Browser, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        assert browser.run("document.querySelectorAll('canvas').length") == 0
        assert browser.run(
            "[...document.querySelectorAll('.static svg, table')].every(e => e.getBoundingClientRect().height > 40)"
        )
        assert browser.run("[...document.querySelectorAll('.controls')].every(e => e.offsetHeight === 0)")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
