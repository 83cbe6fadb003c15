"""Run directories on shared storage: what is uploaded is whole, and is what a run goes on from."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from maze.api.run_context import RunContext
from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils.files import TEMPORARY_PREFIX
from maze.core.utils.storage import Store, Uploads, is_url, local_copy, upload_changes, uploaded, working_directory
from maze.maze_cli import main

TINY = [
    "-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", "algorithm.n_rollout_steps=5",
    "algorithm.epoch_length=1", "algorithm.rollout_evaluator=null", "runner.concurrency=2", "verbose=0",
]  # fmt: skip


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def stored(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/there", "run_dir")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here" / "sub").mkdir(parents=True)
    (tmp_path / "here" / "latest.pt").write_bytes(b"weights")
    (tmp_path / "here" / "sub" / "config.yaml").write_bytes(b"a: 1")
    return tmp_path / "here"


def test_urls_are_told_from_directories() -> None:
    assert all(is_url(place) for place in ("s3://bucket/run", "gs://bucket", "file:///tmp/x"))
    assert not any(is_url(place) for place in ("outputs/x", "/tmp/x", "C:\\runs", "", None))


class CountingStore(Store):
    """Notes what is written, and fails for names that it is told."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "run_dir")
        self.written: list[str] = []
        self.refused: set[str] = set()

    def write(self, name: str, content: bytes) -> None:
        if name in self.refused:
            raise ConfigError(f"{name} is refused")
        super().write(name, content)
        self.written.append(name)


class TestUploads:
    def test_only_what_has_changed_is_uploaded_and_in_the_order_in_which_it_was_written(
        self, here: Path, tmp_path: Path
    ) -> None:
        store = CountingStore(f"file://{tmp_path}/there")
        os.utime(here / "latest.pt", ns=(10**18, 10**18))
        os.utime(here / "sub" / "config.yaml", ns=(10**17, 10**17))
        (here / f"{TEMPORARY_PREFIX}x").write_bytes(b"half")
        uploads = Uploads(here, store)
        uploads.upload()
        assert store.written == ["sub/config.yaml", "latest.pt"]
        uploads.upload()
        assert len(store.written) == 2
        (here / "latest.pt").write_bytes(b"more weights")
        uploads.upload()
        assert store.written[2:] == ["latest.pt"]
        assert files_below(tmp_path / "there") == {"latest.pt": b"more weights", "sub/config.yaml": b"a: 1"}

    def test_a_failure_is_logged_and_made_good_the_next_time(
        self, here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = CountingStore(f"file://{tmp_path}/there")
        store.refused = {"latest.pt"}
        with uploaded(Uploads(here, store)):
            upload_changes()
            assert "latest.pt is refused. It is tried again" in caplog.text
            store.refused = set()
        assert files_below(tmp_path / "there").keys() == {"latest.pt", "sub/config.yaml"}

    def test_a_run_whose_end_cannot_be_uploaded_names_where_it_is_whole(self, here: Path, tmp_path: Path) -> None:
        store = CountingStore(f"file://{tmp_path}/there")
        store.refused = {"latest.pt"}
        with pytest.raises(CheckpointError, match=rf"The run is complete in {here}"), uploaded(Uploads(here, store)):
            pass

    def test_what_failed_before_its_first_checkpoint_is_not_uploaded(self, here: Path, stored: Store) -> None:
        with pytest.raises(KeyError), uploaded(Uploads(here, stored)):
            raise KeyError
        assert stored.names() == {}

    def test_what_failed_after_it_is_uploaded(self, here: Path, stored: Store) -> None:
        def train() -> None:
            upload_changes()
            (here / "latest.pt").write_bytes(b"interrupted")
            raise KeyError

        with pytest.raises(KeyError), uploaded(Uploads(here, stored)):
            train()
        assert stored.read("latest.pt") == b"interrupted"

    def test_without_shared_storage_nothing_happens(self) -> None:
        with uploaded(None):
            upload_changes()


class TestFetching:
    def test_a_copy_holds_what_a_run_needs_and_nothing_that_is_gone(self, stored: Store, tmp_path: Path) -> None:
        for name in ("latest.pt", ".hydra/config.yaml", "trajectory_data/1.pkl", "events.out.tfevents.1"):
            stored.write(name, name.encode())
        stored.fetch(tmp_path / "copy")
        assert files_below(tmp_path / "copy").keys() == {"latest.pt", ".hydra/config.yaml"}
        (tmp_path / "there" / "latest.pt").unlink()
        stored.write("state_dict.pt", b"best")
        stored.fetch(tmp_path / "copy")
        assert files_below(tmp_path / "copy").keys() == {"state_dict.pt", ".hydra/config.yaml"}

    def test_urls_get_directories_of_their_own(self, tmp_path: Path) -> None:
        urls = ["s3://a/b", "s3://a-b", "gs://a/b", "s3://a/b?region=x"]
        assert len({working_directory(url, tmp_path) for url in urls}) == 4
        assert all(directory.parent == tmp_path for directory in map(working_directory, urls, [tmp_path] * 4))

    def test_a_local_directory_is_what_it_is(self, tmp_path: Path) -> None:
        assert local_copy("outputs/x", "input_dir") == "outputs/x"
        assert local_copy(f"file://{tmp_path}/a%20b", "input_dir") == f"{tmp_path}/a b"


class TestRunsWithFiles:
    """`file://`, which needs nothing but Maze."""

    def test_a_training_is_uploaded_and_goes_on_from_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        url = f"file://{tmp_path}/there"
        assert main([*TINY, "algorithm.n_epochs=1", f"hydra.run.dir={url}/first"]) == 0
        (local,) = (tmp_path / "outputs").iterdir()
        assert files_below(tmp_path / "there" / "first") == files_below(local)
        go_on = [f"input_dir={url}/first", "resume=true"]
        assert main([*TINY, "algorithm.n_epochs=2", *go_on, f"hydra.run.dir={url}/second"]) == 0
        assert '"epoch": 2' in (tmp_path / "there" / "second" / "run.json").read_text()
        assert "come to its end" in (tmp_path / "there" / "second" / "maze_cli.log").read_text()

    def test_a_place_that_holds_a_run_is_not_written_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Store(f"file://{tmp_path}/there", "x").write(".hydra/config.yaml", b"")
        assert main([*TINY, f"hydra.run.dir=file://{tmp_path}/there"]) == 1
        told = capfd.readouterr().err
        assert "hydra.run.dir: file://" in told
        assert "holds an earlier run already" in told
        assert not (tmp_path / "outputs").exists()

    def test_a_place_that_cannot_be_written_to_is_said_at_the_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("")
        assert main([*TINY, f"hydra.run.dir=file://{tmp_path}/file/run"]) == 1
        told = capfd.readouterr().err.strip()
        assert told.startswith(f"ConfigError: hydra.run.dir: file://{tmp_path}/file/run cannot be written to")
        assert len(told.splitlines()) == 1
        assert not (tmp_path / "outputs").exists()

    def test_a_sweep_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main([*TINY, "--multirun", "algorithm.lr=0.1,0.2", f"hydra.sweep.dir=file://{tmp_path}/s"]) == 1
        assert "only the directory of a single run can be a URL" in capfd.readouterr().err

    def test_run_context_takes_urls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        url = f"file://{tmp_path}/there"
        small = {"algorithm.epoch_length": 1, "algorithm.n_rollout_steps": 5, "algorithm.rollout_evaluator": None}
        arguments = {"env": "CartPole-v1", "algorithm": "a2c", "silent": True}
        with RunContext(**arguments, run_dir=url, overrides={**small, "runner.concurrency": 2}) as run:
            run.train(n_epochs=1)
        assert (tmp_path / "there" / "latest.pt").is_file()
        with RunContext.load(url, silent=True) as again:
            assert again.policy is not None


S3 = pytest.mark.long


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of an S3 server in this process; `{}` takes the path in it.

    Its packages ask for an older python-dateutil than constraints.txt has, and work with that one: `pip install
    --no-deps moto boto3 botocore jmespath s3transfer xmltodict responses py-partiql-parser flask flask-cors
    itsdangerous blinker`.
    """
    server = pytest.importorskip("moto.server")
    fs = pytest.importorskip("pyarrow.fs")
    from werkzeug.serving import make_server

    http = make_server("127.0.0.1", 0, server.DomainDispatcherApplication(server.create_backend_app), threaded=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # what it says would be the run's log
    threading.Thread(target=http.serve_forever, daemon=True).start()
    before = dict(os.environ)
    os.environ.update(AWS_ACCESS_KEY_ID="of-tests", AWS_SECRET_ACCESS_KEY="of-tests", AWS_EC2_METADATA_DISABLED="true")
    options = f"region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{http.server_port}"
    files, _ = fs.FileSystem.from_uri(f"s3://runs?{options}&allow_bucket_creation=true")
    files.create_dir("runs")
    yield f"s3://runs/{{}}?{options}"
    http.shutdown()
    os.environ.clear()
    os.environ.update(before)


@S3
class TestRunsInBuckets:
    def test_a_training_is_uploaded_and_goes_on_from_there(
        self, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        first, second = bucket.format("first"), bucket.format("second")
        assert main([*TINY, "algorithm.n_epochs=1", f"hydra.run.dir={first}"]) == 0
        (local,) = (tmp_path / "outputs").iterdir()
        there = Store(first, "run_dir")
        assert {name: there.read(name) for name in there.names()} == files_below(local)
        assert (
            main([*TINY, "algorithm.n_epochs=2", f"input_dir={first}", "resume=true", f"hydra.run.dir={second}"]) == 0
        )
        assert b'"epoch": 2' in Store(second, "run_dir").read("run.json")

    def test_a_bucket_that_is_not_there_is_said_at_the_start(
        self, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        nowhere = bucket.replace("s3://runs", "s3://nobodys-bucket").format("run")
        assert main([*TINY, f"hydra.run.dir={nowhere}"]) == 1
        told = capfd.readouterr().err.strip().splitlines()
        assert told[-1].startswith("ConfigError: hydra.run.dir: s3://nobodys-bucket/run")
        assert "cannot be written to" in told[-1]
        assert not (tmp_path / "outputs").exists()

    def test_objects_are_whole_or_not_there(self, bucket: str, tmp_path: Path) -> None:
        """What is uploaded while it is written anew is one of its two contents."""
        store, file = Store(bucket.format("whole"), "run_dir"), tmp_path / "large"
        contents = [bytes([number]) * 6_000_000 for number in range(2)]
        uploads, ended = Uploads(tmp_path, store), threading.Event()

        def rewrite() -> None:
            from maze.core.utils.files import atomic_write

            number = 0
            while not ended.is_set():
                number = 1 - number
                atomic_write(file, lambda target, number=number: target.write(contents[number]))

        file.write_bytes(contents[0])
        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            for _ in range(4):
                uploads.upload()
                assert store.read("large") in contents
        finally:
            ended.set()
            writer.join()
