"""A conversion, cut into steps: the fewest tensors at a time, and rows instead of tensors where that is enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..errors import ExportError, PlanError, listing
from ..spec import TensorInfo, TensorSpec
from ..steps import Part, Piece, Step, row_step
from .trace import ConvertDict, Traced, checked, meta_tensors, trace

__all__ = ["CastOf", "Conversion"]

CastOf = Callable[[TensorInfo], "torch.dtype | None"]


class Conversion:
    """A conversion of a state dict, planned on meta tensors.

    Args:
        convert: Maps a state dict to a converted one, and parts of it to the same tensors as the whole of it.
        specs: The tensors of the state dict.
        maker: What converts, for the record of the export.

    Attributes:
        names: The names of its outputs, in their order.
        unused: The names of tensors of which it makes nothing.
        blocks: Outputs that one file holds, and a number that those share which it does; see `Plan`.

    Raises:
        PlanError: It fails, depends on values, makes nothing, or a tensor of no input.
    """

    def __init__(self, convert: ConvertDict, specs: Sequence[TensorSpec], maker: str = "") -> None:
        self._convert = convert
        self.maker = maker
        self._traced = {output.info.name: output for output in trace(convert, specs)}
        self.names = tuple(self._traced)
        used = {spec.name for output in self._traced.values() for spec in output.inputs}
        self.blocks: Mapping[str, int] = {}
        self.unused = tuple(spec.name for spec in specs if spec.name not in used)
        if not self._traced:
            found = f"{len(specs):,} tensors: {listing(spec.name for spec in specs)}"
            fix = "Use the conversion that was made for this model"
            raise PlanError("the conversion knows none of the tensors", found=found, fix=fix)

    def output(self, name: str) -> TensorInfo:
        """Return the shape and dtype that an output has before a cast."""
        return self._traced[name].info

    def made_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the inputs that an output is made of."""
        return tuple(spec.name for spec in self._traced[name].inputs)

    def origin(self, name: str) -> TensorSpec | None:
        """Return the input that an output is under another name; None where it is anything else."""
        return self._traced[name].whole

    def steps(self, names: Collection[str], cast_of: CastOf) -> list[Step]:
        """Cut the conversion into steps.

        Outputs that are rows of one input, or a strided view of one of its rows or of the same in each of several
        (another name, the experts of a fused tensor, halves of these, transposed or not), are cut along dim 0, and the
        conversion is not called for them again. For all others it is called with just the inputs they are made of.

        Args:
            names: The outputs that are wanted.
            cast_of: What an output is cast to; None to keep its dtype.

        Raises:
            PlanError: The conversion makes something else of a part of the state dict than of all of it.
        """
        steps = []
        for outputs in _together(self._traced[name] for name in self.names if name in names):
            inputs = outputs[0].inputs
            infos = [_cast(output.info, cast_of) for output in outputs]
            parts = [part for output in outputs if (part := output.part) is not None]
            if len(inputs) == 1 and len(parts) == len(outputs):
                cast = [replace(part, info=info) for part, info in zip(parts, infos, strict=True)]
                steps += [row_step(inputs[0], alike) for alike in _by_dtype(cast)]
            else:
                steps.append(_whole_step(inputs, outputs, infos, self._convert))
        return steps


def _together(traced: Iterable[Traced]) -> list[list[Traced]]:
    """Put outputs together that are made of the same inputs."""
    groups: dict[tuple[TensorSpec, ...], list[Traced]] = {}
    for output in traced:
        groups.setdefault(output.inputs, []).append(output)
    return list(groups.values())


def _by_dtype(parts: Iterable[Part]) -> list[tuple[Part, ...]]:
    """Put outputs of one dtype together."""
    groups: dict[torch.dtype, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.info.dtype, []).append(part)
    return list(map(tuple, groups.values()))


def _whole_step(
    inputs: tuple[TensorSpec, ...], outputs: Sequence[Traced], infos: Sequence[TensorInfo], convert: ConvertDict
) -> Step:
    """Return the step that calls the conversion; a cast that narrows comes first where that only moves elements."""
    _check_alone(inputs, outputs, convert)
    narrow = _cast_before(inputs, outputs, infos, convert)
    wanted = [
        (replace(output.info, dtype=narrow or output.info.dtype), info.dtype)
        for output, info in zip(outputs, infos, strict=True)
    ]

    def run(tensors: Sequence[torch.Tensor], _: int) -> Iterator[Piece]:
        given = {spec.name: tensor for spec, tensor in zip(inputs, tensors, strict=True)}
        converted = checked(lambda: convert(given), "on tensors with values")
        for planned, dtype in wanted:
            tensor = converted.get(planned.name)
            if tensor is None or (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
                found = "none" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
                what = "the conversion makes something else of values than was planned"
                expected = f"{list(planned.shape)} {planned.dtype}"
                raise PlanError(what, name=planned.name, expected=expected, found=found)
            plain = tensor.detach().resolve_conj().resolve_neg()
            yield Piece(TensorInfo(planned.name, planned.shape, dtype), 0, plain.to(dtype))

    return Step((), tuple(infos), 1, narrow, run, whole=inputs)


def _cast_before(
    inputs: Sequence[TensorSpec], outputs: Sequence[Traced], infos: Sequence[TensorInfo], convert: ConvertDict
) -> torch.dtype | None:
    """Return a narrower dtype to which inputs may be cast before they are gathered and converted; None for no such."""
    dtypes = {tensor.dtype for tensor in (*inputs, *(output.info for output in outputs))}
    targets = {info.dtype for info in infos}
    if len(dtypes) > 1 or len(targets) > 1 or not all(output.is_moved for output in outputs):
        return None
    (dtype,), (target,) = dtypes, targets
    if target.itemsize >= dtype.itemsize:
        return None
    try:
        made = checked(lambda: convert(meta_tensors(replace(spec, dtype=target) for spec in inputs)))
    except ExportError:
        return None
    # What widens to float32, which did nothing to inputs that are that, would now do something.
    return target if all(made[info.name].dtype == target for info in infos if info.name in made) else None


def _check_alone(inputs: Sequence[TensorSpec], outputs: Sequence[Traced], convert: ConvertDict) -> None:
    """Refuse a conversion that does not make the same of a few inputs alone."""
    alone = checked(lambda: convert(meta_tensors(inputs)))
    for output in outputs:
        tensor = alone.get(output.info.name)
        found = None if tensor is None else TensorInfo(output.info.name, tuple(tensor.shape), tensor.dtype)
        if found != output.info:
            raise PlanError(
                "the conversion makes it of the whole state dict only",
                name=output.info.name,
                expected=f"{list(output.info.shape)} {output.info.dtype} of {listing(spec.name for spec in inputs)}",
                found="none" if found is None else f"{list(found.shape)} {found.dtype}",
                fix="Make every output of the tensors that it needs, whatever else is there",
            )


def _cast(info: TensorInfo, cast_of: CastOf) -> TensorInfo:
    return replace(info, dtype=cast_of(info) or info.dtype)
