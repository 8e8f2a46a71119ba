from __future__ import annotations

import hashlib
import io
import re
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cclis.data import download as module
from cclis.data.download import ARCHIVES, Archive, check, default_root, download
from cclis.data.readers import CIFAR10
from cclis.errors import InputError
from tests.conftest import Bars

FOLDER = "cifar-10-batches-bin"
FILENAME = "cifar-10-binary.tar.gz"


def tar_of(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def folder_member(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE
    return info


def link_member(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


# Incompressible, so that half of the archive is far more than a buffer.
NOISE = b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(20_000))
GOOD = tar_of(
    folder_member(FOLDER), (f"{FOLDER}/data_batch_1.bin", NOISE), (f"./{FOLDER}/a/b.txt", b"hello")
)


class Server(ThreadingHTTPServer):
    """Serves one body; remembers the Range of every request; misbehaves as it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = GOOD
        self.ranges: list[str | None] = []
        self.cuts = 0
        """So many of the next answers break off half-way."""
        self.knows_ranges = True
        self.status = 200
        self.delay = 0.0
        """Seconds before an answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{FILENAME}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        time.sleep(server.delay)
        if server.status != 200:
            self.send_error(server.status)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked else 0
        if not server.knows_ranges:
            start = 0
        elif start >= len(server.body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.body)}")
            self.end_headers()
            return
        rest = server.body[start:]
        self.send_response(206 if start else 200)
        if start:
            end = len(server.body) - 1
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(server.body)}")
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if server.cuts:
            server.cuts -= 1
            rest = rest[: len(rest) // 2]
        self.wfile.write(rest)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        publish(monkeypatch, server, GOOD)
        yield server
        server.shutdown()
        thread.join()


def publish(monkeypatch, server: Server, body: bytes, name: str = "seq-cifar10") -> None:
    """`body` is what the server sends, and what the archive is expected to be."""
    server.body = body
    archive = ARCHIVES[name]
    known_hash = f"md5:{hashlib.md5(body).hexdigest()}"
    fake = Archive(server.url, archive.filename, known_hash, archive.folder, len(body))
    monkeypatch.setitem(ARCHIVES, name, fake)


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def test_complete_download(server, tmp_path):
    folder = download("seq-cifar10", tmp_path / "new")
    assert folder == tmp_path / "new" / FOLDER
    assert (folder / "data_batch_1.bin").read_bytes() == NOISE
    assert (folder / "a" / "b.txt").read_text() == "hello"
    assert names_in(tmp_path / "new") == [FOLDER, FILENAME]
    assert server.ranges == [None]


def test_resumes_after_a_cut(server, tmp_path):
    server.cuts = 2
    folder = download("seq-cifar10", tmp_path)
    assert (folder / "data_batch_1.bin").read_bytes() == NOISE
    first, *later = server.ranges
    offsets = [int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) for asked in later]
    assert first is None
    assert len(GOOD) // 3 < offsets[0] < offsets[1] < len(GOOD)


def test_a_later_call_resumes_what_an_earlier_one_left(server, tmp_path):
    server.cuts = module.ATTEMPTS
    with pytest.raises(InputError, match="connection was lost"):
        download("seq-cifar10", tmp_path)
    part = tmp_path / f"{FILENAME}.part"
    left = part.stat().st_size
    assert GOOD.startswith(part.read_bytes())
    assert len(server.ranges) == module.ATTEMPTS

    bars = Bars()
    download("seq-cifar10", tmp_path, bars)

    assert server.ranges[-1] == f"bytes={left}-"
    assert (f"downloading {FILENAME}", len(GOOD), left) in bars.begun
    assert names_in(tmp_path) == [FOLDER, FILENAME]


def test_starts_over_where_the_server_knows_no_ranges(server, tmp_path):
    server.cuts, server.knows_ranges = 1, False
    download("seq-cifar10", tmp_path)
    assert (tmp_path / FILENAME).read_bytes() == GOOD


def test_a_complete_partial_file_is_taken(server, tmp_path):
    (tmp_path / f"{FILENAME}.part").write_bytes(GOOD)
    download("seq-cifar10", tmp_path)
    assert server.ranges == [f"bytes={len(GOOD)}-"]


def test_a_partial_file_that_is_too_long_is_dropped(server, tmp_path):
    (tmp_path / f"{FILENAME}.part").write_bytes(GOOD + b"more")
    download("seq-cifar10", tmp_path)
    assert server.ranges == [f"bytes={len(GOOD) + 4}-", None]


def test_wrong_checksum_leaves_nothing(server, tmp_path):
    server.body = GOOD[:-1] + b"?"
    with pytest.raises(InputError, match="its MD5 is not"):
        download("seq-cifar10", tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (503, module.ATTEMPTS)])
def test_an_answer_without_the_file(server, tmp_path, status, requests):
    server.status = status
    with pytest.raises(InputError, match=f"the server answered {status}"):
        download("seq-cifar10", tmp_path)
    assert len(server.ranges) == requests


def test_offline_says_what_to_put_where(server, tmp_path):
    server.shutdown()
    server.server_close()
    (tmp_path / FILENAME).write_bytes(b"half of it")
    with pytest.raises(InputError) as error:
        download("seq-cifar10", tmp_path)
    message = str(error.value)
    md5 = ARCHIVES["seq-cifar10"].md5
    assert f"could not download {server.url} (" in message
    assert f"put {FILENAME} (MD5 {md5}) into {tmp_path} and run the same command" in message
    assert f"exists, but its MD5 is {hashlib.md5(b'half of it').hexdigest()}" in message
    assert "HTTPConnectionPool" not in message


def test_an_archive_put_there_by_hand_needs_no_network(server, tmp_path):
    (tmp_path / FILENAME).write_bytes(GOOD)
    assert (download("seq-cifar10", tmp_path) / "data_batch_1.bin").read_bytes() == NOISE
    assert server.ranges == []


def empty_cifar10(root: Path) -> Path:
    """Files of the right sizes, which take no room on disk."""
    folder = root / FOLDER
    folder.mkdir(parents=True)
    for name, records in {**CIFAR10.train, **CIFAR10.test}.items():
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(records * CIFAR10.record_bytes)
    return folder


def test_what_is_there_is_not_fetched_again(server, tmp_path):
    folder = empty_cifar10(tmp_path)
    assert download("seq-cifar10", tmp_path) == folder
    assert server.ranges == []


def test_a_damaged_folder_is_not_replaced_silently(server, tmp_path):
    folder = empty_cifar10(tmp_path)
    (folder / "test_batch.bin").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"test_batch.bin has 4 bytes.*Delete"):
        download("seq-cifar10", tmp_path)
    assert (folder / "test_batch.bin").read_bytes() == b"mine"
    assert server.ranges == []


@pytest.mark.parametrize(
    "member",
    [
        ("../evil", b"x"),
        (f"{FOLDER}/../../evil", b"x"),
        ("elsewhere/evil", b"x"),
        ("evil", b"x"),
        (f"{FOLDER}\\..\\evil", b"x"),
        link_member(f"{FOLDER}/link", "/etc"),
        link_member(f"{FOLDER}/hard", "/etc/passwd", tarfile.LNKTYPE),
        link_member(f"{FOLDER}/pipe", "", tarfile.FIFOTYPE),
    ],
)
def test_hostile_members_are_refused(server, tmp_path, monkeypatch, member):
    publish(monkeypatch, server, tar_of((f"{FOLDER}/good.bin", b"good"), member))
    root = tmp_path / "root"
    with pytest.raises(InputError, match="refused"):
        download("seq-cifar10", root)
    assert names_in(root) == [FILENAME]
    assert names_in(tmp_path) == ["root"]


def test_an_absolute_member_is_refused(server, tmp_path, monkeypatch):
    target = tmp_path / "evil"
    publish(monkeypatch, server, tar_of((str(target), b"x")))
    with pytest.raises(InputError, match="refused"):
        download("seq-cifar10", tmp_path / "root")
    assert not target.exists()


@pytest.mark.parametrize("body", [b"no archive at all", tar_of()], ids=["noise", "empty tar"])
def test_archives_without_content(server, tmp_path, monkeypatch, body):
    publish(monkeypatch, server, body)
    with pytest.raises(InputError, match=r"damaged|contains no folder"):
        download("seq-cifar10", tmp_path)
    assert names_in(tmp_path) == [FILENAME]


def zip_of(*members: tuple[str, bytes, int]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content, kind in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = (kind | 0o644) << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def test_zip_archive(server, tmp_path, monkeypatch):
    members = [
        ("tiny-imagenet-200/", b"", stat.S_IFDIR),
        ("tiny-imagenet-200/wnids.txt", b"n01\n", stat.S_IFREG),
    ]
    publish(monkeypatch, server, zip_of(*members), "seq-tinyimagenet")
    folder = download("seq-tinyimagenet", tmp_path / "good")
    assert (folder / "wnids.txt").read_text() == "n01\n"

    link = ("tiny-imagenet-200/link", b"/etc/passwd", stat.S_IFLNK)
    publish(monkeypatch, server, zip_of(*members, link), "seq-tinyimagenet")
    with pytest.raises(InputError, match="refused"):
        download("seq-tinyimagenet", tmp_path / "bad")
    assert names_in(tmp_path / "bad") == ["tiny-imagenet-200.zip"]


def test_a_root_that_is_no_folder(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="could not write to"):
        download("seq-cifar10", tmp_path / "file")


def test_unknown_names_get_a_hint():
    with pytest.raises(InputError, match="Did you mean 'seq-cifar10'"):
        check("seq-cifar", Path())


# ---------------------------------------------------------------------------------- presence


def test_check_looks_at_sizes_and_thoroughly_at_bytes(tmp_path):
    assert check("seq-cifar10", tmp_path) == module.Presence(False, None, None)
    folder = empty_cifar10(tmp_path)
    assert check("seq-cifar10", tmp_path) == module.Presence(True, folder, None)
    assert check("seq-cifar10", folder).present

    thorough = check("seq-cifar10", tmp_path, thorough=True)
    assert not thorough.present
    assert thorough.where == folder
    assert "data_batch_1.bin is not the published file" in thorough.problem

    (folder / "data_batch_2.bin").unlink()
    assert "data_batch_2.bin is missing" in check("seq-cifar10", tmp_path).problem


def test_check_of_the_python_layout_looks_for_its_files(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "train").touch()
    assert "test is missing" in check("seq-cifar100", tmp_path).problem
    (folder / "test").touch()
    assert check("seq-cifar100", tmp_path, thorough=True).present


def test_check_of_tiny_imagenet_counts_when_thorough(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    (folder / "val").mkdir(parents=True)
    assert "wnids.txt is missing" in check("seq-tinyimagenet", tmp_path).problem
    (folder / "wnids.txt").write_text("\n".join(f"n{i:03}" for i in range(200)))
    (folder / "val" / "val_annotations.txt").write_text("")
    assert check("seq-tinyimagenet", tmp_path).present
    problem = check("seq-tinyimagenet", tmp_path, thorough=True).problem
    assert problem.endswith("contains 0 training images, but should contain 100000")


def test_default_root_is_the_environment_variable_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CCLIS_DATA", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("CCLIS_DATA")
    assert default_root().name == "cclis"


def test_archives_are_complete():
    assert set(ARCHIVES) == {"seq-cifar10", "seq-cifar100", "seq-tinyimagenet"}
    for archive in ARCHIVES.values():
        assert archive.url.endswith(archive.filename)
        assert re.fullmatch("md5:[0-9a-f]{32}", archive.known_hash)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_that_would_grow_beyond_measure_is_refused(server, tmp_path, monkeypatch, kind):
    zeros = bytes(20_000_000)
    if kind == "tar":
        publish(monkeypatch, server, tar_of((f"{FOLDER}/bomb.bin", zeros)))
    else:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{FOLDER}/bomb.bin", zeros)
        publish(monkeypatch, server, buffer.getvalue())
    with pytest.raises(InputError, match=r"to 20,000,000 bytes: refused"):
        download("seq-cifar10", tmp_path)
    assert names_in(tmp_path) == [FILENAME]


def test_two_that_download_at_once_fetch_once(server, tmp_path, monkeypatch):
    name = "seq-tinyimagenet"
    members = [
        (f"tiny-imagenet-200/{file}", b"n01", stat.S_IFREG)
        for file in ("wnids.txt", "val/val_annotations.txt")
    ]
    publish(monkeypatch, server, zip_of(*members), name)
    code = f"""
from pathlib import Path
from cclis.data import download as module
from cclis.progress import Progress
module.ARCHIVES[{name!r}] = module.{ARCHIVES[name]!r}
module.download({name!r}, Path({str(tmp_path)!r}), Progress())
"""
    server.delay = 3.0
    both = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(server.ranges) == 1
    assert sum("waiting for it" in text for text in said) == 1
    assert names_in(tmp_path) == ["tiny-imagenet-200", "tiny-imagenet-200.zip"]
