"""How workers of vLLM before 0.31 learn the id of a communicator: from a TCP store, in a pickle."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

from ..errors import SinkError

__all__ = ["IdStore"]

# vLLM sends its first object under this name, and unpickles what it finds there. It is the only pickle that we send:
# a call of `_ctypes._unpickle` for the structure that vLLM has for an id, written by hand, since that is not here.
_KEY = "broadcast_from/0/0"
_BEFORE = b"\x80\x03c_ctypes\n_unpickle\ncvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n}C"
_AFTER = b"\x86\x86R."


class IdStore:
    """A TCP store in this process, with an id in it.

    Args:
        unique_id: The id.
        address: By which workers reach this host.
        num_ranks: This process and all workers.
        timeout: Seconds until a worker finds nothing.

    Attributes:
        port: Where the store listens.
    """

    def __init__(self, unique_id: bytes, address: str, num_ranks: int, timeout: float) -> None:
        try:
            self._store: TCPStore | None = TCPStore(
                address, 0, num_ranks, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise SinkError(f"no store for vLLM could be opened at {address}", found=error) from error
        pickled: Any = _BEFORE + bytes([len(unique_id)]) + unique_id + _AFTER
        self._store.set(_KEY, pickled)
        self.port = self._store.port

    def __enter__(self) -> IdStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._store = None
