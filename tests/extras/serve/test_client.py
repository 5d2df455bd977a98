"""The client of `rft serve`, against answers that a service or what stands before it may give."""

from __future__ import annotations

import httpx
import pytest

from rft.extras.serve.client import Client, ClientSession, ServeError


def client(*answers: httpx.Response, patience_s: float = 60.0) -> Client:
    left = iter(answers)
    made = Client("http://127.0.0.1:1", "key", patience_s=patience_s)
    made._http = httpx.Client(transport=httpx.MockTransport(lambda request: next(left)))
    return made


@pytest.mark.parametrize("after", ["Wed, 21 Oct 2015 07:28:00 GMT", "-5", "soon"])
def test_a_proxy_may_say_in_any_way_when_to_come_again(
    after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rft.extras.serve.client._PAUSE_S", 0.01)
    busy = httpx.Response(503, headers={"Retry-After": after})
    done = httpx.Response(200, json={"closed_groups": 3})
    with client(busy, done) as rft:
        assert rft.commit() == 3


def test_no_wait_goes_beyond_the_patience() -> None:
    busy = httpx.Response(
        503,
        headers={"Retry-After": "3600"},
        json={"error": {"code": "stopping", "message": "stopping"}},
    )
    with client(busy, busy, patience_s=0.05) as rft, pytest.raises(ServeError, match="stopping"):
        rft.commit()


def test_a_reward_waits_for_the_answers_under_way() -> None:
    error = {"error": {"code": "calls_under_way", "message": "calls of this session are under way"}}
    busy = httpx.Response(409, headers={"Retry-After": "0"}, json=error)
    with client(busy, httpx.Response(200, json={"status": "ok"})) as rft:
        assert rft.reward(ClientSession("s1", "http://127.0.0.1:1/run/s1/v1", "key"), 1.0) == "ok"
    over = httpx.Response(409, json={"error": {"code": "session_over", "message": "over"}})
    with client(over) as rft, pytest.raises(ServeError, match="session_over"):
        rft.commit()


def test_an_address_that_is_none_is_told_at_once() -> None:
    """It was asked again for a minute, and did not answer."""
    with (
        Client("localhost:8010", "key") as rft,
        pytest.raises(httpx.UnsupportedProtocol, match="unsupported protocol"),
    ):
        rft.commit()
