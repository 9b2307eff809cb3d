"""Connections to servers that end, cut, mix up and delay their answers; real sockets, both event loops."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from turnwise.inference.connections import ConnectionFailed, Connections, Response

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Peer:
    """A server that plays one function per connection, and keeps what it was sent."""

    def __init__(self, play: Callable[[Peer, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.heads: list[bytes] = []
        self.connections = 0
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()
        self.url = ""
        self._play = play
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Peer:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            try:
                await self._play(self, reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                self.gone.set()
                writer.close()

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """Read one request; returns its body."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        self.asked.set()
        at = head.lower().find(b"content-length: ")
        return await reader.readexactly(int(head[at + 16 :].split(b"\r", 1)[0])) if at >= 0 else b""


def plays(*answers: bytes, close: bool = False):
    """Answer requests on one connection, one after the other; afterwards close it or wait for its end."""

    async def play(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await peer.request(reader)
            writer.write(answer)
        if not close:
            await reader.read()

    return play


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a test on a loop of either kind."""

    def go(main: Callable[[], Any]) -> Any:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(main(), 20))

    return go


def test_requests_share_a_connection_and_return_status_and_body(run):
    async def main():
        async with Peer(plays(OK, OK)) as peer:
            pool = Connections({"Authorization": "Bearer x"})
            assert await pool.ask("POST", peer.url + "/a?b=c", b"body", {"X-Session-ID": "sé"}) == (200, b"ok")
            assert await pool.ask("GET", peer.url) == (200, b"ok")
            await pool.close()
        host = peer.url.removeprefix("http://").encode()
        assert peer.connections == 1
        assert peer.heads[0] == (
            b"POST /a?b=c HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 4\r\nAuthorization: Bearer x"
            b"\r\nX-Session-ID: s\xc3\xa9\r\n\r\n"
        )
        assert peer.heads[1] == b"GET / HTTP/1.1\r\nHost: " + host + b"\r\nAuthorization: Bearer x\r\n\r\n"

    run(main)


def test_credentials_of_a_url_are_sent(run):
    async def main():
        async with Peer(plays(OK)) as peer:
            pool = Connections()
            await pool.ask("GET", peer.url.replace("//", "//ann:p%40ss@"))
            await pool.close()
        host = peer.url.removeprefix("http://").encode()
        assert peer.heads == [b"GET / HTTP/1.1\r\nHost: " + host + b"\r\nAuthorization: Basic YW5uOnBAc3M=\r\n\r\n"]

    run(main)


def test_requests_at_the_same_time_have_connections_of_their_own(run):
    async def main():
        async with Peer(plays(OK)) as peer:
            pool = Connections()
            answers = await asyncio.gather(*(pool.ask("GET", peer.url) for _ in range(5)))
            await pool.close()
            assert answers == [(200, b"ok")] * 5
            assert peer.connections == 5

    run(main)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
    ],
    ids=["chunked", "continue", "empty", "to-the-end"],
)
def test_every_way_to_frame_a_body(run, answer, body):
    async def main():
        async with Peer(plays(answer, close=True)) as peer:
            pool = Connections()
            assert (await pool.ask("POST", peer.url, b"x"))[1] == body
            await pool.close()

    run(main)


def test_a_connection_that_went_stale_is_replaced_without_a_failure(run):
    """The server closes an idle connection just as the next request is sent on it."""

    async def main():
        async def play(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await peer.request(reader)
            writer.write(OK)
            if peer.connections == 1:
                await peer.request(reader)  # the second one is read, and never answered

        async with Peer(play) as peer:
            pool = Connections()
            assert await pool.ask("POST", peer.url, b"1") == (200, b"ok")
            assert await pool.ask("POST", peer.url, b"2") == (200, b"ok")
            assert (peer.connections, len(peer.heads)) == (2, 3)
            await pool.close()

    run(main)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "HTTP/1.1"),
    ],
    ids=["nothing", "cut", "cut-chunk", "no-http"],
)
def test_an_answer_that_breaks_off_is_a_failure(run, answer, says):
    async def main():
        async with Peer(plays(answer, close=True)) as peer:
            pool = Connections()
            with pytest.raises(ConnectionFailed, match=says):
                await pool.ask("POST", peer.url, b"x")
            await pool.close()

    run(main)


def test_bytes_that_nobody_asked_for_are_no_answer_to_the_next_request(run):
    async def main():
        async with Peer(plays(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", OK)) as peer:
            pool = Connections()
            assert await pool.ask("GET", peer.url) == (200, b"ok")
            assert await pool.ask("GET", peer.url) == (200, b"ok")
            assert peer.connections == 2
            await pool.close()

    run(main)


def test_refused_connection_raises_connection_failed(run):
    async def main():
        async with Peer(plays()) as peer:
            url = peer.url
        with pytest.raises(ConnectionFailed, match=r"no connection to 127\.0\.0\.1"):
            await Connections().ask("GET", url)

    run(main)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:port", "x", "http://[::1", "http://a..b", f"http://{'a' * 64}.b"]
)
def test_invalid_urls_raise_connection_failed(run, url):
    async def main():
        with pytest.raises(ConnectionFailed, match=r"HTTP URL|port|no connection to"):
            await Connections().ask("GET", url)

    run(main)


def test_a_connection_of_a_loop_that_ended_is_not_waited_for(run):
    """Scripts call ``asyncio.run`` more than once: a connection of the first loop would never answer in the second."""
    pool = Connections()
    served = threading.Event()
    stop = threading.Event()

    def serve():
        async def main():
            nonlocal url
            async with Peer(plays(OK, OK)) as peer:
                url = peer.url
                served.set()
                await asyncio.to_thread(stop.wait)

        asyncio.run(main())

    url = ""
    server = threading.Thread(target=serve)
    server.start()
    try:
        served.wait()
        for _ in range(3):
            assert run(lambda: pool.ask("GET", url)) == (200, b"ok")
        run(pool.close)
    finally:
        stop.set()
        server.join()


def test_connections_that_are_needed_no_more_are_closed(run):
    """A burst leaves many; whoever asks now and then uses the same one of them again and again."""

    async def main():
        async with Peer(plays(OK, OK, OK, OK)) as peer:
            pool = Connections()
            await asyncio.gather(*(pool.ask("GET", peer.url) for _ in range(3)))
            (waiting,) = pool._idle.values()
            for connection in list(waiting)[:2]:
                connection.since -= 3600
            for _ in range(3):
                await pool.ask("GET", peer.url)
            assert len(waiting) == 1
            assert peer.connections == 3
            await pool.close()

    run(main)


def test_a_server_that_vanished_is_noticed_within_minutes(run):
    async def main():
        async with Peer(plays(OK)) as peer:
            pool = Connections()
            async with pool.open("GET", peer.url) as answer:
                plain = answer.transport.get_extra_info("socket")
                seconds = [
                    plain.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                ]
                assert plain.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert seconds[0] + seconds[1] * seconds[2] <= 180
            await pool.close()

    run(main)


def test_no_header_can_be_smuggled_in(run):
    async def main():
        async with Peer(plays(OK)) as peer:
            with pytest.raises(ValueError, match="X-Session-ID"):
                await Connections().ask("GET", peer.url, b"", {"X-Session-ID": "a\r\nX-Admin: 1"})

    run(main)


def test_cancelled_request_closes_its_connection(run):
    async def main():
        async with Peer(plays(b"")) as peer:
            pool = Connections()
            request = asyncio.ensure_future(pool.ask("POST", peer.url, b"x"))
            await peer.asked.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await peer.gone.wait()

    run(main)


def test_abandoned_stream_closes_its_connection_and_finished_stream_keeps_it(run):
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def main():
        beginning = chunked + b"6\r\ndata: \r\n"
        async with Peer(plays(chunked + b"9\r\none\r\ntwo\n\r\n3\r\nend\r\n0\r\n\r\n", beginning)) as peer:
            pool = Connections()
            async with pool.open("POST", peer.url, b"x") as answer:
                assert [line async for line in answer.lines()] == [b"one", b"two", b"end"]
            async with pool.open("POST", peer.url, b"x") as answer:
                assert answer.status == 200
            await peer.gone.wait()
            assert peer.connections == 1

    run(main)


def test_a_reader_that_is_behind_holds_the_server_back(run):
    """A server that writes without end is read no further than its reader is, within a few buffers."""

    async def main():
        sent = 0

        async def play(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await peer.request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
            line = b"x" * 65535 + b"\n"
            while True:
                writer.write(line)
                await writer.drain()
                sent += len(line)

        async with Peer(play) as peer:
            pool = Connections()
            async with pool.open("GET", peer.url) as answer:
                lines = answer.lines()
                await anext(lines)
                sent_before = -1
                while sent_before != sent:  # until the server is stuck
                    sent_before = sent
                    for _ in range(2000):
                        await asyncio.sleep(0)
                assert sent < 50 * 2**20
                for _ in range(sent // 65536 + 10):
                    await anext(lines)
                assert sent > sent_before
                await lines.aclose()

    run(main)


def test_a_body_of_many_megabytes_arrives_whole(run):
    async def main():
        body = bytes(range(256)) * 40_000
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        async with Peer(plays(head + body)) as peer:
            pool = Connections()
            assert await pool.ask("POST", peer.url, body) == (200, body)
            await pool.close()

    run(main)


def test_requests_leave_no_garbage_in_cycles(run):
    """What a request took is free when it ends: a server with thousands of them need not search for it."""

    async def main():
        async with Peer(plays(*[OK] * 8)) as peer:
            pool = Connections()
            await pool.ask("GET", peer.url)
            gc.collect()
            gc.disable()
            try:
                for _ in range(5):
                    await pool.ask("GET", peer.url)
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                assert [garbage for garbage in gc.garbage if "connections" in type(garbage).__module__] == []
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
            await pool.close()

    run(main)


async def test_a_connection_that_closes_before_its_first_request_says_so() -> None:
    connection = Response()
    connection.connection_lost(None)
    with pytest.raises(ConnectionFailed, match="closed the connection"):
        await connection.read_body()
