import asyncio
import socket

from rftstream.studio.server import _listen


async def _nodelay_of_a_connection() -> int:
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = _listen("127.0.0.1", 0)
    async with await asyncio.start_server(connected, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            return await found
        finally:
            writer.close()


def test_an_answer_does_not_wait_for_an_acknowledgement():
    assert asyncio.run(_nodelay_of_a_connection()) != 0
