"""Brings tools and the calls of tools into one normal form, whatever API they were written for."""

from __future__ import annotations

from typing import Any

from fluxtrain.data.containers.record import keys_of, kind_of
from fluxtrain.data.row import Message, Tool
from fluxtrain.data.shapes.refused import RowRefused, check_plain, from_json, list_of

_NULL_VALUES = ("default", "const", "example")  # of a schema may be null


def tools_of(value: Any, name: str = "tools") -> tuple[Tool, ...]:
    """Return tool definitions, each {"type": "function", "function": {...}}; () for none.

    Also read: functions without the wrapping, `input_schema` in place of `parameters`, and JSON in
    strings, as columns without a type of their own hold it. Raises RowRefused.
    """
    if value is None or value == "":
        return ()
    return tuple(_tool(tool, f"{name}[{index}]") for index, tool in enumerate(list_of(value, name)))


def calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Return calls of tools, each with a name and arguments that are an object.

    Also read: {"name": ..., "arguments": ...} without the wrapping, one call without a list.
    Raises RowRefused.
    """
    if isinstance(value, str):
        value = from_json(value, where)
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise RowRefused(f": `{where}` is empty: remove it")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def without_padding(messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> tuple[Message, ...]:
    """Drop nulls among the arguments of calls that the called tool does not know: columns of other
    rows, which a table has padded in."""
    known = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools}
    return tuple(
        {**message, "tool_calls": [_unpadded(call, known) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    )


def _unpadded(call: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    declared = known.get(function["name"])
    if declared is None:
        return call
    given = function["arguments"].items()
    kept = {key: value for key, value in given if value is not None or key in declared}
    return {**call, "function": {**function, "arguments": kept}}


def _properties(function: dict[str, Any]) -> Any:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else None


def _without_nulls(value: Any) -> Any:
    """Drop null keys of a schema at every depth, but for values that it gives as null itself."""
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_nulls(inner)
        for key, inner in value.items()
        if inner is not None or key in _NULL_VALUES
    }


def _tool(tool: Any, where: str) -> Tool:
    if isinstance(tool, str):
        tool = from_json(tool, where)
    if not isinstance(tool, dict):
        raise RowRefused(f": `{where}` is {kind_of(tool)}, and it must be an object")
    kind = tool.get("type", "function")
    if "function" not in tool:
        if "name" not in tool:
            raise RowRefused(f": `{where}` has no name (its keys: {keys_of(tool)})")
        tool = {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    elif kind != "function":
        raise RowRefused(f": `{where}` is of type {kind!r}, and only functions can be called")
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRefused(f": `{where}.function` must be an object with a name")
    function = {key: value for key, value in function.items() if value is not None}
    tool = {key: value for key, value in tool.items() if value is not None}
    if "input_schema" in function and "parameters" not in function:
        function["parameters"] = function.pop("input_schema")
    if isinstance(function.get("parameters"), str):
        function["parameters"] = from_json(function["parameters"], f"{where}.function.parameters")
    function = _without_nulls(function)
    check_plain(function, f"{where}.function")
    return {**tool, "type": "function", "function": function}


def _call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = from_json(call, where)
    if not isinstance(call, dict):
        raise RowRefused(f": `{where}` is {kind_of(call)}, and it must be an object")
    if call.get("type") not in (None, "function"):
        raise RowRefused(f": `{where}` is of type {call['type']!r}, and only functions are read")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRefused(
            f": `{where}` has no function with a name (its keys: {keys_of(call)}); a call is "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        )
    foreign = set(function) - {"name", "arguments", "type", "id", "index"}
    foreign |= set(call) - {"id", "type", "function", "index", "name", "arguments"}
    if foreign:
        raise RowRefused(f": `{where}` has the key `{min(foreign)}`, which no template reads")
    made: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        made["id"] = str(call["id"])
    made["function"] = {
        "name": function["name"],
        "arguments": _arguments(function.get("arguments"), where),
    }
    return made


def _arguments(value: Any, where: str) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    name = f"{where}.function.arguments"
    found = from_json(value, name) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise RowRefused(
            f": `{name}` is {kind_of(found)}, and it must be an object, or one as JSON in a string"
        )
    check_plain(found, name)
    return found
