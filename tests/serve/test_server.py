"""The decision server over HTTP: decisions, sessions, swaps, tokens, limits, errors, metrics."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import numpy as np
import pytest

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.serve.app import Limits, Tokens
from maze.serve.bundle import PolicyBundle
from maze.serve.client import PolicyClient, ServerError
from maze.serve.export import export_policy
from maze.serve.served import Settings
from tests.serve.serving import (
    Always,
    always,
    cartpole,
    cartpole_observations,
    cutting,
    cutting_env,
    metrics_of,
    pendulum,
    repeating,
    served,
    stacked,
)

OBSERVATION = [0.01, -0.02, 0.03, 0.04]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of one policy without memory."""
    with served({"cartpole": cartpole()}) as (address, _):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[PolicyClient]:
    with PolicyClient(url) as connection:
        yield connection


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ({"observation": OBSERVATION}, {"observations": [OBSERVATION]}),
        ({"state": {"bundle": "0", "values": {}}}, {"observations": [OBSERVATION]}),
        ({"episode_start": True}, {"observations": [OBSERVATION]}),
        ({"episode": "monday"}, {"observations": [OBSERVATION]}),
        ({"step": 0}, {"observations": [OBSERVATION]}),
        ({"observation": OBSERVATION}, {"episode_starts": [True]}),
    ],
)
def test_fields_of_one_observation_and_of_several_are_refused(
    url: str, one: dict[str, Any], many: dict[str, Any]
) -> None:
    reply = httpx.post(f"{url}/act", json=one | many)
    assert reply.status_code == 422
    assert f"`{next(iter(one))}` and `{next(iter(many))}` exclude each other" in reply.json()["error"]["message"]


def test_an_unreachable_server_does_not_hide_the_error_that_ended_a_session() -> None:
    with served({"cartpole": cartpole()}) as (url, _):
        client = PolicyClient(url)
        ended, failed = client.session(), client.session()
    with client:
        with pytest.raises(ZeroDivisionError), failed:
            raise ZeroDivisionError
        with pytest.raises(ServerError, match="no response"), ended:
            pass


# -- what is decided --------------------------------------------------------------------------------------------------


def test_actions_equal_those_of_the_bundle(client: PolicyClient) -> None:
    observations = cartpole_observations(60)
    bundle = PolicyBundle(cartpole())
    expected = [bundle.session().act(np.array(each, np.float32)) for each in observations]
    assert [client.act(each).action for each in observations] == expected
    assert [answer.action for answer in client.act_many(observations)] == expected
    assert set(expected) == {0, 1}, "both actions have to occur"
    answer = client.act(np.array(observations[0], np.float32))
    assert (answer.policy, answer.bundle) == ("cartpole", bundle.sha256)


def test_sampled_decisions_are_those_of_a_session_with_the_same_seed(client: PolicyClient) -> None:
    observations = cartpole_observations(40)
    bundle = PolicyBundle(cartpole())
    for seed, observation in enumerate(observations):
        expected = bundle.session(seed).act(observation, deterministic=False)
        assert client.act(observation, deterministic=False, seed=seed).action == expected
    together = client.act_many(observations, deterministic=False, seed=0)
    one_by_one = [bundle.session(seed).act(each, deterministic=False) for seed, each in enumerate(observations)]
    assert [answer.action for answer in together] == one_by_one

    local = bundle.session(7)
    with client.session(seed=7) as session:
        for observation in observations:
            assert session.act(observation, deterministic=False).action == local.act(observation, deterministic=False)
        session.reset(seed=7)
        again = bundle.session(7)
        assert session.act(OBSERVATION, deterministic=False).action == again.act(OBSERVATION, deterministic=False)


def test_concurrent_requests_form_one_batch_and_each_gets_its_own_response(url: str) -> None:
    observations = cartpole_observations(16 * 8)
    expected = [PolicyBundle(cartpole()).session().act(each) for each in observations]

    def ask(part: int) -> list[Any]:
        with PolicyClient(url) as connection:
            return [connection.act(each).action for each in observations[part::16]]

    with ThreadPoolExecutor(16) as threads:
        for part, actions in enumerate(threads.map(ask, range(16))):
            assert actions == expected[part::16]
    metrics = metrics_of(httpx.get(f"{url}/metrics").text)
    alone = metrics['maze_batch_size_bucket{le="1.0",policy="cartpole"}']
    assert alone < metrics['maze_batch_size_count{policy="cartpole"}']


def test_ranked_actions_come_with_their_probabilities(client: PolicyClient) -> None:
    answer = client.act(OBSERVATION, ranked=5)
    probabilities = [each["probability"] for each in answer.ranked]
    assert answer.ranked[0]["action"] == answer.action
    assert sorted(each["action"] for each in answer.ranked) == [0, 1]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1.0)


def test_continuous_actions_are_decided_and_cannot_be_ranked() -> None:
    with served({"pendulum": pendulum()}) as (url, _), PolicyClient(url) as client:
        observation = [0.5, -0.8, 1.0]
        expected = PolicyBundle(pendulum()).session().act(observation)
        assert client.act(observation).action == pytest.approx(expected.tolist())
        with pytest.raises(ServerError, match="cannot be ranked") as refused:
            client.act(observation, ranked=2)
        assert refused.value.status == 422


def test_sub_steps_have_endpoints_and_masks() -> None:
    selection = cutting_env().reset()
    mask_name = "inventory_mask"
    mask = np.zeros_like(selection[mask_name])
    with served({"cutting": cutting()}) as (url, _), PolicyClient(url) as client:
        for allowed in (0, 1, 2):
            only = mask.copy()
            only[allowed] = 1
            answer = client.act({**selection, mask_name: only}, step_key=0, deterministic=False, ranked=3)
            assert answer.action["piece_idx"] == allowed
            assert answer.ranked[0]["probability"] == pytest.approx(1.0)
        with pytest.raises(ServerError, match="`piece_idx` has no valid action left") as refused:
            client.act({**selection, mask_name: mask}, step_key=0)
        assert refused.value.status == 422
        with pytest.raises(ServerError, match="has sub-steps; request act/<step key>, of \\['0', '1'\\]"):
            client.act({**selection, mask_name: mask})
        with pytest.raises(ServerError, match="no sub-step '7'"):
            client.act({**selection, mask_name: mask}, step_key=7)
        mask[1] = 1
        with client.session() as session:  # their order is fixed, and need not be said
            assert set(session.act({**selection, mask_name: mask}).action) == {"piece_idx"}
            with pytest.raises(ServerError, match="Sub-step 1: expected as observation a mapping"):
                session.act({"nonsense": 1}, agent_id=0)
            with pytest.raises(ServerError, match="Agent 1 is not the next one in a fixed order"):
                session.act({"nonsense": 1}, agent_id=1)
        paths = client.request("GET", "/openapi.json")["paths"]
        assert {"/act/0", "/act/1", "/sessions/{session}/act/0"} <= set(paths)


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_stacks_observations() -> None:
    observations = cartpole_observations(50, seed=3)
    local = PolicyBundle(stacked()).session()
    with served({"stacked": stacked()}) as (url, _), PolicyClient(url) as client:
        with pytest.raises(ServerError, match="begin a session") as refused:
            client.act(OBSERVATION)
        assert refused.value.code == "needs_session"
        with client.session() as session:
            for observation in observations:
                assert session.act(observation).action == local.act(observation)


def test_a_repeated_request_returns_the_same_decision(client: PolicyClient) -> None:
    identifier = client.session(seed=1).id

    def ask(step: int) -> dict[str, Any]:
        body = {"observation": OBSERVATION, "deterministic": False, "step": step}
        return client.post(f"/sessions/{identifier}/act", body)

    first = ask(0)
    assert ask(0) == first
    second = ask(1)
    assert second["decision"] != first["decision"]
    assert ask(1) == second
    for step in (0, 3):
        with pytest.raises(ServerError, match=f"next decision is number 2, not {step}") as refused:
            ask(step)
        assert refused.value.status == 409


def test_a_bad_observation_leaves_the_session_as_it_was() -> None:
    observations = cartpole_observations(6)
    local = PolicyBundle(stacked()).session()
    with served({"stacked": stacked()}) as (url, _), PolicyClient(url) as client, client.session() as session:
        for observation in observations:
            for bad in ([1.0], [[1.0] * 4], ["a"] * 4, None, [1e39] * 4):
                with pytest.raises(ServerError) as refused:
                    session.act(bad)
                assert refused.value.status == 422
            assert session.act(observation).action == local.act(observation)


def test_an_unknown_agent_leaves_the_session_as_it_was() -> None:
    env = GymMazeEnv("CartPole-v1")
    mapper = DistributionMapper(env.action_spaces_dict[0], {})
    own_networks = TorchPolicy({(0, 0): Always(1)}, mapper, "cpu", substeps_with_separate_agent_nets=[0])
    content = export_policy(own_networks, env, {"name": "p"}, n_steps=300)
    with served({"p": content}) as (url, _), PolicyClient(url) as client, client.session() as session:
        for agent_id in (7, -1):
            with pytest.raises(ServerError, match=f"agent {agent_id} is unknown"):
                session.act(OBSERVATION, agent_id=agent_id)
        assert session.act(OBSERVATION).action == 1


def test_sessions_end_expire_and_are_bounded() -> None:
    settings = Settings(max_sessions=3, session_seconds=0.3)
    with served({"cartpole": cartpole()}, settings=settings) as (url, application), PolicyClient(url) as client:
        sessions = [client.session() for _ in range(3)]
        with pytest.raises(ServerError, match="There are 3 sessions") as refused:
            client.session()
        assert refused.value.status == 503
        sessions[0].close()
        with pytest.raises(ServerError, match="no session"):
            sessions[0].act(OBSERVATION)
        deadline = time.monotonic() + 10.0
        while application.policies.n_sessions and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(ServerError, match=r"not used for 0\.3 s"):
            sessions[1].act(OBSERVATION)
        assert metrics_of(httpx.get(f"{url}/metrics").text)['maze_events_total{event="expired_session"}'] == 2
        sessions[2].close()  # has ended by itself, which is not an error


# -- several policies -------------------------------------------------------------------------------------------------


def test_a_canary_gets_its_share_and_sessions_stay_with_their_policy() -> None:
    bundles = {"champion": always(0), "canary": always(1)}
    with served(bundles, weights={"champion": 3, "canary": 1}) as (url, _), PolicyClient(url) as client:
        answers = [client.act(OBSERVATION) for _ in range(200)]
        assert all(answer.action == (answer.policy == "canary") for answer in answers)
        assert 25 <= sum(answer.action for answer in answers) <= 75  # 50 expected, 4 standard deviations
        assert client.act(OBSERVATION, policy="canary").action == 1
        for _ in range(8):
            with client.session() as session:
                assert {session.act(OBSERVATION).policy for _ in range(5)} == {session.policy}
        with pytest.raises(ServerError, match="Did you mean `canary`"):
            client.act(OBSERVATION, policy="canari")


def test_a_shadow_policy_acts_and_its_action_is_never_returned() -> None:
    bundles = {"champion": always(0), "shadow": always(1)}
    with served(bundles, shadows=("shadow",)) as (url, _), PolicyClient(url) as client:
        assert {client.act(OBSERVATION).action for _ in range(20)} == {0}
        with client.session(seed=1) as session:
            assert {session.act(OBSERVATION).action for _ in range(10)} == {0}
        metrics = metrics_of(httpx.get(f"{url}/metrics").text)
        assert metrics['maze_shadow_decisions_total{policy="shadow",result="different"}'] == 30
        assert metrics['maze_decisions_total{policy="champion"}'] == 30
        assert 'maze_decisions_total{policy="shadow"}' not in metrics


@pytest.mark.parametrize("shadow", [repeating, stacked])
def test_a_slow_shadow_does_not_disturb_sessions(shadow: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    decide = PolicyBundle.act_batch

    def slow(bundle: PolicyBundle, *arguments: Any, **more: Any) -> Any:
        time.sleep(0.1 * (bundle.card["name"] != "always 0"))
        return decide(bundle, *arguments, **more)

    with served({"champion": always(0), "shadow": shadow()}, shadows=("shadow",)) as (url, _):
        monkeypatch.setattr(PolicyBundle, "act_batch", slow)
        with PolicyClient(url) as client:
            for _ in range(2):  # networks that were slow before run in a thread
                with client.session() as session:
                    assert [session.act(OBSERVATION).action for _ in range(4)] == [0] * 4


def test_refused_observations_are_seen_by_shadows() -> None:
    observations = cartpole_observations(40)
    observations[10::5] = outside = [[4.0 * (-1) ** n, 3.0, 0.4, -3.0] for n in range(6)]
    settings = Settings(on_drift="refuse")
    bundles = {"champion": stacked(), "shadow": stacked()}
    with served(bundles, shadows=("shadow",), settings=settings) as (url, _), PolicyClient(url) as client:
        with client.session() as session:
            for observation in observations:
                if observation in outside:
                    with pytest.raises(ServerError, match="outside the range"):
                        session.act(observation)
                else:
                    session.act(observation)
        metrics = metrics_of(httpx.get(f"{url}/metrics").text)
    assert metrics['maze_shadow_decisions_total{policy="shadow",result="equal"}'] == 34


def test_a_repeated_request_gets_the_same_refusal() -> None:
    with served({"p": always(0)}, settings=Settings(on_drift="refuse")) as (url, _), PolicyClient(url) as client:
        path = f"/sessions/{client.session().id}/act"
        for _ in range(2):  # the first response was lost
            with pytest.raises(ServerError) as refused:
                client.post(path, {"observation": [99.0] * 4, "step": 0})
            assert refused.value.code == "out_of_distribution"
        assert client.post(path, {"observation": OBSERVATION, "step": 1})["action"] == 0


def test_a_shadow_that_fails_is_counted_and_clients_get_their_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = PolicyBundle.act_batch

    def failing(bundle: PolicyBundle, *arguments: Any, **more: Any) -> Any:
        if bundle.card["name"] == "always 1":
            raise RuntimeError("the network failed")
        return decide(bundle, *arguments, **more)

    with served({"champion": always(0), "shadow": always(1)}, shadows=("shadow",)) as (url, _):
        monkeypatch.setattr(PolicyBundle, "act_batch", failing)
        with PolicyClient(url) as client, client.session() as session:
            assert (client.act(OBSERVATION).action, session.act(OBSERVATION).action) == (0, 0)
        metrics = metrics_of(httpx.get(f"{url}/metrics").text)
    assert metrics['maze_shadow_decisions_total{policy="shadow",result="failed"}'] == 2


# -- swaps ------------------------------------------------------------------------------------------------------------

ADMIN = Tokens(admin=["boss"])


def test_a_swapped_bundle_decides_from_then_on_and_sessions_keep_their_bundle(tmp_path: Any) -> None:
    (tmp_path / "one.maze").write_bytes(always(1))
    with served({"p": always(0)}, tokens=ADMIN) as (url, _), PolicyClient(url, token="boss") as client:
        session, ended = client.session(), client.session()
        assert client.act(OBSERVATION).action == 0
        swapped = client.swap("p", tmp_path / "one.maze")
        assert swapped["bundle"] == PolicyBundle(always(1)).sha256
        assert swapped["weight"] == 1.0
        assert client.act(OBSERVATION).action == 1
        assert session.act(OBSERVATION).action == 0, "an episode is decided by one policy"
        (tmp_path / "one.maze").write_bytes(always(0))
        client.swap("p", tmp_path / "one.maze", end_sessions=True)
        assert session.act(OBSERVATION).action == 0, "it did not belong to the bundle that was swapped last"
        later = client.session()
        (tmp_path / "one.maze").write_bytes(always(1))
        client.swap("p", tmp_path / "one.maze", end_sessions=True)
        with pytest.raises(ServerError, match="no session"):
            later.act(OBSERVATION)
        ended.close()


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (lambda: b"", 422, "not a complete policy bundle"),
        (lambda: b"PK\x03\x04 and nothing else", 422, "not a complete policy bundle"),
        (lambda: always(1)[:5000] + b"\x00" + always(1)[5001:], 422, "damaged or was changed"),
        (pendulum, 409, "differ from those of policy 'p'"),
    ],
    ids=["empty", "cut", "changed", "other-spaces"],
)
def test_a_bundle_that_is_refused_changes_nothing(content: Any, status: int, says: str) -> None:
    with served({"p": always(0)}, tokens=ADMIN) as (url, _), PolicyClient(url, token="boss") as client:
        with pytest.raises(ServerError, match=says) as refused:
            client.request("PUT", "/policies/p", content())
        assert refused.value.status == status
        assert client.act(OBSERVATION).action == 0
        assert [policy["name"] for policy in client.policies()] == ["p"]


def test_shares_are_changed_while_requests_come() -> None:
    with served({"a": always(0)}, tokens=ADMIN) as (url, _), PolicyClient(url, token="boss") as client:
        client.request("PUT", "/policies/b", always(1))
        assert {client.act(OBSERVATION).action for _ in range(20)} == {0}, "a new policy gets nothing by itself"
        client.request("PATCH", "/policies/b", b'{"weight": 1}')
        client.request("PATCH", "/policies/a", b'{"weight": 0}')
        assert {client.act(OBSERVATION).action for _ in range(20)} == {1}
        client.request("DELETE", "/policies/b")
        with pytest.raises(ServerError, match="No policy has a weight"):
            client.act(OBSERVATION)
        for body in (b'{"weight": -1}', b'{"weight": "2"}', b'{"wait": 2}'):
            with pytest.raises(ServerError) as refused:
                client.request("PATCH", "/policies/a", body)
            assert refused.value.status == 422


# -- tokens and limits ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    """A server that wants tokens."""
    tokens = Tokens(["user", "second"], ["boss"])
    with served({"p": always(0)}, tokens=tokens) as (address, _), httpx.Client(base_url=address) as connection:
        yield connection


@pytest.mark.parametrize(
    ("header", "may_act", "may_change"),
    [
        (None, 401, 401),
        ("Bearer wrong", 401, 401),
        ("Bearer", 401, 401),
        ("Basic user", 401, 401),
        ("Bearer userx", 401, 401),
        ("Bearer user", 200, 403),
        ("bearer second", 200, 403),
        ("Bearer boss", 200, 200),
    ],
)
def test_requests_require_the_configured_token(
    header: str | None, may_act: int, may_change: int, guarded: httpx.Client
) -> None:
    headers = {} if header is None else {"authorization": header}
    response = guarded.post("/act", json={"observation": OBSERVATION}, headers=headers)
    assert response.status_code == may_act
    for path in ("policies", "metrics", "openapi.json"):
        assert guarded.get(f"/{path}", headers=headers).status_code == may_act
    changed = guarded.patch("/policies/p", json={"weight": 1}, headers=headers)
    assert changed.status_code == may_change
    if may_act == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert "token" in response.json()["error"]["message"]
    for path in ("health", "ready", ""):
        assert guarded.get(f"/{path}", headers=headers).status_code == 200


def test_nothing_is_changed_where_there_is_no_administrator(url: str) -> None:
    for method in ("PUT", "PATCH", "DELETE"):
        refused = httpx.request(method, f"{url}/policies/cartpole", json={}, headers={"authorization": "Bearer x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_administrator")


JSON = {"content-type": "application/json"}
NESTED = b'{"observation":' + b"[" * 5000 + b"]" * 5000 + b"}"
NESTED_LESS = b'{"observation":' + b"[" * 900 + b"]" * 900 + b"}"  # the parser of JSON lets it pass
BAD_REQUESTS: dict[str, tuple[str, str, bytes, dict[str, str], int, str]] = {
    "negative-step": ("POST", "/act", b'{"observation":[0,0,0,0],"step":-1}', JSON, 422, "invalid"),
    "no-json": ("POST", "/act", b"{", JSON, 400, "malformed_json"),
    "empty": ("POST", "/act", b"", JSON, 400, "malformed_json"),
    "no-object": ("POST", "/act", b"[1]", JSON, 400, "malformed_json"),
    "not-utf8": ("POST", "/act", b'{"observation":"\xff"}', JSON, 400, "malformed_json"),
    "nested": ("POST", "/act", NESTED, JSON, 400, "malformed_json"),
    "nested-less": ("POST", "/act", NESTED_LESS, JSON, 422, "EnvironmentContractError"),
    "nan": ("POST", "/act", b'{"observation":[NaN,0,0,0]}', JSON, 400, "malformed_json"),
    "infinity": ("POST", "/act", b'{"observation":[1e999,0,0,0]}', JSON, 400, "malformed_json"),
    "infinite-as-float32": ("POST", "/act", b'{"observation":[1e39,0,0,0]}', JSON, 422, "NonFiniteError"),
    "too-large": ("POST", "/act", b'{"observation":[' + b"0.0," * 1_000_000 + b"0]}", JSON, 413, "too_large"),
    "no-content-type": ("POST", "/act", b"{}", {}, 415, "no_json"),
    "form": ("POST", "/act", b"{}", {"content-type": "text/plain"}, 415, "no_json"),
    "too-short": ("POST", "/act", b'{"observation":[0,0,0]}', JSON, 422, "EnvironmentContractError"),
    "ragged": ("POST", "/act", b'{"observation":[0,[0],0,0]}', JSON, 422, "EnvironmentContractError"),
    "texts": ("POST", "/act", b'{"observation":["0","0","0","0"]}', JSON, 422, "EnvironmentContractError"),
    "null": ("POST", "/act", b'{"observation":null}', JSON, 422, "EnvironmentContractError"),
    "missing": ("POST", "/act", b"{}", JSON, 422, "invalid"),
    "none-of-many": ("POST", "/act", b'{"observations":[]}', JSON, 422, "invalid"),
    "many-and-no-list": ("POST", "/act", b'{"observations":{}}', JSON, 422, "invalid"),
    "too-many": ("POST", "/act", b'{"observations":[' + b"0," * 2000 + b"0]}", JSON, 422, "invalid"),
    "one-of-many": ("POST", "/act", b'{"observations":[[0,0,0,0],[0]]}', JSON, 422, "EnvironmentContractError"),
    "misspelt": ("POST", "/act", b'{"observation":[0,0,0,0],"rankd":2}', JSON, 422, "invalid"),
    "ranked-text": ("POST", "/act", b'{"observation":[0,0,0,0],"ranked":"2"}', JSON, 422, "invalid"),
    "ranked-true": ("POST", "/act", b'{"observation":[0,0,0,0],"ranked":true}', JSON, 422, "invalid"),
    "ranked-many": ("POST", "/act", b'{"observation":[0,0,0,0],"ranked":1000000}', JSON, 422, "invalid"),
    "seed": ("POST", "/act", b'{"observation":[0,0,0,0],"seed":-1,"deterministic":false}', JSON, 422, "invalid"),
    "seed-of-a-session": ("POST", "/sessions", b'{"seed":18446744073709551615}', JSON, 422, "invalid"),
    "agent": ("POST", "/act", b'{"observation":[0,0,0,0],"agent_id":"a"}', JSON, 422, "invalid"),
    "unknown-agent": ("POST", "/act", b'{"observation":[0,0,0,0],"agent_id":1}', JSON, 422, "unknown_agent"),
    "negative-agent": ("POST", "/act", b'{"observation":[0,0,0,0],"agent_id":-1}', JSON, 422, "unknown_agent"),
    "sub-step": ("POST", "/act/%2e%2e%2f", b'{"observation":[0,0,0,0]}', JSON, 404, "unknown_path"),
    "unknown-sub-step": ("POST", "/act/7", b'{"observation":[0,0,0,0]}', JSON, 404, "unknown_step"),
    "session": ("POST", "/sessions/none/act", b'{"observation":[0,0,0,0]}', JSON, 404, "unknown_session"),
    "method": ("GET", "/act", b"", {}, 405, "wrong_method"),
    "method-of-a-page": ("POST", "/metrics", b"", {}, 405, "wrong_method"),
    "path": ("GET", "/../../etc/passwd", b"", {}, 404, "unknown_path"),
    "policy": ("GET", "/policies/none", b"", {}, 404, "unknown_policy"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_get_one_clear_error(url: str, name: str) -> None:
    method, path, body, headers, status, code = BAD_REQUESTS[name]
    answer = httpx.request(method, url + path, content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert 10 < len(error["message"]) < 600
    assert "Traceback" not in error["message"]
    assert httpx.post(f"{url}/act", json={"observation": OBSERVATION}).status_code == 200


def test_a_body_without_announced_length_is_cut_off_at_the_limit(url: str) -> None:
    n_sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal n_sent
        yield b'{"observation":['
        for _ in range(400):
            n_sent += 1
            yield b"0," * 50_000

    with httpx.Client() as http:
        try:
            answer = http.post(f"{url}/act", content=chunks(), headers=JSON)
            assert answer.status_code == 413
        except httpx.WriteError:  # the connection was closed before everything was sent
            pass
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_request_that_takes_too_long_is_ended() -> None:
    limits = Limits(seconds=0.4)
    with served({"p": always(0)}, limits=limits) as (url, application):
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(
                b"POST /act HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\nContent-Type: application/json\r\n\r\n{"
            )
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 504")
        assert application.n_running == 0
        # a client that disconnects during a request gets no response, and leaves nothing behind
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"POST /act HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.05)
        assert httpx.post(f"{url}/act", json={"observation": OBSERVATION}).json()["action"] == 0
        deadline = time.monotonic() + 5
        while application.n_running and time.monotonic() < deadline:
            time.sleep(0.02)
        assert application.n_running == 0


ACT = b"POST /act HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize(
    ("begin", "again", "status"),
    [
        (b"", b"", b""),  # connects, and sends nothing
        (b"POST /act HTTP/1.1\r\nHost: a\r\n", b"X-Slow: 1\r\n", b"HTTP/1.1 408"),
        (b"POST /act HTTP/1.1\r\nX: ", b"y" * 20_000, b"HTTP/1.1 431"),
        (b"POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n", b"0", b"HTTP/1.1 404"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n", b"HTTP/1.1 200"),
    ],
    ids=["nothing", "head", "long-head", "unread-body", "blank-lines-after-a-response"],
)
def test_slow_clients_are_disconnected(begin: bytes, again: bytes, status: bytes) -> None:
    with served({"p": always(0)}, limits=Limits(seconds=0.4)) as (url, _):
        began, answer = time.monotonic(), b""
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=0.05) as connection:
            connection.sendall(begin)
            while time.monotonic() < began + 5.0:
                try:
                    connection.sendall(again)
                    received = connection.recv(4096)
                    answer += received
                    if not received:
                        break
                except TimeoutError:
                    continue
                except (BrokenPipeError, ConnectionResetError):
                    break
        assert time.monotonic() - began < 3.0
        assert answer.startswith(status)


def test_connections_that_are_kept_open_for_the_next_request_are_not_slow() -> None:
    body = json.dumps({"observation": OBSERVATION}).encode()
    request = ACT % (len(body), body)
    with (
        served({"p": always(0)}, limits=Limits(seconds=0.3)) as (url, _),
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5) as connection,
    ):
        for first in (len(request), 40):  # the second in two parts
            connection.sendall(request[:first])
            time.sleep(0.1)
            connection.sendall(request[first:])
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            time.sleep(0.6)


def test_more_than_can_be_decided_is_refused_at_once() -> None:
    with served({"p": always(0)}, limits=Limits(n_waiting=0)) as (url, _):
        answer = httpx.post(f"{url}/act", json={"observation": OBSERVATION})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_an_internal_error_is_logged_and_not_revealed_to_clients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("a secret of the house")

    monkeypatch.setattr(PolicyBundle, "act_batch", broken)
    monkeypatch.setattr("maze.serve.bundle.replay_reference", lambda *arguments: None)
    with served({"p": always(0)}) as (url, _):
        answer = httpx.post(f"{url}/act", json={"observation": OBSERVATION})
        metrics = metrics_of(httpx.get(f"{url}/metrics").text)
    assert answer.status_code == 500
    assert metrics['maze_requests_total{path="/act",status="500"}'] == 1
    assert "secret" not in answer.text
    assert "a secret of the house" in caplog.text


@pytest.mark.parametrize("name", ["50%25", "a b", "what?", "a#b"])
def test_policies_may_have_any_printable_name(name: str, tmp_path: Any) -> None:
    (tmp_path / "one.maze").write_bytes(always(1))
    with served({"p": always(0)}, tokens=ADMIN) as (url, _), PolicyClient(url, token="boss") as client:
        assert client.swap(name, tmp_path / "one.maze")["name"] == name
        assert client.act(OBSERVATION, policy=name).action == 1


# -- what can be seen -------------------------------------------------------------------------------------------------


def test_metrics_count_requests_and_decisions() -> None:
    with served({"p": always(0)}) as (url, _):
        for _ in range(3):
            httpx.post(f"{url}/act", json={"observation": OBSERVATION})
        httpx.post(f"{url}/act", json={})
        httpx.get(f"{url}/some/thing")
        metrics = metrics_of(httpx.get(f"{url}/metrics").text)
    assert metrics['maze_requests_total{path="/act",status="200"}'] == 3
    assert metrics['maze_requests_total{path="/act",status="422"}'] == 1
    assert metrics['maze_requests_total{path="/other",status="404"}'] == 1
    assert metrics['maze_request_seconds_bucket{le="+Inf"}'] == metrics["maze_request_seconds_count"] == 5
    assert metrics['maze_decisions_total{policy="p"}'] == 3


def test_the_openapi_description_agrees_with_the_responses(url: str) -> None:
    described = httpx.get(f"{url}/openapi.json").json()
    response = described["paths"]["/act"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert response["observation"] == {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
    answer = httpx.post(f"{url}/act", json={"observation": OBSERVATION, "ranked": 1}).json()
    schema = described["paths"]["/act"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) <= set(answer) <= set(schema["properties"])


def test_concurrent_requests_of_one_session_are_separate(client: PolicyClient, url: str) -> None:
    identifier = client.session().id
    answers: list[int] = []

    def ask() -> None:
        with httpx.Client() as http:
            for _ in range(40):
                body = {"observation": OBSERVATION}
                answers.append(http.post(f"{url}/sessions/{identifier}/act", json=body).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {200, 409}
    following = {"observation": OBSERVATION, "step": answers.count(200)}  # refused unless it is the next number
    assert httpx.post(f"{url}/sessions/{identifier}/act", json=following).status_code == 200


def test_a_page_in_place_of_an_answer_is_an_error_of_the_server() -> None:
    class Login(BaseHTTPRequestHandler):
        """A proxy that answers each request with its login page."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Log in</html>")

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Login) as proxy:
        threading.Thread(target=proxy.handle_request, daemon=True).start()
        with (
            PolicyClient(f"http://127.0.0.1:{proxy.server_port}") as client,
            pytest.raises(ServerError, match="Log in") as caught,
        ):
            client.act([0.0])
    assert (caught.value.status, caught.value.code) == (200, "unknown")
