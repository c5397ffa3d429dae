"""Published files: find, verify and download them."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nestfed.core import NestfedError
from nestfed.files import require_locks

LOG = logging.getLogger(__name__)
CHUNK = 1 << 20
TRIES = 4  # attempts in all; a broken connection is resumed where it broke
TIMEOUT = 30.0  # seconds without a byte

Progress = Callable[[str, int, int], None]  # file name, bytes so far, total bytes


@dataclass(frozen=True)
class File:
    """One published file: name in the dataset's folder, size, sha256, public address."""

    name: str
    size: int
    sha256: str
    url: str | None = None


@dataclass(frozen=True)
class Found:
    """A complete set of files of one dataset in one folder."""

    folder: Path
    files: tuple[File, ...]

    def path(self, name: str) -> Path:
        """Return the path of the file called `name`."""
        return self.folder / name


def published(table: str, url: str | None = None) -> tuple[File, ...]:
    """Return the files listed in lines `sha256 size name`, available at `url/name`."""
    rows = [line.split() for line in table.split("\n") if line]
    return tuple(File(name, int(size), sha256, url and f"{url}/{name}") for sha256, size, name in rows)


class _NotThereError(Exception):
    """The server does not have this file."""


class _WrongFileError(NestfedError):
    """The server's file of this name is not the published one."""


class _BrokenOffError(Exception):
    """The connection ended early; the bytes received so far are kept."""


def cache_folder() -> Path:
    """Return the folder for downloads and decoded arrays: NESTFED_CACHE, else the user's cache."""
    if chosen := os.environ.get("NESTFED_CACHE"):
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("nestfed"))


def find(folder: Path, name: str, forms: Sequence[tuple[File, ...]]) -> Found | None:
    """Return the first form of a dataset that is complete in `folder/name` or in `folder` itself.

    Forms may share file names, so a form with matching sizes is preferred; verification rejects the others later.
    """
    for fits in (lambda path, file: path.stat().st_size == file.size, lambda path, file: True):
        for form in forms:
            for place in (folder / name, folder):
                paths = [(place / file.name, file) for file in form]
                if all(path.is_file() and fits(path, file) for path, file in paths):
                    return Found(place, form)
    return None


def problem(path: Path, file: File) -> str | None:
    """Return what is wrong with a file in one sentence, or None if it is identical to the published one."""
    try:
        size = path.stat().st_size
        if size != file.size:
            found, expected = f"has {size:,} bytes", f"{file.size:,}"
        elif (digest := _sha256(path)) != file.sha256:
            found, expected = f"has sha256 {digest}", file.sha256
        else:
            return None
    except OSError as e:
        return f"{path} cannot be read ({e.strerror or e}), expected a file of {file.size:,} bytes."
    return f"{path} {found}, expected {expected} as published: replace it with a fresh copy."


def verify(found: Found) -> None:
    """Reject files that are not identical to the published ones."""
    for file in found.files:
        if sentence := problem(found.path(file.name), file):
            raise NestfedError(sentence)


def fetch(
    name: str,
    forms: Sequence[tuple[File, ...]],
    folder: Path,
    mirror: str | None = None,
    progress: Progress | None = None,
) -> Found:
    """Download one complete form of a dataset into `folder/name`, from the publishers or from a mirror.

    A mirror is the address of a folder laid out like NESTFED_DATA (`<mirror>/<name>/<file>`). Any static web
    server over such a folder works, and it may hold any of the forms.
    """
    mirror = mirror or os.environ.get("NESTFED_MIRROR")
    offered = [form for form in forms if mirror or all(file.url for file in form)]
    if not offered:
        raise NestfedError(
            f"Dataset {name} cannot be downloaded: put {_listed(forms[0])} in a folder '{name}' below NESTFED_DATA."
        )
    tried: list[str] = []
    wrong: _WrongFileError | None = None
    with _bar() if progress is None else contextlib.nullcontext(progress) as report:
        for form in offered:
            try:
                for file in form:
                    url = f"{mirror.rstrip('/')}/{name}/{file.name}" if mirror else str(file.url)
                    tried.append(url)
                    download(file, url, folder / name, report)
            except _NotThereError:
                continue
            except _WrongFileError as e:  # the server may have the next form
                wrong = e
                continue
            return Found(folder / name, form)
    if wrong:
        raise wrong
    raise NestfedError(
        f"Dataset {name} was not found at {', '.join(tried)}: set NESTFED_MIRROR to another address, "
        f"or put {_listed(forms[0])} in a folder '{name}' below NESTFED_DATA."
    )


def download(file: File, url: str, folder: Path, progress: Progress | None = None) -> Path:
    """Download one file, resuming an earlier attempt, and give it its name only after verification."""
    if not url.startswith(("http://", "https://")):
        raise NestfedError(f"Cannot download from {url!r}: expected an address that begins with https://.")
    final, part = folder / file.name, folder / f"{file.name}.part"
    report = progress or (lambda *_: None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if final.is_file() and problem(final, file) is None:  # another process may have downloaded it
                return final
            LOG.info("downloading %s (%s bytes) to %s.", url, f"{file.size:,}", folder)
            with part.open("ab") as out:
                sentence = _fill(file, url, part, out, report)
            if sentence:
                part.unlink()
            else:
                part.replace(final)
    except OSError as e:
        raise NestfedError(
            f"Folder {folder} cannot be written ({e.strerror or e}): make it writable, or set NESTFED_CACHE."
        ) from e
    if sentence:
        raise _WrongFileError(sentence)
    return final


def _fill(file: File, url: str, part: Path, out: IO[bytes], report: Progress) -> str | None:
    """Receive the whole file; return what is wrong with it, or None."""
    resumed = part.stat().st_size > 0
    _receive(file, url, out, report)
    if resumed and _sha256(part) != file.sha256:  # the old beginning may belong to another version of the file
        out.truncate(0)
        _receive(file, url, out, report)
    if (digest := _sha256(part)) == file.sha256:
        return None
    return (
        f"Download of {url} has sha256 {digest}, expected {file.sha256} as published: "
        f"try again, or choose another address with NESTFED_MIRROR."
    )


def _receive(file: File, url: str, out: IO[bytes], report: Progress) -> None:
    """Fill `out` up to the published size, resuming broken connections."""
    reason = ""
    for _ in range(TRIES):
        try:
            _receive_once(file, url, out, report)
            return
        except _BrokenOffError as e:
            reason = str(e)
            LOG.warning("download of %s broke off: %s.", url, reason)
    have = out.seek(0, os.SEEK_END)
    raise NestfedError(
        f"Download of {url} stopped after {have:,} of {file.size:,} bytes ({reason}): "
        f"check the network and try again to resume."
    )


def _receive_once(file: File, url: str, out: IO[bytes], report: Progress) -> None:
    have = out.seek(0, os.SEEK_END)
    if have >= file.size:  # full: let the checksum decide; too long: start again
        if have == file.size:
            return
        out.truncate(0)
        have = 0
    request = urllib.request.Request(url, headers={"User-Agent": "nestfed", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            begins = f"bytes {have}-"
            if have and not (reply.status == 206 and reply.headers.get("Content-Range", "").startswith(begins)):
                out.truncate(0)  # the server sends the whole file, not the rest
                have = 0
            while piece := reply.read(min(CHUNK, file.size - have + 1)):
                have += len(piece)
                if have > file.size:
                    out.truncate(0)
                    raise _WrongFileError(
                        f"Download of {url} is longer than the published {file.size:,} bytes: "
                        f"choose another address with NESTFED_MIRROR."
                    )
                out.write(piece)
                report(file.name, have, file.size)
            out.flush()
    except urllib.error.HTTPError as e:
        e.close()
        if e.code in (404, 410):
            raise _NotThereError(url) from e
        if e.code == 416:  # our part does not match the server's file
            out.truncate(0)
        raise _BrokenOffError(f"HTTP {e.code} {e.reason}") from e
    except urllib.error.URLError as e:
        raise _BrokenOffError(str(e.reason)) from e
    except (TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException, ValueError) as e:
        raise _BrokenOffError(str(e) or type(e).__name__) from e
    if have < file.size:
        raise _BrokenOffError("the server closed the connection")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time download into a folder."""
    require_locks()
    import fcntl

    with (folder / ".lock").open("ab") as lock:  # never deleted: others may wait for this very file
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _bar() -> Iterator[Progress | None]:
    """Show a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(name: str, done: int, size: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=size)
            bar.update(tasks[name], completed=done)

        yield report


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _listed(form: Sequence[File]) -> str:
    return ", ".join(file.name for file in form)


# The published files as sha256, size and name, in every accepted form. Omniglot: the original archives, and the same
# images stored without compression.
MNIST_GZ = published(
    """
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609 9912422 train-images-idx3-ubyte.gz
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c 28881 train-labels-idx1-ubyte.gz
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6 1648877 t10k-images-idx3-ubyte.gz
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6 4542 t10k-labels-idx1-ubyte.gz
""",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
)
MNIST_PLAIN = published("""
ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db 47040016 train-images-idx3-ubyte
65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5 60008 train-labels-idx1-ubyte
0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7 7840016 t10k-images-idx3-ubyte
ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2 10008 t10k-labels-idx1-ubyte
""")
FASHION_GZ = published(
    """
3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84 26421880 train-images-idx3-ubyte.gz
a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845 29515 train-labels-idx1-ubyte.gz
346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073 4422102 t10k-images-idx3-ubyte.gz
67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5 5148 t10k-labels-idx1-ubyte.gz
""",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
)
FASHION_PLAIN = published("""
c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888 47040016 train-images-idx3-ubyte
bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9 60008 train-labels-idx1-ubyte
5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b 7840016 t10k-images-idx3-ubyte
0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34 10008 t10k-labels-idx1-ubyte
""")
CIFAR_XZ = published("""
89750d386bbe9aeafc49b7afe5a00e9d56eea88fc9ef3c2206893d1b2cdb2a98 20413948 data_batch_1.bin.xz
54936cc6ad155efb02fab6fb342ede34e21079a03cf63556054c334c401977c8 20458936 data_batch_2.bin.xz
007dfaeeab0c4aa4083aefe9b1e0f2b6fa37d64fc9528d44fdb95bc54b2fe27e 20449260 data_batch_3.bin.xz
de5d640e143ec3d90d11e5a6631eba4990b812b4ce91d3f3b0fbff0083cd6b66 20434920 data_batch_4.bin.xz
42d8d0615b025e557b5b2510f9251ace98bb65f55dc68f71def13a1a503e9f19 20390656 data_batch_5.bin.xz
3ae0430e69e3952d2805d2ff9d3640162dad7efe8ccc2404eeabd9c7ce0fec97 20432704 test_batch.bin.xz
""")
CIFAR_BIN = published("""
cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5 30730000 data_batch_1.bin
a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed 30730000 data_batch_2.bin
bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67 30730000 data_batch_3.bin
014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48 30730000 data_batch_4.bin
755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add 30730000 data_batch_5.bin
8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b 30730000 test_batch.bin
""")
CIFAR_TAR = published(
    """
c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd 170052171 cifar-10-binary.tar.gz
""",
    "https://www.cs.toronto.edu/~kriz",
)
OMNIGLOT_STORED = published("""
5e40902b4b72dcec6d87732eb8e8c0862f2c92b579cf264e65fc7a0954e80d47 8556666 images_background.zip
bcc0b44a73cc146a6739d98c0004e3fc70173968e567278fb429b3dd55342400 5838819 images_evaluation.zip
""")
OMNIGLOT_UPSTREAM = published(
    """
ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640 9464212 images_background.zip
1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee 6462886 images_evaluation.zip
""",
    "https://github.com/brendenlake/omniglot/raw/master/python",
)
WIKITEXT = published(
    """
9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f 10797148 train.txt
f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8 1121681 valid.txt
d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0 1256449 test.txt
""",
    "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2",
)
TINY_20 = published("""
ecb8c27ec602d28731700a3929d7288fe8caf8f19c11e6a0dce3bd3deab05805 23036000 tiny-imagenet-20.zip
""")
TINY_200 = published(
    """
6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821 248100043 tiny-imagenet-200.zip
""",
    "http://cs231n.stanford.edu",
)
HEART = published(
    """
a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8 18461 processed.cleveland.data
d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796 10263 processed.hungarian.data
834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314 4109 processed.switzerland.data
e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f 6737 processed.va.data
""",
    "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease",
)
EICU = published(
    """
15e1eb52169828e3cfff3b67132a087298de4d0365bbb31bb294f6043bffd474 136791 patient.csv.gz
4ed356f9c4e7c8ce80e89241697e94b77f21c2f325cd6ad126794b1e92805ef4 759 hospital.csv.gz
2dc6d63f9807c7e663ffa253998691605d527b702ac1db8cc5dda92308061e78 68194 apacheApsVar.csv.gz
99d5a4ab2c5cd07b6ee0a540c86a576e5975ed3b93df8525e3d287d5babf3eae 53627 apachePredVar.csv.gz
""",
    "https://physionet.org/files/eicu-crd-demo/2.0.1",
)
