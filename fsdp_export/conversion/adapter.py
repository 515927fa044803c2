"""Adapters: objects of trainers that know how their names and tensors become those of Hugging Face."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import PlanError, UsageError
from .trace import ConvertDict

__all__ = ["adapter_name", "conversion_of", "load_adapter", "reversal_of"]

_METHODS = ("to_hf", "convert_single_tensor_to_hf")
_AN_ADAPTER = "an object with to_hf(state_dict) or convert_single_tensor_to_hf(name, tensor)"
_HOW = "Give package.module:Class, or package.module:function of one that makes it"
_WHERE = "Install it where fsdp-export is, or stand in the folder that has it"


def conversion_of(adapter: Any) -> ConvertDict:
    """Return what an adapter does to a state dict.

    Args:
        adapter: An object with `to_hf(state_dict)`, which returns a dict, or `convert_single_tensor_to_hf(name,
            tensor)`, which returns pairs of a name and a tensor: torchtitan's and NeMo Automodel's, or your own.

    Raises:
        UsageError: It has neither.
    """
    if inspect.isclass(adapter):
        raise UsageError(
            "a class for an adapter", expected=_AN_ADAPTER, found=adapter.__name__, fix="Make an object of it"
        )
    if callable(getattr(adapter, "to_hf", None)):
        return lambda tensors: adapter.to_hf(dict(tensors))
    if callable(getattr(adapter, "convert_single_tensor_to_hf", None)):
        return lambda tensors: _one_by_one(adapter, tensors)
    raise UsageError("no adapter", expected=_AN_ADAPTER, found=type(adapter).__name__, fix=_HOW)


def reversal_of(adapter: Any) -> ConvertDict:
    """Return how an adapter makes of names and tensors of Hugging Face those of the module.

    Args:
        adapter: An object with `from_hf(state_dict)`, which returns a dict, such as torchtitan's.

    Raises:
        UsageError: It has no such method.
    """
    if inspect.isclass(adapter) or not callable(getattr(adapter, "from_hf", None)):
        found = getattr(adapter, "__name__", type(adapter).__name__)
        raise UsageError("no adapter that can load", expected="an object with from_hf(state_dict)", found=found)
    return lambda tensors: adapter.from_hf(dict(tensors))


def adapter_name(adapter: Any) -> str:
    """Return the name of an adapter's class, or what names the adapter: without arguments, which may be paths."""
    name = adapter.partition("(")[0] if isinstance(adapter, str) else _qualified_name(type(adapter))
    return f"adapter {name}"


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _one_by_one(adapter: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for new_name, output in adapter.convert_single_tensor_to_hf(name, tensor):
            if new_name in outputs:
                raise PlanError("the adapter gives a name to two tensors", name=new_name)
            outputs[new_name] = output
    return outputs


def load_adapter(reference: str, *, config: Mapping[str, Any] | None = None, assets: Path | None = None) -> Any:
    """Import an adapter that a user has named, from the Python path or the folder they stand in.

    What is named may be an adapter; a class or function that makes one; or either with arguments behind it, as in
    `torchtitan.models.llama3:model_registry('8B')`. A class or function is given, by these names, what it asks for:
    `config` (the parsed config.json), `hf_assets_path` (the base model's folder). What comes out may also be a
    torchtitan `ModelSpec`, which names the class of its adapter.

    Args:
        reference: `package.module:name`, with or without literal arguments in parentheses.
        config: The parsed config.json, if there is one.
        assets: The folder of the base model, if there is one.

    Raises:
        UsageError: There is no such thing, it cannot be made, or it is no adapter.
    """
    module_name, colon, path = reference.partition(":")
    name, parenthesis, arguments = path.partition("(")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise UsageError("an adapter that cannot be read", found=reference, fix=_HOW)
    available = {"config": config, "hf_assets_path": os.fspath(assets) if assets is not None else None}
    with _failing(reference):
        value = _imported(module_name)
        for part in name.split("."):
            value = getattr(value, part)
        if parenthesis:
            positional, named = _literals(arguments.removesuffix(")"))
            value = value(*positional, **named)
        elif not _is_adapter(value):
            value = _made(value, available)
        if hasattr(value, "state_dict_adapter") and hasattr(value, "model"):
            value = value.state_dict_adapter(value.model, available["hf_assets_path"])
    if not _is_adapter(value):
        raise UsageError("no adapter", expected=_AN_ADAPTER, found=f"{reference}, a {type(value).__name__}", fix=_HOW)
    return value


def _is_adapter(value: Any) -> bool:
    return not inspect.isclass(value) and any(callable(getattr(value, method, None)) for method in _METHODS)


def _made(maker: Any, available: Mapping[str, Any]) -> Any:
    """Call a class or a function with those of the available arguments that it asks for."""
    if not callable(maker):
        return maker
    asked = inspect.signature(maker).parameters.values()
    missing = [parameter.name for parameter in asked if _is_required(parameter) and parameter.name not in available]
    if missing:
        raise UsageError(
            f"{maker.__name__} needs {', '.join(missing)}, which is not known here",
            fix=f"Name a function that makes the adapter; it may ask for {' and '.join(available)}",
        )
    return maker(**{parameter.name: available[parameter.name] for parameter in asked if parameter.name in available})


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    return not is_variadic and parameter.default is parameter.empty


def _literals(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    call = ast.parse(f"f({arguments})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"({arguments}) is no list of arguments")
    named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    return [ast.literal_eval(argument) for argument in call.args], named


def _imported(name: str) -> Any:
    here = os.getcwd()  # noqa: PTH109  an entry of sys.path is a string
    sys.path.append(here)  # last: nothing in the folder stands in for what is installed
    try:
        return importlib.import_module(name)
    finally:
        sys.path.reverse()
        sys.path.remove(here)
        sys.path.reverse()


@contextmanager
def _failing(reference: str) -> Iterator[None]:
    """Turn whatever a foreign module raises as it is imported and called into our error."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        fix = _WHERE if isinstance(error, ModuleNotFoundError) else _HOW
        raise UsageError(f"the adapter {reference} cannot be made", found=found, fix=fix) from error
