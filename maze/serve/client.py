"""Client of `maze-serve`; needs httpx only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from maze.core.errors import MazeError


class ServerError(MazeError):
    """The server refused a request, or cannot be reached.

    :param message: Message of the server.
    :param status: HTTP status; 0: no response.
    :param code: Error code of the server, such as `unknown_session`.
    """

    def __init__(self, message: str, status: int = 0, code: str = "unreachable") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Answer(NamedTuple):
    """A decision.

    :param action: As the environment takes it.
    :param policy: Name of the deciding policy, or `fallback`.
    :param bundle: SHA-256 sum of its bundle.
    :param decision: Identifier in the decision log.
    :param ranked: The most probable actions with their probabilities, best first, if requested.
    :param state: Hidden state for the next request, of recurrent policies without a session.
    """

    action: Any
    policy: str
    bundle: str
    decision: str
    ranked: list[dict[str, Any]]
    state: dict[str, Any] | None = None


class PolicyClient(AbstractContextManager["PolicyClient"]):
    """Connection to a decision server.

    >>> with PolicyClient("http://127.0.0.1:8000") as client:  # doctest: +SKIP
    ...     print(client.act([0.0, 0.0, 0.1, 0.0]).action)
    ...     with client.session(seed=1) as session:
    ...         action = session.act(observation).action

    Requests without a response are repeated. Decisions of a session are numbered, so that the server returns the same
    decision instead of taking another one.

    :param url: Address of the server.
    :param token: Token that is sent with each request.
    :param timeout: Seconds to wait for a response.
    :param n_retries: Number of repetitions when the connection breaks.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 10.0, n_retries: int = 2) -> None:
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
        # trust_env: proxies of the environment are ignored
        # without TLS, certificates, which take 40 ms to load, are not needed
        is_plain = httpx.URL(url).scheme == "http"
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False, verify=not is_plain)
        self._n_retries = n_retries

    def act(self, observation: Any, *, step_key: str | int | None = None, **options: Any) -> Answer:
        """Request one decision without a session.

        :param observation: As the environment returns it; may contain arrays.
        :param step_key: The sub-step, where there are several.
        :param options: `agent_id`, `deterministic` (true by default), `seed`, `ranked`, `policy`; of recurrent policies
            `state` of the previous answer, and `episode_start`, true where an episode begins.
        :raises ServerError: The server refuses the request.
        """
        return _answer(self.post(_path("/act", step_key), {"observation": observation, **options}))

    def act_many(
        self, observations: Sequence[Any], *, step_key: str | int | None = None, **options: Any
    ) -> list[Answer]:
        """Request decisions on unrelated observations, in one request.

        :param observations: One for each decision.
        :param step_key: The sub-step, where there are several.
        :param options: As in :meth:`act`; `states` and `episode_starts` are lists with one entry for each observation.
        """
        reply = self.post(_path("/act", step_key), {"observations": list(observations), **options})
        return [_answer({**reply, **each}) for each in reply["decisions"]]

    def report(self, decision: str, reward: float, **outcome: Any) -> None:
        """Report the outcome of a decision, also long after it; a repeated report changes nothing.

        :param decision: Identifier of the decision, from its answer.
        :param reward: Reward between this decision and the next one.
        :param outcome: `done` and `truncated` at the end of an episode; `kpis` (numbers by name), `events` (a list).
        :raises ServerError: The server keeps no decision log, or refuses a value.
        """
        self.post(f"/decisions/{decision}/outcome", {"reward": reward, **outcome})

    def session(self, seed: int | None = None, policy: str | None = None) -> ClientSession:
        """Begin an episode: the server keeps stacked observations and hidden states.

        :param seed: Seed of sampled actions.
        :param policy: Name of the policy; None: by the weights.
        """
        options = {"seed": seed, "policy": policy}
        reply = self.post("/sessions", {key: value for key, value in options.items() if value is not None})
        return ClientSession(self, reply)

    def policies(self) -> list[dict[str, Any]]:
        """List the policies of the server, with their spaces and results."""
        found: list[dict[str, Any]] = self.request("GET", "/policies")["policies"]
        return found

    def swap(self, name: str, bundle: str | Path, *, end_sessions: bool = False) -> dict[str, Any]:
        """Swap the bundle of a policy, or add a policy; needs the administrator's token.

        :param name: Name of the policy.
        :param bundle: The file.
        :param end_sessions: End the sessions of the previous bundle; otherwise they keep it until they end.
        """
        path = f"/policies/{quote(name, safe='')}" + ("?end_sessions=true" if end_sessions else "")
        headers = {"content-type": "application/octet-stream"}
        return self.request("PUT", path, Path(bundle).read_bytes(), headers)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post JSON, and return the JSON of the response.

        :param path: Path of the endpoint.
        :param body: Fields; may contain arrays.
        """
        return self.request("POST", path, json.dumps(body, default=methodcaller("tolist"), allow_nan=False).encode())

    def request(
        self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Send a request; repeat it if the connection breaks.

        :param method: Method of HTTP.
        :param path: Path of the endpoint.
        :param content: The body.
        :param headers: Headers in addition to those of the client.
        :raises ServerError: The server refuses the request, does not respond, or its response is not JSON.
        """
        response = self._response(method, path, content, headers, self._n_retries)
        try:
            if response.is_success:
                found: dict[str, Any] = response.json() if response.content else {}
                return found
            error = response.json()["error"]
            raise ServerError(error["message"], response.status_code, error["code"])
        except (ValueError, KeyError, TypeError):
            raise ServerError(response.text[:500], response.status_code, "unknown") from None

    def _response(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str] | None, n_retries: int
    ) -> httpx.Response:
        try:
            return self._http.request(method, path, content=content, headers=headers)
        except httpx.TransportError as error:
            if n_retries:
                return self._response(method, path, content, headers, n_retries - 1)
            place = f"{method} {self._http.base_url}{path}"
            raise ServerError(f"{place} got no response ({error!r}). Is the server running?") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __exit__(self, *error: object) -> None:
        self.close()


class ClientSession(AbstractContextManager["ClientSession"]):
    """Session on a server.

    :param client: The connection.
    :param reply: The response that began the session.
    """

    def __init__(self, client: PolicyClient, reply: Mapping[str, Any]) -> None:
        self.id: str = reply["session"]
        self.policy: str = reply["policy"]
        self.bundle: str = reply["bundle"]
        self._client = client
        self._n_steps = 0

    def act(self, observation: Any, *, step_key: str | int | None = None, **options: Any) -> Answer:
        """Request the next decision.

        :param observation: As the environment returns it.
        :param step_key: The sub-step, where there are several.
        :param options: `agent_id`, `deterministic`, `ranked`.
        """
        body = {"observation": observation, "step": self._n_steps, **options}
        try:
            answer = _answer(self._client.post(_path(f"/sessions/{self.id}/act", step_key), body))
        except ServerError as error:
            self._n_steps += error.code == "out_of_distribution"  # the episode continues with the caller's own decision
            raise
        self._n_steps += 1
        return answer

    def reset(self, seed: int | None = None) -> None:
        """Begin another episode.

        :param seed: Seed of sampled actions.
        """
        self._client.post(f"/sessions/{self.id}/reset", {} if seed is None else {"seed": seed})
        self._n_steps = 0

    def close(self) -> None:
        """End the session, unless it has expired."""
        try:
            self._client.request("DELETE", f"/sessions/{self.id}")
        except ServerError as error:
            if error.code != "unknown_session":
                raise

    def __exit__(self, *error: object) -> None:
        with suppress(ServerError) if error[0] else nullcontext():  # it would hide the error that ended the block
            self.close()


def _path(path: str, step_key: str | int | None) -> str:
    return path if step_key is None else f"{path}/{quote(str(step_key), safe='')}"


def _answer(reply: Mapping[str, Any]) -> Answer:
    found = (reply["action"], reply["policy"], reply["bundle"], reply["decision"])
    return Answer(*found, ranked=reply.get("ranked", []), state=reply.get("state"))
