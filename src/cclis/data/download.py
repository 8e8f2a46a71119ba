"""Download, verify and unpack the archives of the published benchmarks."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tarfile
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pooch
import requests

from cclis.data.locks import locked
from cclis.data.readers import (
    CIFAR10,
    CIFAR100,
    TINY_IMAGENET,
    CifarLayout,
    find_tiny_imagenet,
)
from cclis.data.readers.text import lines
from cclis.errors import InputError, unknown
from cclis.progress import QUIET, Progress

ATTEMPTS = 4
WAIT_SECONDS = 0.5
"""Wait before the second attempt; doubled before every later one."""
MAX_EXPANSION = 20
"""Largest ratio of unpacked to packed size; images hardly compress."""
TIMEOUT_SECONDS = (10.0, 60.0)
"""Timeouts for connecting and for the next bytes."""


@dataclass(frozen=True)
class Archive:
    """An archive to download.

    Attributes:
        url: Where to download it from.
        filename: Its file name.
        known_hash: Its hash for pooch: "md5:" and the digits.
        folder: The folder that it contains.
        size: Its size in bytes.
    """

    url: str
    filename: str
    known_hash: str
    folder: str
    size: int

    @property
    def md5(self) -> str:
        """The digits of the hash."""
        return self.known_hash.removeprefix("md5:")


ARCHIVES: dict[str, Archive] = {
    "seq-cifar10": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        filename="cifar-10-binary.tar.gz",
        known_hash="md5:c32a1d4ab5d03f1284b67883e8d87530",
        folder=CIFAR10.binary_folder,
        size=170_052_171,
    ),
    "seq-cifar100": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        filename="cifar-100-binary.tar.gz",
        known_hash="md5:03b5dce01913d631647c71ecec9e9cb8",
        folder=CIFAR100.binary_folder,
        size=168_513_733,
    ),
    "seq-tinyimagenet": Archive(
        url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        filename="tiny-imagenet-200.zip",
        known_hash="md5:90528d7ca1a48142e341f4ef8d21d0de",
        folder=TINY_IMAGENET,
        size=248_100_043,
    ),
}

_FILE_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
    "test.bin": "4499cfba6c016c1be1438163640a0898",
}


def default_root() -> Path:
    """The default data folder: $CCLIS_DATA, or else the user's cache folder."""
    configured = os.environ.get("CCLIS_DATA")
    return Path(configured).expanduser() if configured else Path(pooch.os_cache("cclis"))


# ---------------------------------------------------------------------------------- presence


@dataclass(frozen=True)
class Presence:
    """Whether a benchmark's data are present.

    Attributes:
        present: Whether they are complete.
        where: Their folder, if it exists.
        problem: What is wrong with that folder, as a sentence without full stop.
    """

    present: bool
    where: Path | None = None
    problem: str | None = None


def check(name: str, root: Path, *, thorough: bool = False) -> Presence:
    """Check whether the data of the benchmark `name` are in `root`.

    Args:
        name: A key of ARCHIVES.
        root: The folder to look in.
        thorough: Verify the hashes of CIFAR's files and count the images of Tiny-ImageNet.
            Otherwise only names and sizes are checked.
    """
    _archive(name)
    if name == "seq-tinyimagenet":
        where = find_tiny_imagenet(root)
        problem = _tiny_imagenet_problem(where, thorough) if where else None
    else:
        layout = {"seq-cifar10": CIFAR10, "seq-cifar100": CIFAR100}[name]
        where, binary = layout.find(root) or (None, False)
        problem = _cifar_problem(where, binary, layout, thorough) if where else None
    return Presence(where is not None and problem is None, where, problem)


def _cifar_problem(folder: Path, binary: bool, layout: CifarLayout, thorough: bool) -> str | None:
    for stem, records in {**layout.train, **layout.test}.items():
        file = folder / (f"{stem}.bin" if binary else stem)
        if not file.is_file():
            return f"{file} is missing"
        if not binary:
            continue
        size, expected = file.stat().st_size, records * layout.record_bytes
        if size != expected:
            return f"{file} has {size} bytes, but should have {expected}"
        if thorough and pooch.file_hash(str(file), alg="md5") != _FILE_MD5[file.name]:
            return f"{file} is not the published file: its MD5 should be {_FILE_MD5[file.name]}"
    return None


def _tiny_imagenet_problem(folder: Path, thorough: bool) -> str | None:
    listings = ("wnids.txt", "val/val_annotations.txt")
    for file in (folder / name for name in listings):
        if not file.is_file():
            return f"{file} is missing"
    if thorough:
        classes = lines(folder / "wnids.txt")
        train = sum(1 for _ in folder.glob("train/*/images/*.JPEG"))
        test = sum(1 for _ in folder.glob("val/images/*.JPEG"))
        for count, expected, what in (
            (len(classes), 200, "classes"),
            (train, 100_000, "training images"),
            (test, 10_000, "validation images"),
        ):
            if count != expected:
                return f"{folder} contains {count} {what}, but should contain {expected}"
    return None


def _archive(name: str) -> Archive:
    if name not in ARCHIVES:
        raise unknown("benchmark to download", name, ARCHIVES)
    return ARCHIVES[name]


# ---------------------------------------------------------------------------------- download


def download(name: str, root: Path, progress: Progress = QUIET) -> Path:
    """Download and unpack the data of the benchmark `name` into `root`; return their folder.

    Data or an archive that are there already, such as an archive copied by hand, are used. An
    interrupted download is resumed.
    """
    archive = _archive(name)
    folder = _existing_folder(name, root)
    if folder is not None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{archive.filename}.lock", f"downloading to {root}", progress):
            # Another process may have downloaded it in the meantime.
            folder = _existing_folder(name, root)
            if folder is not None:
                return folder
            path = _retrieve(archive, root, progress)
            return _unpack(path, root / archive.folder, progress)
    except OSError as error:
        raise InputError(
            f"could not write to {root} ({error.strerror or error}). Free some space there, or "
            "choose another folder"
        ) from error


def _existing_folder(name: str, root: Path) -> Path | None:
    presence = check(name, root)
    if presence.problem:
        raise InputError(
            f"{presence.problem}. Delete {presence.where} and run the same command again to "
            "download it again"
        )
    return presence.where


def _retrieve(archive: Archive, root: Path, progress: Progress) -> Path:
    target = root / archive.filename
    if target.exists() and not target.is_file():
        raise InputError(
            f"{target} is not a regular file; remove it and run the same command again"
        )
    fetch = _Fetch(target.with_name(f"{archive.filename}.part"), archive, progress)
    try:
        with _quiet(pooch.get_logger()):
            pooch.retrieve(
                archive.url, archive.known_hash, archive.filename, root, downloader=fetch
            )
    except requests.RequestException as error:
        mismatch = (
            f" ({target} exists, but its MD5 is {pooch.file_hash(str(target), alg='md5')}.)"
            if target.is_file()
            else ""
        )
        raise InputError(
            f"could not download {archive.url} ({_reason(error)}). On a machine without network, "
            f"put {archive.filename} (MD5 {archive.md5}) into {root} and run the same command "
            f"again.{mismatch}"
        ) from error
    except ValueError as error:  # what pooch raises for a wrong hash
        raise InputError(
            f"the file from {archive.url} is not {archive.filename}: its MD5 is not {archive.md5}. "
            f"It has been removed; try again, or put the right file into {root} by hand"
        ) from error
    return target


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence pooch's log, because a progress bar shows the same."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Fetch:
    """A downloader for pooch that resumes from a partial file."""

    def __init__(self, part: Path, archive: Archive, progress: Progress):
        self.part, self.archive, self.progress = part, archive, progress

    def __call__(self, url: str, output_file: str, _pooch: Any) -> None:
        """Download `url` to the partial file, then rename it to `output_file`."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._attempt(url)
                break
            except requests.RequestException as error:
                if attempt == ATTEMPTS or _permanent(error):
                    raise
                time.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
        os.replace(self.part, output_file)

    def _attempt(self, url: str) -> None:
        done = self.part.stat().st_size if self.part.is_file() else 0
        # Without "identity" some servers label a .gz file as compressed transfer encoding.
        headers = {"Accept-Encoding": "identity"}
        if done:
            headers["Range"] = f"bytes={done}-"
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_SECONDS) as response:
            whole_range = response.headers.get("Content-Range", "")
            if response.status_code == requests.codes.requested_range_not_satisfiable:
                if whole_range == f"bytes */{done}":
                    return
                self.part.unlink()
                raise requests.ConnectionError("the partial file is longer than the whole")
            response.raise_for_status()
            if response.status_code != requests.codes.partial_content:
                done = 0  # the server does not support ranges and sends the whole file
            elif not whole_range.startswith(f"bytes {done}-"):
                self.part.unlink()
                raise requests.ConnectionError(f"the server sent the wrong part: {whole_range}")
            self._receive(response, done)

    def _receive(self, response: requests.Response, done: int) -> None:
        announced = response.headers.get("Content-Length", "")
        total = done + int(announced) if announced.isdigit() else None
        with (
            self.part.open("ab" if done else "wb") as file,
            self.progress.bar(
                f"downloading {self.archive.filename}",
                total or self.archive.size,
                unit="bytes",
                done=done,
            ) as bar,
        ):
            # Small chunks, because an incomplete chunk is lost.
            for chunk in response.iter_content(1 << 15):
                file.write(chunk)
                bar.advance(len(chunk))
                done += len(chunk)
        if total is not None and done < total:
            raise requests.ConnectionError(f"the connection was lost at byte {done} of {total}")


def _permanent(error: requests.RequestException) -> bool:
    """Whether another attempt would fail in the same way."""
    return error.response is not None and 400 <= error.response.status_code < 500


def _reason(error: requests.RequestException) -> str:
    """The cause of an error that requests wraps several times."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection was lost"
    cause = getattr(error.args[0] if error.args else None, "reason", error)
    return str(cause).rsplit(": ", 1)[-1].rstrip(".")


# ------------------------------------------------------------------------------------ unpack


@dataclass(frozen=True)
class _Member:
    name: str
    size: int
    is_file: bool
    is_folder: bool
    open: Callable[[], IO[bytes] | None]


def _unpack(path: Path, folder: Path, progress: Progress) -> Path:
    """Unpack `folder` from the archive at `path`; it appears only when complete."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        with _members(path) as members:
            for member in members:
                _refuse_unsafe(member, path, folder.name)
            _refuse_bomb(members, path)
            with progress.bar(f"unpacking {path.name} (files)", len(members)) as bar:
                for member in members:
                    if member.is_file:
                        _write(member, temporary / PurePosixPath(member.name))
                    bar.advance()
        if not (temporary / folder.name).is_dir():
            raise InputError(
                f"{path} contains no folder {folder.name}; delete it and run the same command again"
            )
        os.replace(temporary / folder.name, folder)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} is damaged ({error}); delete it and run the same command again"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def _members(path: Path) -> Iterator[list[_Member]]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield [_zip_member(archive, info) for info in archive.infolist()]
    else:
        with tarfile.open(path) as tar:
            yield [_tar_member(tar, info) for info in tar.getmembers()]


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if the archive was not made on Unix
    plain = kind in (0, stat.S_IFREG) and not info.is_dir()
    return _Member(info.filename, info.file_size, plain, info.is_dir(), lambda: archive.open(info))


def _tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo) -> _Member:
    return _Member(
        info.name, info.size, info.isfile(), info.isdir(), lambda: archive.extractfile(info)
    )


def _refuse_unsafe(member: _Member, path: Path, folder: str) -> None:
    name = PurePosixPath(member.name)
    if (
        not (member.is_file or member.is_folder)
        or name.parts[:1] != (folder,)
        or ".." in name.parts
        or "\\" in member.name
        or ":" in member.name
    ):
        raise InputError(
            f"{path} contains '{member.name}', which is not a regular file in {folder}/: refused, "
            "nothing was unpacked. Delete the archive and download it again"
        )


def _refuse_bomb(members: Sequence[_Member], path: Path) -> None:
    packed, unpacked = path.stat().st_size, sum(member.size for member in members)
    if unpacked > MAX_EXPANSION * packed:
        raise InputError(
            f"{path} would expand from {packed:,} to {unpacked:,} bytes: refused, nothing was "
            "unpacked. Delete the archive and download it again"
        )


def _write(member: _Member, target: Path) -> None:
    source = member.open()
    if source is None:  # never for a regular file
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    left = member.size
    with source, target.open("xb") as file:
        while chunk := source.read(min(left, 1 << 20)):
            file.write(chunk)
            left -= len(chunk)
