"""Before the first round: every site hears of everything that it has to repair, in one message, and nothing else leaves it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="deployment is an extra: pip install 'nestfed[flower]'")

from flwr.app import Message

from nestfed.core import NestfedError
from nestfed.deploy import certificates
from nestfed.deploy.check import Way, check
from nestfed.deploy.flower import roster
from nestfed.deploy.node import Node
from nestfed.engine.record import read as read_record
from nestfed.experiment.spec import Experiment, from_tables
from tests.flower import LocalGrid, coordinate, federation, opened, rewritten


def study(**data: Any) -> Experiment:
    return from_tables(
        {
            "data": {"target": "died", "test": 0.3, "validation": 0.3, **data},
            "model": {"name": "mlp", "hidden": []},
            "problem": {"name": "auroc", "batch": 10},
            "algorithm": {"name": "fmgda", "c_hat": 0.1, "c": 0.1},
            "run": {"rounds": 2, "q": 2},
        }
    )


def table(path: Path, seed: int, rows: int = 120) -> Path:
    generator = np.random.default_rng(seed)
    age = generator.normal(60, 10, rows)
    ward = generator.choice(["a", "b"], rows)
    died = (age + generator.normal(0, 8, rows) > 60).astype(int)
    lines = [f"{a:.2f},{w},p{i},{y}" for i, (a, w, y) in enumerate(zip(age, ward, died))]
    path.write_text("age,ward,patient,died\n" + "\n".join(lines) + "\n")
    return path


def clinics(folder: Path, experiment: Experiment, sites: int = 5) -> LocalGrid:
    grid = federation(experiment, folder, sites)
    for n, config in enumerate(grid.configs.values()):
        config["data"] = str(table(folder / f"clinic-{n}.csv", n))
    return grid


def log_of(folder: Path) -> str:
    return (folder / "run" / "sites.log").read_text()


def rejected(folder: Path) -> dict[str, str]:
    lines = [line.partition(" site ")[2] for line in log_of(folder).splitlines() if " is rejected: " in line]
    return dict(line.split(" is rejected: ", 1) for line in lines)


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


STUDY = {"columns": ["patient"], "group": "patient", "classes": ["0", "1"]}
WRONG: dict[str, tuple[Callable[[str], str], str]] = {
    "no target": (replaced("died", "dead"), "its table has no column for data.target"),
    "no group": (replaced("patient", "person"), "lacks columns that the study names in data.columns, data.group, data.split_by or data.drop"),
    "strange label": (replaced(",1\n", ",yes\n"), "has missing values, or values that the study does not name"),
    "missing label": (replaced(",1\n", ",\n"), "has missing values, or values that the study does not name"),
    "text among numbers": (replaced("\n6", "\nJane6"), "some of its columns cannot be used"),
    "empty": (lambda text: "", "its data cannot be read"),
    "no table": (lambda text: text + 'x,"', "its data cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_with_a_table(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator learns the kind, with the site's name; the site's log has the rest; the others continue."""
    change, sentence = WRONG[kind]
    experiment = study(**STUDY)
    grid = clinics(tmp_path, experiment)
    path = tmp_path / "clinic-2.csv"
    path.write_text(change(path.read_text()))
    with caplog.at_level("WARNING", logger="nestfed"):
        coordinate(experiment, tmp_path, grid, sites=5, min_sites=4)
    assert list(rejected(tmp_path)) == ["clinic-2"]
    assert sentence in rejected(tmp_path)["clinic-2"]
    assert "clinic-2.csv" in caplog.text
    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["participants"] == 4
    sent = b"".join(bytes(opened(m).block) for node, _, m in grid.messages if node == 102)
    for word in (b"Jane", b"yes", b"csv", b"person", b"dead"):
        assert word not in sent


def test_all_problems_of_all_sites_are_in_one_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three sites with five problems of their own, and one whose columns differ from the others'; then one run is enough."""
    experiment = study(**STUDY)
    grid = clinics(tmp_path, experiment, sites=7)
    for n, changes in {
        0: [replaced(",1\n", ",yes\n"), replaced("patient", "person"), replaced("\n6", "\nJane6")],
        4: [replaced("age,", "years,"), replaced(",a,", ",1,"), replaced(",b,", ",2,")],
    }.items():
        path = tmp_path / f"clinic-{n}.csv"
        for change in changes:
            path.write_text(change(path.read_text()))
    (tmp_path / "clinic-3.csv").unlink()
    start = roster.time.monotonic()
    with caplog.at_level("WARNING", logger="nestfed"), pytest.raises(NestfedError) as stopped:
        coordinate(experiment, tmp_path, grid, sites=7, deadline=600.0)
    assert roster.time.monotonic() - start < 10
    text = str(stopped.value)
    assert "Only 4 of 7 sites can take part, 7 are needed." in text
    first = text.partition("Site clinic-0: ")[2].partition(" Site ")[0]
    for sentence in ("lacks columns", "values that the study does not name", "columns cannot be used"):
        assert sentence in first
    assert "Site clinic-3: its data cannot be read." in text
    fourth = text.partition("Site clinic-4: ")[2]
    for sentence in (
        "It has no column 'age', which most sites have.", "It has a column 'years', which most sites lack.",
        "Its column 'ward' holds numbers, but text at most sites.",
    ):  # fmt: skip
        assert sentence in fourth
    for n in (1, 2, 5, 6):
        assert f"clinic-{n}" not in text
    assert "node " not in text
    own = caplog.text
    for sentence in ("'yes'", "'Jane6", "'patient'", "clinic-3.csv does not exist"):
        assert sentence in own


class Slow(LocalGrid):
    """Node 104 answers after 20 seconds."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        late = {f"message-{i}" for i, (node, _, _) in enumerate(self.messages) if node == 104}
        return super().pull_messages([i for i in message_ids if i not in late or roster.time.monotonic() > 1020])


def test_a_slow_site_is_heard_before_the_run_stops(tmp_path: Path) -> None:
    """The first site's problem alone makes the run hopeless, but the last one's is worth 20 seconds."""
    experiment = study(drop=["patient"])
    grid = clinics(tmp_path, experiment)
    slow = Slow(grid.apps, grid.configs)
    for n in (0, 4):
        (tmp_path / f"clinic-{n}.csv").unlink()
    with pytest.raises(
        NestfedError, match=r"Only 3 of 5 sites .* Site clinic-0: its data cannot be read. Site clinic-4: its"
    ):
        coordinate(experiment, tmp_path, slow, sites=5, deadline=600.0)
    assert 1020 < roster.time.monotonic() < 1040


@pytest.mark.parametrize("odd", [0, 3])
def test_the_site_whose_column_is_of_another_kind_is_blamed(odd: int, tmp_path: Path) -> None:
    """It once stopped all sites with an error that named its neighbour as well."""
    experiment = study(drop=["patient"])
    grid = clinics(tmp_path, experiment)
    path = tmp_path / f"clinic-{odd}.csv"
    path.write_text(path.read_text().replace(",a,", ",1,").replace(",b,", ",2,"))
    coordinate(experiment, tmp_path, grid, sites=5, min_sites=4)
    assert rejected(tmp_path) == {f"clinic-{odd}": "Its column 'ward' holds numbers, but text at most sites."}


def test_one_class_and_a_full_disk_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = study(drop=["patient"], classes=["0", "1"])
    grid = clinics(tmp_path, experiment)
    path = tmp_path / "clinic-1.csv"
    path.write_text(path.read_text().replace(",1\n", ",0\n"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9, 10**6))  # type: ignore[attr-defined]
    coordinate(experiment, tmp_path, grid, sites=5)
    assert (
        "clinic-1: fewer than two classes reach its min_cell in its training rows; its disk is nearly full."
        in log_of(tmp_path)
    )
    assert log_of(tmp_path).count("its disk is nearly full") == 5
    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["participants"] == 5


@pytest.mark.parametrize("positives", [0, 7])
def test_the_report_of_one_class_says_no_more_than_the_counts(positives: int, tmp_path: Path) -> None:
    """With min-cell 10, no positive and seven positives look the same from outside."""
    path = table(tmp_path / "a.csv", 0)
    lines = path.read_text().splitlines()
    rest = [line.rpartition(",")[0] for line in lines[1:]]
    path.write_text("\n".join([lines[0], *(f"{r},{int(i < positives)}" for i, r in enumerate(rest))]) + "\n")
    experiment = study(drop=["patient"], classes=["0", "1"])
    node = Node.read({"client": 0, "data": str(path), "state": str(tmp_path), "min-cell": 10})
    assert [p.kind for p in check(experiment, node, Way()).problems] == ["one-class"]


@pytest.mark.parametrize(
    ("seconds", "sentence"), [(-4000.0, "s behind the coordinator's"), (4000.0, "s ahead of the coordinator's")]
)
def test_a_wrong_clock(seconds: float, sentence: str, tmp_path: Path) -> None:
    experiment = study(drop=["patient"])
    grid = clinics(tmp_path, experiment)
    grid.spoil = lambda kind, n, m: (
        rewritten(m, {"clock": opened(m).words["clock"] + seconds}) if (kind, n) == ("query.hello", 2) else m
    )
    coordinate(experiment, tmp_path, grid, sites=5)
    (line,) = [line for line in log_of(tmp_path).splitlines() if "its clock is" in line]
    assert "clinic-2" in line
    assert "4000 s" in line
    assert sentence in line


@pytest.mark.parametrize(
    "words",
    [{"problems": ["nonsense"]}, {"problems": "data"}, {"problems": None}, {"clock": "noon"}, {"clock": float("nan")}],
)
def test_a_hostile_report(words: dict[str, Any], tmp_path: Path) -> None:
    experiment = study(drop=["patient"])
    grid = clinics(tmp_path, experiment)
    grid.spoil = lambda kind, n, m: rewritten(m, words) if (kind, n) == ("query.hello", 2) else m
    coordinate(experiment, tmp_path, grid, sites=5, min_sites=4)
    assert list(rejected(tmp_path)) == ["clinic-2"]
    assert "invalid" in rejected(tmp_path)["clinic-2"]


def test_a_certificate_that_expires_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its site says so once a third of its life is left, and so does the coordinator of its own."""
    from nestfed.deploy.certificates import write_certificates

    experiment = study(drop=["patient"])
    write_certificates(tmp_path / "old", ["localhost"], days=0)  # an hour, all of it over
    write_certificates(tmp_path / "new", ["localhost"], days=90)
    for folder, expected in (("old", 5), ("new", 0)):
        monkeypatch.setenv(certificates.AUTHORITY_PATH, str(tmp_path / folder / "ca.crt"))
        place = tmp_path / f"run-{folder}"
        place.mkdir()
        grid = clinics(place, experiment)
        coordinate(experiment, place, grid, sites=5, certificates=str(tmp_path / folder))
        log = log_of(place) if (place / "run" / "sites.log").exists() else ""
        assert log.count("its ca.crt expires soon") == expected
        assert log.count("server.pem expired") == bool(expected)


# ---------------------------------------------------------------------------------------------------------
# A site by itself


def test_a_site_checks_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All problems are listed with their values; once they are repaired, it is ready."""
    from nestfed.cli.main import main
    from nestfed.deploy.certificates import write_key
    from nestfed.deploy.withdraw import withdraw

    path = table(tmp_path / "own.csv", 0)
    good = path.read_text()
    path.write_text(good.replace(",1\n", ",yes\n").replace("patient", "person").replace("\n6", "\nJane6"))
    (tmp_path / "study.toml").write_text(
        'data = {target = "died", columns = ["patient"], group = "patient", classes = ["0", "1"]}\n'
        'model = {name = "mlp"}\nproblem = {name = "auroc"}\nalgorithm = {name = "fmgda"}\n'
    )
    (tmp_path / "state").mkdir()
    withdraw(tmp_path / "state")
    write_key(tmp_path / "own.key")
    (tmp_path / "own.key").chmod(0o644)
    (tmp_path / "site.toml").write_text(
        f'client = 1\nsite = "clinic-1"\ndata = "{path}"\nstate = "{tmp_path / "state"}"\nexperiment = "0123456789"\n'
    )
    words = ["nestfed", "deploy", "check", str(tmp_path / "study.toml"), "--node-config", str(tmp_path / "site.toml")]
    monkeypatch.setattr("sys.argv", [*words, "--auth-supernode-private-key", str(tmp_path / "own.key")])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    assert end.value.code == 1
    for sentence in (
        "agreed to the study 0123456789", "has withdrawn", "'patient'", "'yes'", "'Jane6", "warning: ", "chmod 600", "key SHA256:",
        "The site cannot take part yet.",
    ):  # fmt: skip
        assert sentence in out, out
    path.write_text(good)
    (tmp_path / "state" / "withdrawn").unlink()
    (tmp_path / "own.key").chmod(0o600)
    config = (tmp_path / "site.toml").read_text().replace('experiment = "0123456789"\n', "")
    (tmp_path / "site.toml").write_text(config)
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    assert end.value.code in (0, None)
    assert "problem" not in out
    assert "warning" not in out
    assert sum(map(int, re.findall(r"(\d+) (?:training|test) rows", out))) == 120
