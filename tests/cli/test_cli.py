"""The command line as a stranger meets it: what it prints, leaves behind, refuses and survives."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestfed.cli.main import main
from nestfed.data.clients import Pairs
from nestfed.engine.record import read as read_record
from nestfed.report.summary import last
from tests.support import ended, forked

SMALL = ("run", "average-precision", "algorithm.name=fcsg-m", "algorithm.alpha=0.3", "partition.clients=4", "run.q=3")


class Here:
    """The command line called in this process, which saves starting one."""

    def __init__(self, cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys, self.cwd = monkeypatch, capsys, cwd
        monkeypatch.chdir(cwd)

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["nestfed", *words])
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = self.capsys.readouterr()
        assert isinstance(code, int)
        return code, out, err

    def refused(self, words: tuple[str, ...], *expected: str) -> None:
        code, _, err = self(*words)
        assert code == 2, err
        assert err.startswith("nestfed: ")
        assert err.count("\n") == 1, "one sentence"
        for word in expected:
            assert word in err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(tmp_path, monkeypatch, capsys)


def test_help_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    """Measured in processor time, and against what the libraries that print it take: machines and their loads differ."""

    def seconds(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare = min(seconds("-c", "import typer, typer.rich_utils, rich.console, rich.table") for _ in range(2))
    assert min(seconds("-m", "nestfed", "--help") for _ in range(2)) < 3 * bare
    heavy = "import atexit, sys; atexit.register(lambda: print({'torch', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)))"
    program = f"{heavy}; sys.argv[1:] = ['--help']; from nestfed.cli.main import main; main()"
    text = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True).stdout
    assert "compare" in text
    assert "reproduce" in text, "the commands of plugins are loaded too"
    assert text.endswith("set()\n")


def test_a_run_leaves_its_directory_and_is_not_run_twice(here: Here) -> None:
    words = (*SMALL, "run.rounds=3", "--out", "here")
    code, said, err = here(*words)
    assert code == 0, err
    out = here.cwd / "here"
    settings = json.loads((out / "experiment.json").read_text())
    assert settings["algorithm"] == {"name": "fcsg-m", "alpha": 0.3}
    assert settings["problem"]["margin"] == 0.5, "defaults are resolved"
    records = read_record(out / "record.jsonl")
    assert [r["round"] for r in records] == [0, 1, 2, 3]
    for key in ("iteration", "loss", "examples", "bytes_up", "bytes_down", "seconds", "participants"):
        assert key in records[-1]
    assert f"{last(records, 'ap'):.4f}" in said
    assert (out / "plot.png").stat().st_size > 5000
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.suffix not in (".png", ".html")}
    assert here(*words)[1] == said
    assert before == {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.suffix not in (".png", ".html")}
    here.refused((*SMALL, "run.rounds=4", "--out", "here"), "another experiment", "--out")
    (here.cwd / "full").mkdir()
    (here.cwd / "full" / "letter.txt").write_text("mine")
    here.refused((*words[:-1], "full"), "not empty")


@pytest.mark.parametrize("sites", ["federated", "alone"])
def test_a_run_of_0_rounds_reports_the_start(sites: str, here: Here) -> None:
    code, said, err = here(*SMALL, "run.rounds=0", f"run.sites={sites}", "--out", "start")
    assert code == 0, err
    (record,) = read_record(here.cwd / "start" / "record.jsonl")
    assert (record["round"], record["examples"]) == (0, 0)
    assert f"ap           {record['ap']:.4f}" in said
    assert f"{record['ap']:.4f}" in (here.cwd / "start" / "report.html").read_text()


def test_ctrl_c_saves_and_the_same_command_resumes(here: Here, tmp_path: Path) -> None:
    words = [*SMALL, "run.rounds=30", "evaluation.every=10", "--out"]

    def slowly() -> None:
        draw = Pairs.draw
        Pairs.draw = lambda *args: time.sleep(0.1) or draw(*args)  # type: ignore[method-assign]
        sys.argv = ["nestfed", *words, "cut"]
        main()

    pid = forked(slowly, tmp_path / "log")
    record = tmp_path / "cut" / "record.jsonl"
    deadline = time.monotonic() + 60
    while (not record.exists() or len(record.read_text().splitlines()) < 5) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGINT)
    code, said = ended(pid), (tmp_path / "log").read_text()
    assert code == 130, said
    assert "Stopped after round" in said
    assert "run it again to resume" in said
    assert 5 <= len(read_record(record)) < 31
    assert here(*words, "cut")[0] == 0
    assert here(*words, "whole")[0] == 0
    resumed, whole = (read_record(tmp_path / name / "record.jsonl") for name in ("cut", "whole"))
    for record_a, record_b in zip(resumed, whole, strict=True):
        record_a.pop("seconds"), record_b.pop("seconds")
        assert record_a == record_b
    same = {(tmp_path / name / "model.safetensors").read_bytes() for name in ("cut", "whole")}
    assert len(same) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("algorithm.name=fcsg-n",), ("fcsg-n", "fcsg-m")),
        (("algorithm.alpha=-1",), ("alpha", "above 0")),
        (("algorithm.beta=1.5",), ("beta", "(0, 1]")),
        (("algorithm.gamma=1",), ("gamma", "alpha, beta")),
        (("algorithm.alpha=fast",), ("alpha", "number")),
        (("algorithm.name=fmgda",), ("fmgda", "Minimax")),
        (("run.q=0",), ("q", "at least 1")),
        (("run.rounds=-3",), ("rounds",)),
        (("run.rounds=many",), ("run.rounds", "whole number")),
        (("execution.mode=fast",), ("mode", "vmap")),
        (("data.name=digit",), ("digit", "digits")),
        (("data.binary=false", "data.remove=''"), ("two classes",)),
        (("model.name=mpl",), ("mpl", "mlp")),
        (("model.hiden=[3]",), ("hiden",)),
        (("partition.clients=100000",), ("100",)),
        (("problem.name=auprcc",), ("auprcc", "auprc")),
        (("problem.margin=-1",), ("margin",)),
        (("nonsense",), ("section.name=value",)),
        (("runn.q=1",), ("runn",)),
        (("exchange.count=99",), ("exchange.count", "at most the number of clients, 4")),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing(
    words: tuple[str, ...], expected: tuple[str, ...], here: Here
) -> None:
    here.refused((*SMALL, "run.rounds=2", *words, "--out", "x"), *expected)
    assert not (here.cwd / "x").exists()


def test_a_divergent_step_names_client_and_iteration(here: Here) -> None:
    settings = ("problem.name=auroc", "algorithm.name=local-sgda", "algorithm.eta_theta=100", "algorithm.eta_w=1")
    words = (
        "run",
        "average-precision",
        *settings,
        "partition.clients=4",
        "execution.checkpoint_every=1",
        "run.q=1",
        "--out",
        "x",
    )
    here.refused(words, "client", "iteration", "NaN", "last good checkpoint is in x")
    records = read_record(here.cwd / "x" / "record.jsonl")
    assert len(records) > 2
    assert list((here.cwd / "x").glob(f"round-{records[-1]['round']:08d}-*.safetensors"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run\nq = 1", ("not valid TOML", "line 1")),
        ("[run]\nq = 1\nrouns = 3", ("line 3", "run.rouns", "rounds")),
        ("[run]\nq = 'two'", ("line 2", "run.q", "whole number")),
        ("[algoritm]\nname = 'fcsg'", ("line 1", "algoritm", "algorithm")),
        ("run = 3", ("[run]", "table")),
    ],
)
def test_a_wrong_file_is_reported_by_line_and_key(text: str, expected: tuple[str, ...], here: Here) -> None:
    (here.cwd / "e.toml").write_text(text)
    here.refused(("run", "e.toml"), "e.toml", *expected)


def test_missing_and_unreadable_files(here: Here) -> None:
    here.refused(("run", "demmo"), "demmo", "demo")
    (here.cwd / "binary.toml").write_bytes(os.urandom(200) + b"\xff")
    here.refused(("run", "binary.toml"), "binary.toml")


@pytest.mark.long
def test_a_sweep_and_a_comparison_are_exported(here: Here, tmp_path: Path) -> None:
    """One table and one picture for q = 1 and 4; CSV, LaTeX and PDF of a sweep, a comparison in it, and a run of that."""
    words = (
        "sweep",
        "average-precision",
        "run.q=1,4",
        "run.rounds=2",
        "partition.clients=2",
        "algorithm.eta=1.0",
        "--algorithms",
        "fedprox",
    )
    fixed = ("algorithm.name=fedprox", "algorithm.mu=0.1", "problem.name=classify", "--seeds", "2", "--workers", "1")
    code, said, err = here(*words, *fixed, "--out", "s")
    assert code == 0, err
    rows = [line.split() for line in said.splitlines() if " fedprox " in line]
    assert [row[0] for row in rows] == ["1", "4"]
    for q in (1, 4):
        runs = [tmp_path / "s" / f"q={q}" / "fedprox" / f"seed-{s}" for s in (0, 1)]
        assert [json.loads((run / "experiment.json").read_text())["run"]["q"] for run in runs] == [q, q]
        finals = [read_record(run / "record.jsonl")[-1]["ap"] for run in runs]
        assert rows[(1, 4).index(q)][2] == f"{sum(finals) / 2:.4f}"
    assert (tmp_path / "s" / "sweep.png").exists()
    assert "ap on test against run.q" in (tmp_path / "s" / "report.html").read_text()
    for place, plots in (
        ("s", {"sweep"}),
        ("s/q=4", {"ap", "auroc", "val_ap"}),
        ("s/q=4/fedprox/seed-0", {"ap", "auroc"}),
    ):
        code, said, err = here("export", place, "--csv", "--tex", "--pdf", "--out", "e")
        assert code == 0, err
        written = [tmp_path / line for line in said.split()]
        assert plots <= {path.stem for path in written if path.suffix == ".pdf"}
        assert all(path.read_bytes().startswith(b"%PDF") for path in written if path.suffix == ".pdf")
        lines = (tmp_path / "e" / "records.csv").read_text().splitlines()
        known = len(list((tmp_path / place).rglob("record.jsonl"))) * 3
        assert len(lines) == 1 + known, "rounds 0, 1 and 2 of every run"
        text = (tmp_path / "e" / "table.tex").read_text()
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
        body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
        assert "±" not in text
        columns = {line.replace(r"\&", "").count("&") for line in body.splitlines() if line.endswith(r"\\")}
        assert columns == {text[text.index("{tabular}{") + 10 :].partition("}")[0].__len__() - 1}
    here.refused(("export", "s"), "--csv")
    here.refused(("export", "e", "--csv"), "contains no run")
    here.refused(("sweep", "average-precision", "run.q=1"), "Nothing to sweep")


def test_compare_prints_a_table_and_resumes(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = (
        "compare", "average-precision", "run.rounds=2", "run.q=2", "partition.clients=4",
        "--algorithms", "fedavg,fcsg-m", "--seeds", "2", "--workers", "1", "--out", "c",
    )  # fmt: skip
    code, said, err = here(*words)
    assert code == 0, err
    tried = []
    for name in ("fedavg", "fcsg-m"):
        (line,) = [row for row in said.splitlines() if row.startswith(name)]
        finals = [read_record(tmp_path / "c" / name / f"seed-{s}" / "record.jsonl")[-1]["ap"] for s in (0, 1)]
        assert f"{sum(finals) / 2:.4f} ±" in line
        trials = list((tmp_path / "c" / name).glob("trial-*"))
        assert 6 <= len(trials) <= 8, "every method gets its whole grid, and at most two trials beyond an end"
        tried.append(len(trials))
        assert all(json.loads((t / "experiment.json").read_text())["run"]["seed"] == 1000 for t in trials)
    assert f"{min(tried)} to {max(tried)} trials" in said or f", {tried[0]} trials" in said
    assert (tmp_path / "c" / "curves.png").stat().st_size > 5000
    assert here(*words)[1] == said


def test_terminal_and_report_agree_on_the_best_by_a_loss(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal once said "Highest mean log_loss" of a comparison whose report said "Lowest", of another method."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "two.toml").write_text("""
        [data]
        name = "digits"
        binary = true
        validation = 0.25
        [partition]
        clients = 3
        [model]
        name = "mlp"
        hidden = []
        [problem]
        name = "classify"
        [run]
        rounds = 2
        q = 2
        [evaluation]
        metric = "log_loss"
        [methods.good]
        algorithm = { name = "fedavg", eta = 0.5 }
        [methods.bad]
        algorithm = { name = "fedavg", eta = 500.0 }
    """)
    code, said, err = here("compare", "two.toml", "--seeds", "1", "--workers", "1", "--out", "c")
    assert code == 0, err
    finals = {m: read_record(tmp_path / "c" / m / "seed-0" / "record.jsonl")[-1]["log_loss"] for m in ("good", "bad")}
    assert finals["good"] < finals["bad"]
    assert "Lowest mean log_loss: good." in said
    assert f"rounds to {finals['bad']:.4f}" in said, "the target is the worst of the final values"
    assert "Lowest mean log_loss: good," in (tmp_path / "c" / "report.html").read_text(encoding="utf-8")


def test_list_theory_and_cite(here: Here) -> None:
    listed = here("list")[1]
    for word in ("acc-fcsg-m", "2 × model: x, u", "fashion-mnist", "invariant", "demo"):
        assert word in listed
    text = here("theory", "fcsg-m", "--N", "16", "--T", "10000")[1]
    assert "q = " in text
    assert "bound" in text
    assert "@inproceedings" in here("cite", "fafed")[1]
    here.refused(("cite", "fafad"), "fafed")
    here.refused(("theory", "fcsg", "--N", "many"), "--N")


def test_help_explains_arguments_and_defaults(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """typer and click, in versions that do not fit each other, leave the help of arguments out without a word."""
    monkeypatch.setenv("COLUMNS", "200")
    _, text, _ = here("reproduce", "--help")
    assert "A figure or table, such as fcsg-table2." in text
    assert "[default: (set by the budget)]" in text
    assert "An experiment file, or a name from `nestfed list`." in here("compare", "--help")[1]
