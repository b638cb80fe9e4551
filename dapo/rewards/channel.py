"""Messages between a worker and whoever asks it, with a deadline on every wait."""

from __future__ import annotations

import select
import socket
import struct
import time

HEADER = struct.Struct("!Q")


class Channel:
    """Length-prefixed messages over a stream socket. `EOFError` when the other side is gone, `TimeoutError`
    at the deadline (of `time.monotonic()`), `ValueError` for a message that is longer than it may be."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, message: bytes, deadline: float | None = None) -> None:
        self._wait_no_longer_than(deadline)
        try:
            self.socket.sendall(HEADER.pack(len(message)) + message)
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None

    def receive(self, deadline: float | None = None, limit: int = 1 << 62) -> bytes:
        (length,) = HEADER.unpack(self._read(HEADER.size, deadline))
        if length > limit:
            raise ValueError(f"a message of {length} bytes")
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float | None) -> bytes:
        chunks = []
        while count:
            self._wait_no_longer_than(deadline)
            try:
                chunk = self.socket.recv(min(count, 1 << 20))
            except ConnectionResetError:
                raise EOFError from None
            if not chunk:
                raise EOFError
            chunks.append(chunk)
            count -= len(chunk)
        return b"".join(chunks)

    def _wait_no_longer_than(self, deadline: float | None) -> None:
        if deadline is None:
            self.socket.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)

    def has_message(self) -> bool:
        """Whether something has come that nobody has read, the other side's end included."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def close(self) -> None:
        self.socket.close()
