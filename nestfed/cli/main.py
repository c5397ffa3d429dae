"""The command line. Thin: it reads arguments, calls the library, prints."""

# Heavy imports stand inside the commands, so that `nestfed --help` is quick.
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestfed.cli.deploy import deploy_app
from nestfed.cli.study import lr_find_command, predict_command, train_command
from nestfed.core import COMMANDS, NETWORKS, OBJECTIVES, Algorithm, NestfedError
from nestfed.report.page import size

if TYPE_CHECKING:
    from nestfed.core import Metric
    from nestfed.data.sources import Source
    from nestfed.experiment.spec import Experiment
    from nestfed.report.summary import MethodResult

app = typer.Typer(
    help="Federated learning for objectives that are not a plain average of losses.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    help="The named data sets: what there is, whether it is whole, how to get it.", no_args_is_help=True
)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")
app.command("train")(train_command)
app.command("predict")(predict_command)
app.command("lr-find")(lr_find_command)

File = Annotated[str, typer.Argument(help="An experiment file, or one of `nestfed list`.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as algorithm.alpha=0.1 run.rounds=50.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Directory of the run.", show_default="runs/NAME-DIGEST")]


def _tensorboard(wanted: bool) -> bool:
    """Say at once, not after hours, that events cannot be written."""
    if wanted:
        from nestfed.report.events import require

        require()
    return wanted


TensorBoard = Annotated[
    bool,
    typer.Option("--tensorboard", callback=_tensorboard, help="Write TensorBoard event files beside the records."),
]


def main() -> None:
    """Run the command line; a mistake of the user's is one sentence and exit code 2."""
    try:
        _add_plugin_commands()
        app()
    except NestfedError as error:
        from nestfed.engine.run_directory import Interrupted

        sys.stderr.write(f"nestfed: {error}\n")
        sys.exit(130 if isinstance(error, Interrupted) else 2)
    except KeyboardInterrupt:
        sys.stderr.write("nestfed: stopped; the same command goes on from the last checkpoint.\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a full disk, a directory that may not be written
        place = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"nestfed: {place}{error.strerror or error}.\n")
        sys.exit(2)


def _add_plugin_commands() -> None:
    there: dict[str, Any] = {c.name or c.callback.__name__: c.callback for c in app.registered_commands if c.callback}
    there |= {str(group.name): group for group in app.registered_groups}
    for name, command in COMMANDS.items():
        if name not in there:
            app.command(name)(command)
        elif there[name] is not command:
            raise NestfedError(f"The command {name!r} of a plugin is also one of nestfed's own: rename the plugin's.")


def say(text: Any = "") -> None:
    """Print for people; where there is no terminal a table may be wider than 80 columns."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 118
    Console(highlight=False, width=width).print(text, soft_wrap=isinstance(text, str))


@app.command("list")
def list_() -> None:
    """List the algorithms by kind, the problems, networks, data sets and experiments."""
    from rich.table import Table

    from nestfed import models  # noqa: F401 (registers the library's own)
    from nestfed.algorithms import METHODS
    from nestfed.data import sources
    from nestfed.experiment.spec import packaged

    for family in dict.fromkeys(m.family for m in METHODS.values()):
        methods = [m for m in METHODS.values() if m.family == family]
        kinds = sorted({m.accepts.kinds for m in methods})
        say(f"[bold]Algorithms: {family}[/bold] (for problems of kind {'; '.join(kinds)})")
        table = Table(box=None, pad_edge=False)
        for column in ("name", "sends a round", "what it is"):
            table.add_column(column, overflow="fold", no_wrap=column == "name")
        for method in methods:
            first = (method.__doc__ or "").strip().split("\n")[0]
            table.add_row(method.name, _sent(method), first)
        say(table)
        say()
    say(f"Problems: {', '.join(OBJECTIVES)}\n")
    say(f"Networks: {', '.join(NETWORKS)}\n")
    say(f"Data sets: {', '.join(s.name for s in sources.names())} (see `nestfed data list`)\n")
    say(f"Experiments: {', '.join(packaged())}")


def _sent(method: type[Algorithm[Any, Any]]) -> str:
    """Return what a method sends each way in a round, in multiples of the model's size."""
    if method.single:
        return "nothing"
    whole = [f for f in method.shared if f not in method.sizes]
    rest = [f for f in method.shared if f in method.sizes]
    extra = f" + {', '.join(rest)} (size of the {method.sizes[rest[0]]})" if rest else ""
    return f"{len(whole)} × model: {', '.join(whole)}{extra}"


@app.command("run")
def run_(
    file: File,
    overrides: Overrides = None,
    out: Out = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of a round goes.")] = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Carry out an experiment file (or one of `nestfed list`). The same command goes on with an unfinished run."""
    from nestfed.engine.record import metrics_of
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
        say(f"{metric:12} {last(history, metric):.4f}")
    end = history[-1]
    say(
        f"{'rounds':12} {end['round']}   ({end['examples']:,} examples, {size(end['bytes_up'] + end['bytes_down'])} sent)"
    )
    if metrics:
        decisive = experiment.evaluation.metric if experiment.evaluation.metric in metrics else metrics[0]
        say(f"record       {place / 'record.jsonl'}")
        if drawable():
            shown = {experiment.algorithm.name: [history]}
            say(f"picture      {curves(shown, decisive, place / 'plot.png', Path(file).stem)}")
    say(f"report       {write(page_of_run(place), place / 'report.html')}")
    if (place / "privacy.txt").exists():
        say((place / "privacy.txt").read_text(encoding="utf-8").strip())
    if profile:
        _profile(laps)


def _profile(laps: dict[str, float]) -> None:
    from rich.table import Table

    total = sum(laps.values())
    if not total:
        say("\nprofile: nothing was run, the experiment was finished.")
        return
    table = Table(title="Where the time went", title_justify="left", box=None, pad_edge=False)
    for column in ("", "seconds", "share"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in laps.items():
        table.add_row(name, f"{seconds:.3f}", f"{100 * seconds / total:.1f} %")
    say()
    say(table)


@app.command("compare")
def compare_(
    file: File,
    overrides: Overrides = None,
    algorithms: Annotated[
        str,
        typer.Option(
            help="Methods of the file or of the library, separated by commas.", show_default="all of the file"
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    workers: Annotated[int, typer.Option(help="Processes at once.", show_default="one per core")] = 0,
    out: Out = None,
    tensorboard: TensorBoard = False,
) -> None:
    """Compare methods at equal rounds: tune each on its grid by validation data, then run it with every seed."""
    experiment = _experiment(file, overrides)
    names = [a.strip() for a in algorithms.split(",") if a.strip()] or list(experiment.methods)
    if not names:
        raise NestfedError(f"{file} has no [methods]: name some with --algorithms fedavg,fcsg-m.")
    place = out or Path("runs") / f"compare-{Path(file).stem}-{experiment.digest()}"
    _compare(experiment, names, seeds, place, workers, Path(file).stem, tensorboard)


@app.command("tune")
def tune_(
    file: File,
    overrides: Overrides = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method of the file; may be repeated.", show_default="all")
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials for each method.", show_default="its whole grid")] = 0,
    workers: Annotated[int, typer.Option(help="Processes at once.", show_default="one per core")] = 0,
    out: Out = None,
    tensorboard: TensorBoard = False,
) -> None:
    """Tune methods on their grids by validation data; the same command goes on with what is unfinished."""
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
    say(f"\ntuned    {write_tuned(experiment, tuned, place / 'tuned.toml')}")


@app.command()
def demo(out: Out = None) -> None:
    """Show federated AUPRC training against FedAvg on handwritten digits, in about a minute."""
    from nestfed.experiment.spec import read

    experiment = read("demo")
    say("16 clients hold handwritten digits; 5 to 9 are the positives, and 80 % of them are missing from training.")
    say("FedAvg minimises cross-entropy, the others maximise average precision (ap) directly. Each is tuned with the")
    say("same number of trials on validation data and then run with three seeds: about a minute on two cores.\n")
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
    from nestfed.experiment.compare import compare
    from nestfed.report.drawing import drawable
    from nestfed.report.html import write
    from nestfed.report.plot import curves
    from nestfed.report.summary import page_of_comparison

    with status() as tell:
        metric, outcomes = compare(experiment, names, seeds, place, workers=workers or None, tell=tell)
    _table(outcomes, metric, seeds)
    report = write(page_of_comparison(place, metric, outcomes, title=title), place / "report.html")
    if tensorboard:
        write_events_below(place, place / "tensorboard")
    say(f"\nreport   {report}\nrecords  {place}")
    if drawable():
        shown = {o.method: o.histories for o in outcomes}
        say(f"curves   {curves(shown, metric.name, place / 'curves.png', title)}")


def write_events_below(runs: Path, place: Path) -> None:
    """Write TensorBoard event files of all runs and trials below a directory."""
    from nestfed.report.events import write_events

    for record in runs.glob("**/record.jsonl"):
        write_events(record, place / record.parent.relative_to(runs))


def _table(outcomes: list[MethodResult], metric: Metric, seeds: int) -> None:
    from statistics import fmean

    from rich.table import Table

    from nestfed.report.summary import reached, spread

    means = {o.method: fmean(o.final(metric.name)) for o in outcomes}
    best, target = max(means, key=lambda m: metric.signed(means[m])), metric.worst(means.values())
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for column in (f"{metric.name} on test", "rounds", f"rounds to {target:.4f}", "examples", "sent", "trials"):
        table.add_column(column, justify="right")
    table.add_column("tuned to")
    for o in outcomes:
        values, end = o.final(metric.name), o.histories[0][-1]
        hits = [hit["round"] for history in o.histories if (hit := reached(history, metric, target)) is not None]
        some = f" ({len(hits)} of {seeds})" if len(hits) < seeds else ""
        table.add_row(
            f"[bold]{o.method}[/bold]" if o.method == best else o.method,
            spread(values),
            str(end["round"]),
            f"{spread(hits, lambda v: f'{v:.3g}')}{some}" if hits else "–",
            f"{end['examples']:,}",
            size(end["bytes_up"] + end["bytes_down"]),
            str(o.trials),
            " ".join(f"{k.split('.')[-1]}={v}" for k, v in o.chosen.items()),
        )
    say(table)
    say(
        f"\nMean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}. {metric.direction} mean {metric.name}: {best}."
    )
    for o in outcomes:
        if o.diverged:
            say(o.divergence())


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being done."""
    from rich.console import Console

    with Console(stderr=True).status("preparing") as status:
        yield status.update


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of text, the first column whole."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    say(table)


def _experiment(file: str, overrides: list[str] | None) -> Experiment:
    from nestfed.experiment.spec import parse_overrides, read

    return read(file).with_overrides(parse_overrides(overrides or ()))


@app.command(context_settings={"ignore_unknown_options": True})
def theory(
    method: str,
    constants: Annotated[list[str] | None, typer.Argument(help="Constants: --N 16 --T 10000, or N=16 T=10000.")] = None,
) -> None:
    """Print the step sizes, q and B that a method's theorem prescribes, its conditions and its bound."""
    from nestfed.theory import prescribe

    values: dict[str, Any] = {}
    words = iter(constants or ())
    for item in words:
        key, equals, text = item.removeprefix("--").partition("=")
        text = text if equals else next(words, "")
        try:
            values[key] = float(text) if set(text) & set(".e") else int(text)
        except ValueError:
            raise NestfedError(f"{item!r} is no constant; write it as --N 16 or N=16.") from None
    for line in prescribe(method, **values).lines():
        say(line)


@app.command()
def cite(name: str) -> None:
    """Print the BibTeX entries of a method or an objective."""
    from nestfed.algorithms.references import bibtex

    sys.stdout.write(bibtex(name).strip() + "\n")


@data_app.command("list")
def data_list() -> None:
    """Show the named data sets, and which are on this machine."""
    from rich.table import Table

    from nestfed.data import files, sources

    table = Table(box=None, pad_edge=False)
    for column in ("name", "here", "what it is", "examples", "licence"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "here"))
    for source in sources.names():
        here = "yes" if not source.forms or sources.where(source.name) else f"no, {_download(source)}"
        table.add_row(source.name, here, source.about, source.examples, source.licence)
    say(table)
    say("\nA data set that is not here is downloaded when it is first used, or by `nestfed data fetch NAME`, into")
    say(f"{files.cache_folder() / 'data'}. Set NESTFED_DATA to a folder that holds them to use that instead.")


def _download(source: Source) -> str:
    """Return how much there is to download."""
    offered = [form for form in source.forms if all(file.url for file in form)] or source.forms
    return size(sum(file.size for file in offered[0]))


Folder = Annotated[Path | None, typer.Option(help="Where the files are.")]


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="A data set.", show_default="all that are on this machine")] = "",
    folder: Folder = None,
) -> None:
    """Compare files with their published checksums."""
    from nestfed.data import sources

    names = [name] if name else [s.name for s in sources.names() if sources.where(s.name, folder)]
    if not names:
        say("No data set is on this machine yet; see `nestfed data list`.")
    wrong = []
    for each in names:
        found = sources.check(each, folder)
        problems = [file.problem for file in found if file.problem]
        if not found:
            say(f"{each}: has no files to check.")
        elif not problems:
            say(f"{each}: whole, {len(found)} file{'s' * (len(found) > 1)} in {found[0].path.parent}")
        elif not any(file.path.exists() for file in found):
            raise NestfedError(f"{each} is not in {found[0].path.parent}: `nestfed data fetch {each}` downloads it.")
        else:
            wrong.append(each)
            for problem in problems:
                say(f"{each}: {problem}")
    if wrong:
        raise NestfedError(f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not as published.")


@data_app.command("fetch")
def data_fetch(name: str) -> None:
    """Download a data set into the cache; an interrupted download goes on where it stopped."""
    from nestfed.data import files, sources

    place = sources.where(name)
    if place and files.cache_folder() not in place.parents:  # what is in the cache is verified, and mended
        say(f"{name} is already in {place}; `nestfed data check {name}` compares it with the published files.")
        return
    found = sources.fetch(name)
    say(f"{name} is in {found.folder}." if found.files else f"{name} has no files to download.")
