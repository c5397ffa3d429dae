"""The built wheel alone, in an environment of its own without any extra: what a newcomer's `pip install nestfed` gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from nestfed.core import __version__
from tests.system.study import EXPERIMENT

ROOT = Path(__file__).parents[2]
EXTRAS = ("matplotlib", "flwr", "tensorboard", "pyarrow", "dp_accounting", "mkdocs", "pytest")
pytestmark = pytest.mark.slow


class Fresh:
    """An environment with the wheel, used from a directory that is not the repository."""

    def __init__(self, binaries: Path, place: Path) -> None:
        self.binaries, self.place = binaries, place

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [str(self.binaries / program), *words],
            cwd=self.place, env={**kept, "COLUMNS": "200"}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def nestfed(self, *words: str) -> str:
        done = self.run("nestfed", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *words: str) -> str:
        """Return the one sentence with which a command ends."""
        done = self.run("nestfed", *words)
        assert done.returncode not in (0, 1)
        assert "Traceback" not in done.stderr
        return " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = place.glob("nestfed-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(place / "env")], check=True)
    # The versions of the lock file, so that the outside world cannot break this test.
    versions = re.findall(r"^([\w.-]+==[^ ;]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    (place / "versions.txt").write_text("\n".join([*versions, (ROOT / "constraints.txt").read_text()]))
    binaries = place / "env" / "bin"
    install = ["install", "--quiet", "--disable-pip-version-check", "-c", str(place / "versions.txt"), str(wheel)]
    # -I: what PYTHONPATH holds is not installed.
    subprocess.run([str(binaries / "python"), "-I", "-m", "pip", *install], check=True)
    (place / "work").mkdir()
    (place / "work" / "study.toml").write_text(EXPERIMENT)
    return Fresh(binaries, place / "work")


def test_no_extra_is_there_and_none_is_needed(fresh: Fresh) -> None:
    absent = f"import importlib.util as u; print([m for m in {EXTRAS} if u.find_spec(m)])"
    assert fresh.run("python", "-c", absent).stdout.strip() == "[]"
    assert "fcsg-m" in fresh.nestfed("list")
    output = fresh.nestfed("run", "study.toml", "--out", "one")
    assert "report.html" in output
    assert "plot.png" not in output
    output = fresh.nestfed("compare", "study.toml", "--seeds", "2", "--out", "two")
    assert "fedavg" in output
    assert "curves" not in output
    assert (fresh.place / "two" / "report.html").stat().st_size > 10_000


def test_the_papers_are_not_in_it(fresh: Fresh) -> None:
    (wheel,) = fresh.place.parent.glob("nestfed-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if n.endswith(".toml")} == {"nestfed/deploy/templates/site.toml"} | {
        f"nestfed/experiment/packaged/{name}.toml" for name in ("average-precision", "demo", "prevalence")
    }
    assert {n.split("/")[0] for n in names} == {"nestfed", f"nestfed-{__version__}.dist-info"}
    assert not any(word in n for n in names for word in ("papers", "reproduc", "claims"))
    assert "No such command 'reproduce'" in fresh.refused("reproduce", "fmgda-figure1")
    assert "no experiment file 'fcsg-figure1'" in fresh.refused("run", "fcsg-figure1")
    output = fresh.nestfed("list")
    assert re.search(r"Experiments: average-precision, demo, prevalence\s*$", output)
    found = re.search(r"Problems: (.*?) Networks:", " ".join(output.split()))
    assert found is not None
    assert {"classify", "auroc", "auprc", "agnostic", "invariant"} <= set(found[1].split(", "))
    assert not {"sine", "omniglot", "language"} & set(found[1].split(", "))
    assert re.search(r"Networks: mlp, resnet18\s*$", output, re.MULTILINE)


def test_what_an_extra_is_for_says_its_name(fresh: Fresh) -> None:
    assert "nestfed[tensorboard]" in fresh.refused("run", "study.toml", "--out", "three", "--tensorboard")
    assert "nestfed[flower]" in fresh.refused("deploy", "local", "study.toml", "--sites", "2")
    assert "nestfed[privacy]" in fresh.refused(
        "run", "study.toml", "exchange.privacy={ clip = 1.0, noise = 1.0 }", "--out", "four"
    )


def test_the_quick_start_works_when_pasted(fresh: Fresh) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    done = fresh.run("python", "-W", "ignore", "-c", program)
    assert done.returncode == 0, done.stderr
    assert "fmgda" in done.stdout


@pytest.fixture(scope="module")
def hospitals(fresh: Fresh) -> Path:
    """Four tables as hospitals would hold them, made of the heart-disease data."""
    from nestfed.data.sources import load

    pd = pytest.importorskip("pandas")
    if not os.environ.get("NESTFED_DATA"):
        pytest.skip("needs the heart-disease data: set NESTFED_DATA, or run `nestfed data fetch heart-disease`")
    whole = load("heart-disease").train
    folder = fresh.place / "sites"
    folder.mkdir()
    frame = pd.DataFrame(whole.x, columns=whole.features)
    frame["disease"] = whole.y
    for name in sorted(set(whole.columns["hospital"])):
        frame[whole.columns["hospital"] == name].to_csv(folder / f"{name}.csv", index=False)
    return folder


def test_train_on_four_tables(fresh: Fresh, hospitals: Path) -> None:
    files = sorted(map(str, hospitals.glob("*.csv")))
    assert len(files) == 4
    began = time.monotonic()
    output = fresh.nestfed("train", *files, "--target", "disease", "--objective", "auroc", "--out", "heart")
    assert time.monotonic() - began < 240  # half a minute on two idle cores
    assert "report.html" in output
    assert (fresh.place / "heart" / "model" / "MODEL_CARD.md").exists()
    fresh.nestfed("predict", "heart", files[0], "--out", "chances.csv")
    assert len((fresh.place / "chances.csv").read_text().splitlines()) > 100


def test_mistakes_in_tables_are_reported_in_a_sentence(fresh: Fresh, hospitals: Path) -> None:
    import pandas as pd

    files = sorted(map(str, hospitals.glob("*.csv")))
    assert "dissease" in fresh.refused("train", *files, "--target", "dissease")
    assert "nowhere.csv" in fresh.refused("train", *files, "nowhere.csv", "--target", "disease")
    first = pd.read_csv(files[0])
    healthy = fresh.place / "healthy.csv"
    first[first["disease"] == 0].to_csv(healthy, index=False)
    assert "nothing to predict" in fresh.refused("train", str(healthy), "--target", "disease")
    done = fresh.run("nestfed", "train", str(healthy), *files[1:], "--target", "disease", "--out", "one-class")
    assert done.returncode == 0  # a site without positives still has negatives to tell of
    assert "Site healthy has fewer than 5 positives" in done.stdout
    words = first.astype(object)
    words.loc[3, words.columns[0]] = "sixty-three"
    words.to_csv(fresh.place / "words.csv", index=False)
    output = fresh.refused("train", str(fresh.place / "words.csv"), *files[1:], "--target", "disease")
    assert "holds the text 'sixty-three' in line 5" in output
