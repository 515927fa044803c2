"""A pickle reader that builds data and runs nothing.

It knows the few opcodes that checkpoints use, and the caller says which global names may stand in the pickle and what
each of them means here. A name is a plain value, a `Call` to a function of ours, or a `Kind`, whose instances are kept
as a `Record` of their state: no class of the library that wrote the pickle is looked up, so that it need not be
installed, let alone in the same version. A name may also be a `Refusal`, which says why a pickle with it is not read.
Any other name is refused before anything is made of it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, NoReturn, TypeGuard

from ..errors import COPY_AGAIN, SourceError, UnsafeInputError

__all__ = ["Call", "Kind", "Names", "Record", "Refusal", "is_count", "is_counts", "unpickle"]

# A pickler empties its stack every 1,000 items; only a file made to fill the memory comes near this.
_MAX_STACK = 1_000_000
_MAX_COUNT = 1 << 62
# What a pickle has named once it can repeat for two bytes, and whoever walks through a value pays for it every time.
_MAX_ARGUMENTS = 1000
_MAX_REPEATED = 10
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class Call:
    """What a name stands for that the pickle may call: a function that checks its arguments and only makes data."""

    function: Callable[..., object]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a name stands for of which the pickle may make instances."""

    name: str


@dataclass(slots=True, eq=False)
class Record:
    """An instance of a kind: its state as the pickle gives it, unchecked. Compares and hashes by identity."""

    kind: str
    state: Any = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a name stands for that tells of a format which is not read.

    Attributes:
        what: What the format is, for a message.
        fix: One way out, for the message.
    """

    what: str
    fix: str


Names = Mapping[str, object]
"""Meaning of the global names that may stand in a pickle, by `module.name`."""


def unpickle(
    data: bytes,
    names: Names,
    *,
    file: str | PathLike[str],
    name: str | None = None,
    persistent: Callable[[object], object] | None = None,
) -> Any:
    """Read a pickle without running anything of it.

    Args:
        data: The pickle.
        names: The global names it may use.
        file: The file it is from, for messages.
        name: The tensor it is about, for messages.
        persistent: Maps persistent ids to values; without it there must be none.

    Returns:
        Dicts, lists, tuples, strings, bytes, numbers, records and what `names` makes, in any nesting.

    Raises:
        UnsafeInputError: The pickle uses another global name.
        SourceError: It is damaged, uses opcodes that no checkpoint needs, or is of a format that is not read.
    """
    machine = _Machine(data, names, persistent)
    try:
        return machine.run()
    except _RefusedNameError as refused:
        raise refused.kind(refused.what, name=name, file=file, fix=refused.fix) from None
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        cause = error if isinstance(error, ValueError) else type(error).__name__
        found = f"{cause} before byte {machine.position:,}"
        raise SourceError("a damaged pickle", name=name, file=file, found=found, fix=COPY_AGAIN) from error


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a value of a pickle is a number of bytes, rows or elements that can be."""
    return isinstance(value, int) and 0 <= value < _MAX_COUNT


def is_counts(value: object, max_counts: int = _MAX_DIMS) -> TypeGuard[tuple[int, ...]]:
    """Tell whether a value of a pickle is a tuple of such numbers, not more than a tensor can have dims."""
    return isinstance(value, tuple) and len(value) <= max_counts and all(map(is_count, value))


class _RefusedNameError(Exception):
    """A global name that is not among those allowed, or is a refusal."""

    def __init__(self, kind: type[SourceError], what: str, fix: str) -> None:
        super().__init__(what)
        self.kind, self.what, self.fix = kind, what, fix


class _Machine:
    """The state of a pickle that is being read: a stack, the marks on it, and a memo."""

    def __init__(self, data: bytes, names: Names, persistent: Callable[[object], object] | None) -> None:
        self.data, self.names, self.persistent = data, names, persistent
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.num_repeated = 0
        self.frame_end = 0

    def run(self) -> Any:
        """Execute opcodes up to the one that stops."""
        data, stack, end = self.data, self.stack, len(self.data)
        while self.position < end:
            opcode = data[self.position]
            self.position += 1
            if opcode == _STOP:
                self.end_frame(self.position)
                return stack.pop()
            handler = _HANDLERS.get(opcode)
            if handler is None:
                _fail(f"opcode {opcode:#04x}, which no checkpoint uses,")
            handler(self)
            if len(stack) > _MAX_STACK:
                _fail("too many loose values")
        raise ValueError("an early end")

    def take(self, count: int) -> bytes:
        """Return the next bytes of the pickle."""
        begin, end = self.position, self.position + count
        if end > len(self.data):
            _fail("an early end")
        self.position = end
        return self.data[begin:end]

    def take_integer(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def take_line(self) -> str:
        """Return the text up to the next line end."""
        return self.take(self.data.index(b"\n", self.position) + 1 - self.position)[:-1].decode()

    def push(self, value: object) -> None:
        self.stack.append(value)

    def repeat(self, key: int) -> None:
        """Push a value that was memoized."""
        value = self.memo[key]
        if isinstance(value, list):
            self.num_repeated += len(value)
            if self.num_repeated > _MAX_REPEATED * len(self.data):
                _fail("lists that are repeated too often")
        self.push(value)

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def pop_to_mark(self) -> list[Any]:
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def skip_protocol(self) -> None:
        version = self.take_integer(1)
        if version > pickle.HIGHEST_PROTOCOL:
            _fail(f"protocol {version}")

    def begin_frame(self) -> None:
        """Note where a frame ends: of what is cut out of a pickle nothing else may tell."""
        self.end_frame(self.position - 1)
        length = self.take_integer(8)
        self.frame_end = self.position + length

    def end_frame(self, position: int) -> None:
        if position < self.frame_end:
            _fail("a frame that ends too early")

    def push_long(self) -> None:
        self.push(int.from_bytes(self.take(self.take_integer(1)), "little", signed=True))

    def push_float(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def push_tuple_to_mark(self) -> None:
        self.push(tuple(self.pop_to_mark()))

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def append(self) -> None:
        self.extend([self.stack.pop()])

    def appends(self) -> None:
        self.extend(self.pop_to_mark())

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            _fail("items of what is no list")
        target.extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def set_items(self) -> None:
        self.update(self.pop_to_mark())

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            _fail("items of what is no dict")
        for key in items[::2]:
            # The hash of deeply nested tuples overruns the C stack, which no exception reports.
            if not isinstance(key, (str, int, Record)):
                _fail("a key that is no text")
        target.update(zip(items[::2], items[1::2], strict=True))

    def push_global(self) -> None:
        module = self.take_line()
        self.push(self.find(module, self.take_line()))

    def push_stacked_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            _fail("a name that is no text")
        self.push(self.find(module, name))

    def find(self, module: str, name: str) -> object:
        full_name = f"{module}.{name}"
        meaning = self.names.get(full_name)
        if isinstance(meaning, Refusal):
            raise _RefusedNameError(SourceError, meaning.what, meaning.fix)
        if meaning is None:
            shown = full_name if full_name.isprintable() else ascii(full_name)
            what = f"a pickle that names {shown} (nothing of it was run)"
            raise _RefusedNameError(UnsafeInputError, what, "Find out who made the file")
        return meaning

    def call(self) -> None:
        """Replace a function and the tuple of its arguments by the result."""
        arguments, target = self.stack.pop(), self.stack.pop()
        if not isinstance(target, Call) or not isinstance(arguments, tuple):
            _fail("a call of what is no function")
        self.push(_result(target, arguments))

    def make(self) -> None:
        """Replace a kind by an instance; there must be no arguments but for a function of ours, which takes them."""
        arguments, target = self.stack.pop(), self.stack.pop()
        if isinstance(target, Call) and isinstance(arguments, tuple):
            self.push(_result(target, arguments))
        elif isinstance(target, Kind) and arguments == ():
            self.push(Record(target.name))
        else:
            _fail("an instance of what is no class")

    def build(self) -> None:
        """Give the state on top of the stack to the record below it; attributes of a dict are dropped."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, dict):
            return
        if not isinstance(target, Record) or target.state is not None:
            _fail("a state of what has none")
        target.state = state

    def push_persistent(self) -> None:
        if self.persistent is None:
            _fail("a persistent id")
        self.push(self.persistent(self.stack.pop()))


def _result(target: Call, arguments: tuple[Any, ...]) -> object:
    """Call a function of ours, unless it would copy what a pickle repeats."""
    for values in (arguments, *arguments):
        if isinstance(values, (tuple, list)) and len(values) > _MAX_ARGUMENTS:
            _fail("a call with too many arguments")
    return target.function(*arguments)


def _fail(what: str) -> NoReturn:
    raise ValueError(what)


_Handler = Callable[[_Machine], None]


def _push(make: Callable[[], object]) -> _Handler:
    return lambda machine: machine.push(make())


def _push_integer(width: int, *, signed: bool = False) -> _Handler:
    return lambda machine: machine.push(int.from_bytes(machine.take(width), "little", signed=signed))


def _push_text(width: int) -> _Handler:
    return lambda machine: machine.push(machine.take(machine.take_integer(width)).decode())


def _push_bytes(width: int) -> _Handler:
    return lambda machine: machine.push(machine.take(machine.take_integer(width)))


def _push_tuple(count: int) -> _Handler:
    def handler(machine: _Machine) -> None:
        items = tuple(machine.stack[-count:])
        if len(items) < count:
            _fail("a tuple of what is not there")
        machine.stack[-count:] = [items]

    return handler


def _put(width: int) -> _Handler:
    def handler(machine: _Machine) -> None:
        machine.memo[machine.take_integer(width)] = machine.stack[-1]

    return handler


def _get(width: int) -> _Handler:
    return lambda machine: machine.repeat(machine.take_integer(width))


_STOP = pickle.STOP[0]

_HANDLERS: dict[int, _Handler] = {
    opcode[0]: handler
    for opcode, handler in (
        (pickle.PROTO, _Machine.skip_protocol),
        (pickle.FRAME, _Machine.begin_frame),
        (pickle.MARK, _Machine.mark),
        (pickle.NONE, _push(lambda: None)),
        (pickle.NEWTRUE, _push(lambda: True)),
        (pickle.NEWFALSE, _push(lambda: False)),
        (pickle.BININT, _push_integer(4, signed=True)),
        (pickle.BININT1, _push_integer(1)),
        (pickle.BININT2, _push_integer(2)),
        (pickle.LONG1, _Machine.push_long),
        (pickle.BINFLOAT, _Machine.push_float),
        (pickle.SHORT_BINUNICODE, _push_text(1)),
        (pickle.BINUNICODE, _push_text(4)),
        (pickle.SHORT_BINBYTES, _push_bytes(1)),
        (pickle.BINBYTES, _push_bytes(4)),
        (pickle.EMPTY_TUPLE, _push(tuple)),
        (pickle.TUPLE1, _push_tuple(1)),
        (pickle.TUPLE2, _push_tuple(2)),
        (pickle.TUPLE3, _push_tuple(3)),
        (pickle.TUPLE, _Machine.push_tuple_to_mark),
        (pickle.EMPTY_LIST, _push(list)),
        (pickle.APPEND, _Machine.append),
        (pickle.APPENDS, _Machine.appends),
        (pickle.EMPTY_DICT, _push(dict)),
        (pickle.SETITEM, _Machine.set_item),
        (pickle.SETITEMS, _Machine.set_items),
        (pickle.GLOBAL, _Machine.push_global),
        (pickle.STACK_GLOBAL, _Machine.push_stacked_global),
        (pickle.REDUCE, _Machine.call),
        (pickle.NEWOBJ, _Machine.make),
        (pickle.BUILD, _Machine.build),
        (pickle.BINPERSID, _Machine.push_persistent),
        (pickle.MEMOIZE, _Machine.memoize),
        (pickle.BINPUT, _put(1)),
        (pickle.LONG_BINPUT, _put(4)),
        (pickle.BINGET, _get(1)),
        (pickle.LONG_BINGET, _get(4)),
    )
}
