"""Run directories on shared storage: what is uploaded is whole, and is what a run goes on from."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from maze.api.run_context import RunContext
from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils.files import (
    TEMPORARY_PREFIX,
    Store,
    Uploads,
    atomic_write,
    is_url,
    local_copy,
    upload_changes,
    uploaded,
    working_directory,
)
from maze.maze_cli import main
from tests.s3_server import S3Server

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


def test_urls_are_distinguished_from_directories() -> None:
    assert all(is_url(place) for place in ("s3://bucket/run", "gs://bucket", "file:///tmp/x"))
    assert not any(is_url(place) for place in ("outputs/x", "/tmp/x", "C:\\runs", "", None))


class CountingStore(Store):
    """Record writes, and fail for given names."""

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

    def test_a_failed_upload_is_logged_and_repeated_the_next_time(
        self, here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = CountingStore(f"file://{tmp_path}/there")
        store.refused = {"latest.pt"}
        with uploaded(Uploads(here, store)):
            upload_changes()
            assert "latest.pt is refused. The upload is retried" in caplog.text
            store.refused = set()
        assert files_below(tmp_path / "there").keys() == {"latest.pt", "sub/config.yaml"}

    def test_a_run_whose_last_upload_fails_names_the_complete_copy(self, here: Path, tmp_path: Path) -> None:
        store = CountingStore(f"file://{tmp_path}/there")
        store.refused = {"latest.pt"}
        with pytest.raises(CheckpointError, match=rf"The run is complete in {here}"), uploaded(Uploads(here, store)):
            pass

    def test_a_run_that_failed_before_its_first_checkpoint_is_not_uploaded(self, here: Path, stored: Store) -> None:
        with pytest.raises(KeyError), uploaded(Uploads(here, stored)):
            raise KeyError
        assert stored.names() == {}

    def test_a_checkpoint_is_uploaded_after_a_later_failure(self, here: Path, stored: Store) -> None:
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
    def test_a_local_copy_holds_the_files_a_rollout_needs_without_deleted_ones(
        self, stored: Store, tmp_path: Path
    ) -> None:
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

    def test_a_local_directory_is_used_without_a_copy(self, tmp_path: Path) -> None:
        assert local_copy("outputs/x", "input_dir") == "outputs/x"
        assert local_copy(f"file://{tmp_path}/a%20b", "input_dir") == f"{tmp_path}/a b"


class TestRunsWithFiles:
    """`file://`, which needs nothing but Maze."""

    def test_run_is_uploaded_and_resumed_from_the_url(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        url = f"file://{tmp_path}/there"
        assert main([*TINY, "algorithm.n_epochs=1", f"hydra.run.dir={url}/first"]) == 0
        (local,) = (tmp_path / "outputs").iterdir()
        assert files_below(tmp_path / "there" / "first") == files_below(local)
        go_on = [f"input_dir={url}/first", "resume=true"]
        assert main([*TINY, "algorithm.n_epochs=2", *go_on, f"hydra.run.dir={url}/second"]) == 0
        assert '"epoch": 2' in (tmp_path / "there" / "second" / "run.json").read_text()
        assert "The run has ended" in (tmp_path / "there" / "second" / "maze_cli.log").read_text()

    def test_a_place_that_holds_a_run_is_not_written_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Store(f"file://{tmp_path}/there", "x").write(".hydra/config.yaml", b"")
        assert main([*TINY, f"hydra.run.dir=file://{tmp_path}/there"]) == 1
        printed = capfd.readouterr().err
        assert "hydra.run.dir: file://" in printed
        assert "holds an earlier run" in printed
        assert not (tmp_path / "outputs").exists()

    def test_unwritable_url_is_reported_at_the_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("")
        assert main([*TINY, f"hydra.run.dir=file://{tmp_path}/file/run"]) == 1
        printed = capfd.readouterr().err.strip()
        assert printed.startswith(f"ConfigError: hydra.run.dir: file://{tmp_path}/file/run cannot be written to")
        assert len(printed.splitlines()) == 1
        assert not (tmp_path / "outputs").exists()

    def test_a_sweep_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main([*TINY, "--multirun", "algorithm.lr=0.1,0.2", f"hydra.sweep.dir=file://{tmp_path}/s"]) == 1
        assert "hydra.sweep.dir: expected a directory that all jobs of the sweep share" in capfd.readouterr().err

    def test_run_context_accepts_urls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        url = f"file://{tmp_path}/there"
        small = {"algorithm.epoch_length": 1, "algorithm.n_rollout_steps": 5, "algorithm.rollout_evaluator": None}
        arguments = {"env": "CartPole-v1", "algorithm": "a2c", "silent": True}
        with RunContext(**arguments, run_dir=url, overrides={**small, "runner.concurrency": 2}) as run:
            run.train(n_epochs=1)
        assert (tmp_path / "there" / "latest.pt").is_file()
        with RunContext.load(url, silent=True) as again:
            assert again.policy is not None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server in this process, which lists three keys at a time, with an empty bucket `runs`."""
    pytest.importorskip("pyarrow.fs")
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "EC2_METADATA_DISABLED"):
        monkeypatch.setenv(f"AWS_{name}", "true")
    with S3Server(page=3) as started:
        started.buckets["runs"] = {}
        yield started


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the bucket; `{}` takes the path in it. Commands run in a directory of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"s3://runs/{{}}?{server.options}"


def objects(server: S3Server, run: str) -> dict[str, bytes]:
    """What is in the bucket below a directory, without the markers that say that directories are there."""
    there = {key: stored.content for key, stored in server.buckets["runs"].items() if not key.endswith("/")}
    return {key.removeprefix(f"{run}/"): content for key, content in there.items() if key.startswith(f"{run}/")}


def is_writing(method: str, bucket: str, key: str) -> bool:
    return method in ("PUT", "POST")


class TestBuckets:
    def test_files_are_written_listed_over_several_pages_and_read(self, server: S3Server, bucket: str) -> None:
        store = Store(bucket.format("a/run"), "run_dir")
        names = [f"{directory}{name}.pt" for directory in ("", "x/", "x-/y/") for name in "pqr"]
        written = {**{name: name.encode() for name in names}, "empty": b""}
        for name, content in written.items():
            store.write(name, content)
        assert objects(server, "a/run") == written
        assert {name: store.read(name) for name in written} == written
        assert {name: size for name, (size, _) in store.names().items()} == {
            name: len(content) for name, content in written.items()
        }
        assert Store(bucket.format("a/r"), "run_dir").names() == {}

    def test_an_object_uploaded_during_a_write_has_one_of_its_two_contents(
        self, server: S3Server, bucket: str, tmp_path: Path
    ) -> None:
        """What is uploaded while it is written anew is one of its two contents."""
        store, file = Store(bucket.format("whole"), "run_dir"), tmp_path / "sub" / "large"
        contents = [bytes([number]) * 6_000_000 for number in range(2)]
        file.parent.mkdir()
        uploads, ended = Uploads(file.parent, store), threading.Event()

        def rewrite() -> None:
            number = 0
            while not ended.is_set():
                number = 1 - number
                atomic_write(file, lambda target, number=number: target.write(contents[number]))

        file.write_bytes(contents[0])
        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            for _ in range(3):
                uploads.upload()
                assert server.buckets["runs"]["whole/large"].content in contents
        finally:
            ended.set()
            writer.join()

    def test_an_upload_whose_connection_is_lost_once_is_repeated(self, server: S3Server, bucket: str) -> None:
        content = os.urandom(11_000_000)  # in two parts
        server.is_cut = lambda method, bucket, key: is_writing(method, bucket, key) and server.n_cut < 1
        Store(bucket.format("once"), "run_dir").write("latest.pt", content)
        assert server.n_cut == 1
        assert objects(server, "once") == {"latest.pt": content}

    def test_a_place_that_cannot_be_written_to_is_named_with_the_reason(self, server: S3Server, bucket: str) -> None:
        server.is_refused = is_writing
        store = Store(bucket.format("run"), "run_dir")
        with pytest.raises(ConfigError, match=r"run_dir: s3://runs/run.* cannot be written to: .*ACCESS_DENIED"):
            store.require_free()
        server.is_refused = lambda method, bucket, key: method == "GET"
        with pytest.raises(ConfigError, match=r"run_dir: s3://runs/run.* cannot be read: .*ACCESS_DENIED"):
            store.names()

    @pytest.mark.long
    def test_an_aborted_upload_keeps_the_previous_object_and_is_repeated(
        self, server: S3Server, bucket: str, here: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        uploads = Uploads(here, Store(bucket.format("run"), "run_dir"))
        uploads.upload()
        (here / "latest.pt").write_bytes(os.urandom(11_000_000))
        server.is_cut = lambda method, bucket, key: is_writing(method, bucket, key) and key.endswith("latest.pt")
        with uploaded(uploads):
            upload_changes()
            assert "cannot be written to" in caplog.text
            assert "The upload is retried" in caplog.text
            assert objects(server, "run")["latest.pt"] == b"weights"
            server.is_cut = lambda method, bucket, key: False
        assert objects(server, "run") == files_below(here)


class TestRunsInBuckets:
    @pytest.mark.slow
    def test_run_is_uploaded_resumed_from_the_url_and_rolled_out(
        self, server: S3Server, bucket: str, tmp_path: Path
    ) -> None:
        first, second = bucket.format("first"), bucket.format("second")
        assert main([*TINY, "algorithm.n_epochs=1", f"hydra.run.dir={first}"]) == 0
        (local,) = (tmp_path / "outputs").iterdir()
        assert objects(server, "first") == files_below(local)
        go_on = [f"input_dir={first}", "resume=true", f"hydra.run.dir={second}"]
        assert main([*TINY, "algorithm.n_epochs=2", *go_on]) == 0
        assert b'"epoch": 2' in objects(server, "second")["run.json"]
        few = ["runner.n_episodes=2", "runner.max_episode_steps=5", "verbose=0"]
        acting = ["env.name=CartPole-v1", "policy=torch_policy", f"input_dir={second}", *few]
        assert main([*acting, "runner=sequential", f"hydra.run.dir={bucket.format('rolled')}"]) == 0
        assert len([name for name in objects(server, "rolled") if name.startswith("trajectory_data/")]) == 2

    def test_missing_bucket_is_reported_at_the_start(
        self, bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        nowhere = bucket.replace("s3://runs", "s3://nobodys-bucket").format("run")
        assert main([*TINY, f"hydra.run.dir={nowhere}"]) == 1
        printed = capfd.readouterr().err.strip().splitlines()
        assert printed[-1].startswith("ConfigError: hydra.run.dir: s3://nobodys-bucket/run")
        assert "cannot be" in printed[-1]
        assert not (tmp_path / "outputs").exists()

    def test_bucket_refused_during_the_run_fails_it_and_names_the_complete_copy(
        self, server: S3Server, bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        server.is_refused = lambda method, bucket, key: is_writing(method, bucket, key) and key.endswith("latest.pt")
        assert main([*TINY, "algorithm.n_epochs=1", f"hydra.run.dir={bucket.format('run')}"]) == 1
        (local,) = (tmp_path / "outputs").iterdir()
        printed = capfd.readouterr().err
        assert "cannot be written to" in printed
        assert f"The run is complete in {local}" in printed
        assert (local / "latest.pt").is_file()
        assert "latest.pt" not in objects(server, "run")


def test_processes_that_fetch_the_same_run_do_not_interfere(stored: Store, tmp_path: Path) -> None:
    """Actors of a machine share a directory."""
    stored.write("latest.pt", b"weights" * 100_000)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / f"{TEMPORARY_PREFIX}x").write_bytes(b"half")  # another process is writing
    stored.fetch(copy)
    assert files_below(copy).keys() == {"latest.pt", f"{TEMPORARY_PREFIX}x"}
