"""The main commands: read arguments, call the library, print results."""

# Slow imports are inside the commands, so that `nestfed --help` is fast.
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestfed.cli.deploy import deploy_app
from nestfed.cli.model import adapt_command, diff_command, monitor_command, onnx_command, predict_command
from nestfed.cli.study import lr_find_command, train_command
from nestfed.cli.tables import schema_command
from nestfed.core import COMMANDS, NETWORKS, OBJECTIVES, PLUGINS, Algorithm, NestfedError, load_plugins
from nestfed.report.page import size

if TYPE_CHECKING:
    from nestfed.data.sources import Source
    from nestfed.experiment.spec import Experiment
    from nestfed.report.page import Table

app = typer.Typer(
    help="Federated learning for objectives that are not a plain average of losses.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="List, verify and download datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")
app.command("train")(train_command)
app.command("predict")(predict_command)
app.command("monitor")(monitor_command)
app.command("adapt")(adapt_command)
app.command("diff")(diff_command)
app.command("onnx")(onnx_command)
app.command("lr-find")(lr_find_command)
app.command("schema")(schema_command)

File = Annotated[str, typer.Argument(help="An experiment file, or a name from `nestfed list`.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to override, such as algorithm.alpha=0.1 run.rounds=50 warm_up.rounds=5."),
]
DatasetName = Annotated[str, typer.Argument(help="A dataset from `nestfed data list`.")]


def _out(default: str) -> Any:
    return typer.Option("--out", help="Output directory.", show_default=default)


def _tensorboard(wanted: bool) -> bool:
    """Fail at the start, not after hours, if TensorBoard is missing."""
    if wanted:
        from nestfed.report.events import require

        require()
    return wanted


TensorBoard = Annotated[
    bool,
    typer.Option(
        "--tensorboard",
        callback=_tensorboard,
        help="Also write TensorBoard event files (needs the package tensorboard).",
    ),
]


def main() -> None:
    """Run the command line. An error the user can fix prints one sentence and exits with code 2."""
    try:
        _take_plugins()
        _add_plugin_commands()
        app()
    except NestfedError as error:
        sys.stderr.write(f"nestfed: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("nestfed: stopped; run the same command again to resume from the last checkpoint.\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # such as a full disk or a read-only directory
        place = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"nestfed: {place}{error.strerror or error}.\n")
        sys.exit(2)


@app.callback()
def _options(
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of your own that registers methods, problems, datasets or metrics; any command takes it."
        ),
    ] = None,
) -> None:
    """Federated learning for objectives that are not a plain average of losses."""


def _take_plugins() -> None:
    """Take `--plugin FILE` out of the arguments, wherever it is; worker processes find the files in the environment."""
    words, files = [sys.argv[0]], [f for f in os.environ.get(PLUGINS, "").split(os.pathsep) if f]
    rest = iter(sys.argv[1:])
    for word in rest:
        if word == "--":
            words += [word, *rest]
        elif word == "--plugin" or word.startswith("--plugin="):
            name = word.partition("=")[2] or next(rest, "")
            if not Path(name).is_file():
                raise NestfedError(f"--plugin needs a Python file, but {name!r} does not exist.")
            files.append(str(Path(name).resolve()))
        else:
            words.append(word)
    if len(words) < len(sys.argv):
        sys.argv, os.environ[PLUGINS] = words, os.pathsep.join(dict.fromkeys(files))
        load_plugins.cache_clear()
        load_plugins()


def _add_plugin_commands() -> None:
    there: dict[str, Any] = {c.name or c.callback.__name__: c.callback for c in app.registered_commands if c.callback}
    there |= {str(group.name): group for group in app.registered_groups}
    for name, command in COMMANDS.items():
        if name not in there:
            app.command(name)(command)
        elif there[name] is not command:
            raise NestfedError(f"A plugin's command {name!r} has the name of a nestfed command; rename it.")


def echo(text: Any = "") -> None:
    """Print text or a table; without a terminal, tables may be 118 columns wide."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 118
    Console(highlight=False, width=width).print(text, soft_wrap=isinstance(text, str))


@app.command("list")
def list_() -> None:
    """List algorithms, servers, problems, networks, datasets and experiments."""
    from nestfed import models  # noqa: F401 (registers the library's own)
    from nestfed.algorithms import METHODS, SERVERS
    from nestfed.data import sources
    from nestfed.experiment.spec import packaged

    for family in dict.fromkeys(m.family for m in METHODS.values()):
        methods = [m for m in METHODS.values() if m.family == family]
        kinds = sorted({m.accepts.kinds for m in methods})
        echo(f"[bold]Algorithms: {family}[/bold] (for problems of kind {'; '.join(kinds)})")
        rows = [(m.name, _sent(m), (m.__doc__ or "").strip().split("\n")[0]) for m in methods]
        show_table(("name", "sent per round", "description"), rows)
        echo()
    echo(f"Servers: {', '.join(SERVERS)} (for any method whose own server averages)\n")
    echo(f"Problems: {', '.join(OBJECTIVES)}\n")
    echo(f"Networks: {', '.join(NETWORKS)}\n")
    echo(f"Datasets: {', '.join(s.name for s in sources.names())} (see `nestfed data list`)\n")
    echo(f"Experiments: {', '.join(packaged())}")


def _sent(method: type[Algorithm[Any, Any]]) -> str:
    """Return what a method sends each way per round, in multiples of the model's size."""
    if method.single:
        return "nothing"
    whole = [f for f in method.shared if f not in method.sizes]
    rest = [f for f in method.shared if f in method.sizes]
    sizes = {k: v if v == "one number" else f"size of the {v}" for k, v in method.sizes.items()}
    extra = f" + {', '.join(rest)} ({sizes[rest[0]]})" if rest else ""
    extra += f" + {', '.join(method.gathered)} (gathered)" if method.gathered else ""
    return f"{len(whole)} × model: {', '.join(whole)}{extra}"


@app.command("run")
def run_(
    file: File,
    overrides: Overrides = None,
    out: Annotated[Path | None, _out("runs/NAME-DIGEST")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also print how long each part of a round takes.")] = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Run an experiment. Run it again to resume."""
    from nestfed.engine.record import metrics_of
    from nestfed.experiment.build import method
    from nestfed.experiment.run import leads, run
    from nestfed.report.drawing import drawable
    from nestfed.report.events import following
    from nestfed.report.html import write
    from nestfed.report.plot import curves
    from nestfed.report.summary import last, page_of_run

    experiment = _experiment(file, overrides)
    place = out or Path("runs") / f"{Path(file).stem}-{experiment.digest()}"
    laps: dict[str, float] = {}
    watched = tensorboard and leads()
    with following(place / "record.jsonl", place / "tensorboard") if watched else nullcontext():
        history = run(experiment, place, profile=laps.update if profile else None)
    if not leads():
        return
    metrics = list(metrics_of(history[-1]))
    for metric in metrics:
        echo(f"{metric:12} {last(history, metric):.4f}")
    end = history[-1]
    echo(
        f"{'rounds':12} {end['round']}   ({end['examples']:,} examples, {size(end['bytes_up'] + end['bytes_down'])} sent)"
    )
    if metrics:
        decisive = experiment.evaluation.metric if experiment.evaluation.metric in metrics else metrics[0]
        echo(f"record       {place / 'record.jsonl'}")
        if drawable():
            shown = {method(experiment).name: [history]}
            echo(f"plot         {curves(shown, decisive, place / 'plot.png', Path(file).stem)}")
    echo(f"report       {write(page_of_run(place), place / 'report.html')}")
    if (place / "privacy.txt").exists():
        echo((place / "privacy.txt").read_text(encoding="utf-8").strip())
    if profile:
        _profile(laps)


def _profile(laps: dict[str, float]) -> None:
    from rich.table import Table

    total = sum(laps.values())
    if not total:
        echo("\nNo profile: the experiment was already finished.")
        return
    table = Table(title="Time per part", title_justify="left", box=None, pad_edge=False)
    for column in ("", "seconds", "share"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in laps.items():
        table.add_row(name, f"{seconds:.3f}", f"{100 * seconds / total:.1f} %")
    echo()
    echo(table)


@app.command("compare")
def compare_(
    file: File,
    overrides: Overrides = None,
    algorithms: Annotated[
        str,
        typer.Option(help="Methods, separated by commas.", show_default="all of the file"),
    ] = "",
    seeds: Annotated[int, typer.Option(help="Number of seeds per method.")] = 3,
    workers: Annotated[int, typer.Option(help="Number of parallel processes.", show_default="one per core")] = 0,
    out: Annotated[Path | None, _out("runs/compare-NAME-DIGEST")] = None,
    tensorboard: TensorBoard = False,
) -> None:
    """Compare methods at equal rounds: tune each on validation data, then run it with every seed."""
    experiment = _experiment(file, overrides)
    names = _names(algorithms, experiment, file)
    place = out or Path("runs") / f"compare-{Path(file).stem}-{experiment.digest()}"
    _compare(experiment, names, seeds, place, workers, Path(file).stem, tensorboard)


@app.command("sweep")
def sweep_(
    file: File,
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Settings; several values are swept: run.q=1,5,10 exchange.share=0.5,1.0."),
    ] = None,
    algorithms: Annotated[str, typer.Option(help="Methods, separated by commas.", show_default="all of the file")] = "",
    seeds: Annotated[int, typer.Option(help="Number of seeds per method.")] = 3,
    workers: Annotated[int, typer.Option(help="Number of parallel processes.", show_default="one per core")] = 0,
    out: Annotated[Path | None, _out("runs/sweep-NAME-DIGEST")] = None,
) -> None:
    """Compare methods at every value of some settings: one table and one picture. Run it again to resume."""
    from nestfed.experiment.spec import read
    from nestfed.experiment.sweep import parse_settings, points_of, sweep_points

    single, over = parse_settings(settings or ())
    experiment = read(file).with_overrides(single)
    names = _names(algorithms, experiment, file)
    place = out or Path("runs") / f"sweep-{Path(file).stem}-{experiment.digest()}"
    with status() as tell:
        points = points_of(experiment, over)
        found = sweep_points(points, names, seeds, place, title=Path(file).stem, workers=workers or None, tell=tell)
    show(found.table())
    echo(f"\nreport   {found.report()}\nrecords  {place}")
    if (place / "sweep.png").exists():
        echo(f"picture  {place / 'sweep.png'}")


def _names(algorithms: str, experiment: Experiment, file: str) -> list[str]:
    """Return the methods that the user named, or all of the file."""
    names = [a.strip() for a in algorithms.split(",") if a.strip()] or list(experiment.methods)
    if not names:
        raise NestfedError(f"{file} has no [methods]: name some with --algorithms fedavg,fcsg-m.")
    return names


@app.command("tune")
def tune_(
    file: File,
    overrides: Overrides = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method of the file; repeat for several.", show_default="all of the file")
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials per method.", show_default="the whole grid")] = 0,
    workers: Annotated[int, typer.Option(help="Number of parallel processes.", show_default="one per core")] = 0,
    out: Annotated[Path | None, _out("runs/tune-NAME-DIGEST")] = None,
    tensorboard: TensorBoard = False,
) -> None:
    """Tune methods on validation data. Run it again to resume."""
    from nestfed.experiment.tune import shown, tune, write_tuned

    experiment = _experiment(file, overrides)
    names = method or list(experiment.methods)
    if not names:
        raise NestfedError(f"{file} has no [methods] to tune.")
    place = out or Path("runs") / f"tune-{Path(file).stem}-{experiment.digest()}"
    with status() as tell:
        metric, tuned = tune(experiment, names, place, trials=trials, workers=workers or None, tell=tell)
    if tensorboard:
        write_events_below(place, place / "tensorboard")
    show_table(*shown(tuned, metric))
    echo(f"\ntuned    {write_tuned(experiment, tuned, place / 'tuned.toml')}")


@app.command("export")
def export_(
    run: Annotated[Path, typer.Argument(help="The directory of a run, a comparison or a sweep.")],
    csv: Annotated[bool, typer.Option("--csv", help="Write the table and the records as CSV.")] = False,
    tex: Annotated[bool, typer.Option("--tex", help="Write the table for LaTeX (package booktabs).")] = False,
    pdf: Annotated[bool, typer.Option("--pdf", help="Write the plots as PDF.")] = False,
    out: Annotated[Path | None, _out("the directory itself")] = None,
) -> None:
    """Export the tables, records and plots of a run, a comparison or a sweep."""
    from nestfed.experiment.export import export

    for path in export(run, out or run, csv=csv, tex=tex, pdf=pdf):
        echo(str(path))


@app.command()
def demo(out: Annotated[Path | None, _out("runs/demo-DIGEST")] = None) -> None:
    """Train one model for ten sites and look at the worst of them: FedAvg against a minimax objective, in half a minute."""
    from nestfed.experiment.spec import read

    experiment = read("demo")
    echo(
        "Ten sites have images of handwritten digits: is it 5 or more? At nine sites a mark in the corner agrees with the"
    )
    echo(
        "answer in 90 % of the images, at the tenth in 10 %. FedAvg minimises the mean loss over sites; local-sgda and fmgda"
    )
    echo(
        "minimise that of the worst mixture of sites. Each is tuned with the same number of trials on validation images,"
    )
    echo("then run with three seeds.\n")
    _compare(experiment, list(experiment.methods), 3, out or Path("runs") / f"demo-{experiment.digest()}", 0, "demo")


def _compare(
    experiment: Experiment,
    names: list[str],
    seeds: int,
    place: Path,
    workers: int,
    title: str,
    tensorboard: bool = False,
) -> None:
    from nestfed.experiment.compare import Comparison, compare

    with status() as tell:
        compare(experiment, names, seeds, place, title=title, workers=workers or None, tell=tell)
    found = Comparison.read(place)
    show(found.table())
    report = found.report()
    if tensorboard:
        write_events_below(place, place / "tensorboard")
    echo(f"\nreport   {report}\nrecords  {place}")
    if (place / "curves.png").exists():
        echo(f"curves   {place / 'curves.png'}")


def write_events_below(runs: Path, place: Path) -> None:
    """Write TensorBoard event files for all runs and trials below a directory."""
    from nestfed.report.events import write_events

    for record in runs.glob("**/record.jsonl"):
        write_events(record, place / record.parent.relative_to(runs))


def show(table: Table) -> None:
    """Print a table of a report, its best rows in bold, and its note."""
    from rich.table import Table as Rich

    printed = Rich(box=None, pad_edge=False)
    last = len(table.columns) - 1
    for i, column in enumerate(table.columns):
        printed.add_column(column, no_wrap=i == 0, justify="left" if i in (0, last) else "right")
    for i, row in enumerate(table.rows):
        first, *cells = ["" if cell is None else str(cell) for cell in row]
        printed.add_row(f"[bold]{first}[/bold]" if i in table.best else first, *cells)
    echo(printed)
    echo(f"\n{table.note}")


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Show the current step on standard error."""
    from rich.console import Console

    with Console(stderr=True).status("preparing") as status:
        yield status.update


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], unbroken: int = 1) -> None:
    """Print a table of text; the first columns, `unbroken` of them, do not wrap."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i < unbroken)
    for row in rows:
        table.add_row(*row)
    echo(table)


def _experiment(file: str, overrides: list[str] | None) -> Experiment:
    from nestfed.experiment.spec import parse_overrides, read

    return read(file).with_overrides(parse_overrides(overrides or ()))


@app.command(context_settings={"ignore_unknown_options": True})
def theory(
    method: Annotated[str, typer.Argument(help="A method with a theorem, such as fcsg-m.")],
    constants: Annotated[
        list[str] | None, typer.Argument(help="Constants of the theorem, as --N 16 --T 10000 or N=16 T=10000.")
    ] = None,
) -> None:
    """Print the step sizes, q and B from a method's theorem, with its conditions and bound."""
    from nestfed.theory import prescribe

    values: dict[str, Any] = {}
    words = iter(constants or ())
    for item in words:
        key, equals, text = item.removeprefix("--").partition("=")
        text = text if equals else next(words, "")
        try:
            values[key] = float(text) if set(text) & set(".e") else int(text)
        except ValueError:
            raise NestfedError(f"{item!r} is not a constant; write it as --N 16 or N=16.") from None
    for line in prescribe(method, **values).lines():
        echo(line)


@app.command()
def cite(name: Annotated[str, typer.Argument(help="A method or a problem from `nestfed list`.")]) -> None:
    """Print the BibTeX entries to cite for a method or a problem."""
    from nestfed.algorithms.references import bibtex

    sys.stdout.write(bibtex(name).strip() + "\n")


@data_app.command("list")
def data_list() -> None:
    """List datasets, their licences, and which are on this machine."""
    from nestfed.data import files, sources

    rows = []
    for source in sources.names():
        here = "yes" if not source.forms or sources.where(source.name) else f"no, {_download(source)}"
        rows.append((source.name, here, source.about, source.examples, source.licence))
    show_table(("name", "on this machine", "description", "examples", "licence"), rows, unbroken=2)
    echo("\nA missing dataset is downloaded when it is first used, or by `nestfed data fetch NAME`, to")
    echo(f"{files.cache_folder() / 'data'}. To use datasets in another folder, set NESTFED_DATA.")


def _download(source: Source) -> str:
    """Return the size of the download."""
    offered = [form for form in source.forms if all(file.url for file in form)] or source.forms
    return size(sum(file.size for file in offered[0]))


Folder = Annotated[
    Path | None, typer.Option(help="Directory of the files.", show_default="$NESTFED_DATA, else the cache")
]


@data_app.command("check")
def data_check(
    name: Annotated[
        str, typer.Argument(help="A dataset from `nestfed data list`.", show_default="all on this machine")
    ] = "",
    folder: Folder = None,
) -> None:
    """Verify dataset files against their published checksums."""
    from nestfed.data import sources

    names = [name] if name else [s.name for s in sources.names() if sources.where(s.name, folder)]
    if not names:
        echo("No datasets on this machine yet; see `nestfed data list`.")
    wrong = []
    for each in names:
        found = sources.check(each, folder)
        problems = [file.problem for file in found if file.problem]
        if not found:
            echo(f"{each}: no files to check.")
        elif not problems:
            echo(f"{each}: verified, {len(found)} file{'s' * (len(found) > 1)} in {found[0].path.parent}")
        elif not any(file.path.exists() for file in found):
            raise NestfedError(
                f"{each} is not in {found[0].path.parent}; download it with `nestfed data fetch {each}`."
            )
        else:
            wrong.append(each)
            for problem in problems:
                echo(f"{each}: {problem}")
    if wrong:
        raise NestfedError(f"{', '.join(wrong)}: files differ from the published ones.")


@data_app.command("fetch")
def data_fetch(name: DatasetName) -> None:
    """Download a dataset to the cache. Run it again to resume an interrupted download."""
    from nestfed.data import files, sources

    place = sources.where(name)
    if place and files.cache_folder() not in place.parents:  # files in the cache are verified and repaired
        echo(f"{name} is already in {place}; verify it with `nestfed data check {name}`.")
        return
    found = sources.fetch(name)
    echo(f"{name} is in {found.folder}." if found.files else f"{name} has no files to download.")
