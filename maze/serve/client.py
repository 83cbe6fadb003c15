"""Asks a server of policies for decisions (`maze-serve`); needs httpx only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from maze.core.errors import MazeError


class ServerError(MazeError):
    """The server refused a request, or cannot be reached.

    :param message: What it said.
    :param status: HTTP status; 0 where no answer came.
    :param code: The server's word for it, such as `unknown_session`.
    """

    def __init__(self, message: str, status: int = 0, code: str = "unreachable") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Answer(NamedTuple):
    """A decision.

    :param action: In the terms of the environment.
    :param policy: Name of the policy that decided, or `fallback`.
    :param bundle: SHA-256 sum of its bundle.
    :param decision: Number under which the decision log has it.
    :param ranked: The most probable actions with their probabilities, best first, if they were asked for.
    :param state: What the next request has to bring along, of recurrent policies outside of sessions.
    """

    action: Any
    policy: str
    bundle: str
    decision: str
    ranked: list[dict[str, Any]]
    state: dict[str, Any] | None = None


class PolicyClient:
    """A connection to a server of policies.

    >>> with PolicyClient("http://127.0.0.1:8000") as client:  # doctest: +SKIP
    ...     print(client.act([0.0, 0.0, 0.1, 0.0]).action)
    ...     with client.session(seed=1) as session:
    ...         action = session.act(observation).action

    Requests that got no answer are sent again; a session's decisions are numbered, so that the server gives the same
    answer again instead of deciding twice.

    :param url: Where the server is.
    :param token: Sent with each request, if the server asks for one.
    :param timeout: Seconds to wait for an answer.
    :param n_retries: How often a request is sent again when the connection breaks.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 10.0, n_retries: int = 2) -> None:
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
        # trust_env: no proxy of the environment stands between a service and its policy
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self._n_retries = n_retries

    def act(self, observation: Any, *, step_key: str | int | None = None, **options: Any) -> Answer:
        """Asks for one decision, by itself.

        :param observation: As the environment gives it; arrays are welcome.
        :param step_key: The sub-step, where there are several.
        :param options: `agent_id`, `deterministic` (true by default), `seed`, `ranked`, `policy`; of recurrent policies
            `state`, that of the answer before, and `episode_start`, true where an episode begins.
        :raises ServerError: The server says no.
        """
        return _answer(self.post(_path("/act", step_key), {"observation": observation, **options}))

    def act_many(
        self, observations: Sequence[Any], *, step_key: str | int | None = None, **options: Any
    ) -> list[Answer]:
        """Asks for decisions that have nothing to do with each other, in one request.

        :param observations: One for each decision.
        :param step_key: The sub-step, where there are several.
        :param options: As in :meth:`act`; `states` and `episode_starts` are lists with one entry for each observation.
        """
        reply = self.post(_path("/act", step_key), {"observations": list(observations), **options})
        return [_answer({**reply, **each}) for each in reply["decisions"]]

    def session(self, seed: int | None = None, policy: str | None = None) -> ClientSession:
        """Begins an episode: the server remembers what the policy needs of earlier observations.

        :param seed: Makes sampled actions reproducible.
        :param policy: Asks for a certain policy.
        """
        asked = {"seed": seed, "policy": policy}
        reply = self.post("/sessions", {key: value for key, value in asked.items() if value is not None})
        return ClientSession(self, reply)

    def policies(self) -> list[dict[str, Any]]:
        """The policies that the server has, with their spaces and results."""
        found: list[dict[str, Any]] = self.request("GET", "/policies")["policies"]
        return found

    def swap(self, name: str, bundle: str | Path, *, end_sessions: bool = False) -> dict[str, Any]:
        """Puts another bundle into the place of a policy, or adds a policy; needs the administrator's token.

        :param name: Of the policy.
        :param bundle: The file.
        :param end_sessions: End the sessions of the bundle before; otherwise they go on with it until they end.
        """
        path = f"/policies/{name}" + ("?end_sessions=true" if end_sessions else "")
        headers = {"content-type": "application/octet-stream"}
        return self.request("PUT", path, Path(bundle).read_bytes(), headers)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts JSON, gets JSON.

        :param path: Of the endpoint.
        :param body: Arrays may be in it.
        """
        return self.request("POST", path, json.dumps(body, default=_as_json, allow_nan=False).encode())

    def request(
        self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Sends a request, again if the connection breaks.

        :param method: Of HTTP.
        :param path: Of the endpoint.
        :param content: The body.
        :param headers: Beside those of the client.
        :raises ServerError: The server says no, or nothing.
        """
        response = self._response(method, path, content, headers, self._n_retries)
        if response.is_success:
            found: dict[str, Any] = response.json() if response.content else {}
            return found
        try:
            said = response.json()["error"]
            raise ServerError(said["message"], response.status_code, said["code"])
        except (ValueError, KeyError, TypeError):
            raise ServerError(response.text[:500], response.status_code, "unknown") from None

    def _response(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str] | None, n_retries: int
    ) -> httpx.Response:
        try:
            return self._http.request(method, path, content=content, headers=headers)
        except httpx.TransportError as error:
            if not n_retries:
                raise ServerError(
                    f"{method} {self._http.base_url}{path} got no answer ({type(error).__name__}: {error}). "
                    "Is the server running there?"
                ) from error
            return self._response(method, path, content, headers, n_retries - 1)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ClientSession:
    """An episode that a server decides.

    :param client: The connection.
    :param reply: What the server said when the session began.
    """

    def __init__(self, client: PolicyClient, reply: Mapping[str, Any]) -> None:
        self.id: str = reply["session"]
        self.policy: str = reply["policy"]
        self.bundle: str = reply["bundle"]
        self._client = client
        self._n_steps = 0

    def act(self, observation: Any, *, step_key: str | int | None = None, **options: Any) -> Answer:
        """Asks for the next decision.

        :param observation: As the environment gives it.
        :param step_key: The sub-step, where there are several.
        :param options: `agent_id`, `deterministic`, `ranked`.
        """
        body = {"observation": observation, "step": self._n_steps, **options}
        try:
            answer = _answer(self._client.post(_path(f"/sessions/{self.id}/act", step_key), body))
        except ServerError as error:
            self._n_steps += error.code == "out_of_distribution"  # the episode goes on with what the caller decides
            raise
        self._n_steps += 1
        return answer

    def reset(self, seed: int | None = None) -> None:
        """Begins another episode.

        :param seed: Makes sampled actions reproducible.
        """
        self._client.post(f"/sessions/{self.id}/reset", {} if seed is None else {"seed": seed})
        self._n_steps = 0

    def close(self) -> None:
        """Ends the session; one that has expired has ended already."""
        try:
            self._client.request("DELETE", f"/sessions/{self.id}")
        except ServerError as error:
            if error.code != "unknown_session":
                raise

    def __enter__(self) -> ClientSession:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _path(path: str, step_key: str | int | None) -> str:
    return path if step_key is None else f"{path}/{step_key}"


def _answer(reply: Mapping[str, Any]) -> Answer:
    found = (reply["action"], reply["policy"], reply["bundle"], reply["decision"])
    return Answer(*found, ranked=reply.get("ranked", []), state=reply.get("state"))


def _as_json(value: Any) -> Any:
    """Arrays and their scalars as plain numbers, without importing NumPy."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON.")
