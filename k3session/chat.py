# SPDX-License-Identifier: MIT
"""K3's chat format: messages to a prompt, written in the markup of :mod:`k3session.xtml`.

The prompt, in order:

1. the tools, declared in a system message of type ``tool-declare``;
2. how much to think, a system message of type ``thinking-effort``, when thinking is on;
3. the conversation;
4. system messages of type ``tool-choice`` and ``response-format``, when asked for;
5. the beginning of the assistant's answer: its message opened, and in it ``think``, or
   ``response`` when thinking is off.

An assistant's message has ``think`` (always there when thinking is on, even empty), ``response``,
and ``tools`` with a ``call`` for each call, numbered from 1, and a typed ``argument`` for each
argument.  Thinking of earlier turns stays.  No BOS is written.

Where the release passes over something in silence (an unknown role, an image, a tool choice that
the format has no message for), this module raises :class:`~k3session.errors.ConfigError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, TypedDict, Unpack

from k3session.errors import ConfigError
from k3session.xtml import Prompt, Segment, json_text, json_type

__all__ = ["ChatOptions", "Message", "Segment", "encode_chat", "render_chat"]

Message = Mapping[str, Any]

# The sentences of the format.  The model was trained on exactly these: in other words, it is
# another prompt.  (They name an effort, `medium`, that is not accepted.)
EFFORTS = ("low", "high", "max")
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without "
    "markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class ChatOptions(TypedDict, total=False):
    """The keywords of :func:`render_chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    thinking: bool
    thinking_effort: str | None
    tool_choice: str | None
    response_format: str | Mapping[str, Any] | None
    add_generation_prompt: bool


class _Encoder(Protocol):
    def encode(self, text: str, *, allow_special: bool = False) -> Sequence[int]: ...


def render_chat(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    tool_choice: str | None = None,
    response_format: str | Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Render a conversation as K3's chat prompt.

    Parameters
    ----------
    messages
        Messages as chat APIs have them: ``role`` (system, user, assistant, tool) and ``content``, a
        string or a list of text parts; ``name`` where wanted.  Of an assistant also
        ``reasoning_content`` (or ``reasoning``) and ``tool_calls``, whose ``arguments`` are an object
        or its JSON; text that is not JSON is passed on as it is.  Of a tool ``tool_call_id``:
        results that follow each other and all belong to calls are put in the order of the calls.
        Other results are numbered as they come, and named by ``tool``, by ``name``, or after the
        call of the same number.  A system message with ``tools`` declares further tools.
    tools
        JSON descriptions of the tools; keys are sorted.
    thinking
        Whether there is a thinking channel, here and in earlier turns.
    thinking_effort
        ``"low"``, ``"high"``, ``"max"``, or None to leave the message about it out.
    tool_choice
        ``"required"`` or ``"none"``; ``"auto"`` and None say nothing.
    response_format
        ``"json_object"``, or ``{"type": "json_schema", "json_schema": {"schema": ...}}``;
        ``"text"`` and None say nothing.
    add_generation_prompt
        Whether the prompt ends where the assistant's answer begins.

    Raises
    ------
    ConfigError
        A message or an option is not one of these; the message names it.

    Examples
    --------
    >>> prompt = render_chat([{"role": "user", "content": "Hi"}], thinking=False)
    >>> "".join(segment.text for segment in prompt)[:48]
    '<|open|>message role="user"<|sep|>Hi<|close|>mes'
    """
    if not _is_list(messages):
        raise ConfigError(f"messages: expected a list of messages, found {_kind(messages)}")
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise ConfigError(f"thinking_effort: expected one of {_either(EFFORTS)}, found {thinking_effort!r}")
    out = Prompt()
    if tools:
        out.system("tool-declare", _TOOLS.format(_tools_json(tools, "tools")))
    if thinking and thinking_effort is not None:
        out.system("thinking-effort", _EFFORT.format(thinking_effort))
    _conversation(out, messages, thinking)
    if isinstance(tool_choice, str) and tool_choice in _TOOL_CHOICE:
        out.system("tool-choice", _TOOL_CHOICE[tool_choice])
    elif tool_choice not in (None, "auto"):
        raise ConfigError(f"tool_choice: expected {_either(('auto', *_TOOL_CHOICE))}, found {tool_choice!r}")
    _response_format(out, response_format)
    if add_generation_prompt:
        out.open("message", ("role", "assistant"))
        out.open("think" if thinking else "response")
    return out.segments


def encode_chat(
    tokenizer: _Encoder, messages: Sequence[Message], **options: Unpack[ChatOptions]
) -> list[int]:
    """Render a conversation and encode it, segment by segment.

    Parameters
    ----------
    tokenizer
        A :class:`~k3session.text.Tokenizer`, or an object whose ``encode`` takes ``allow_special``
        and has K3's control tokens.
    messages, options
        As for :func:`render_chat`.

    Raises
    ------
    ConfigError
        As for :func:`render_chat`, or the tokenizer lacks a control token.
    """
    ids: list[int] = []
    for segment in render_chat(messages, **options):
        part = tokenizer.encode(segment.text, allow_special=segment.allow_special)
        if segment.allow_special and len(part) != 1:
            raise ConfigError(
                f"K3's chat format needs the special token {segment.text}, which this tokenizer lacks"
            )
        ids.extend(part)
    return ids


def _content(out: Prompt, message: Message, where: str) -> None:
    content = message.get("content")
    if content is None or isinstance(content, str):
        out.text(content or "")
        return
    if not _is_list(content):
        raise ConfigError(f"{where}.content: expected a string or a list of parts, found {_kind(content)}")
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else _kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{where}.content[{i}]: expected a part of type text with its text, found {kind}"
            )
        out.text(part["text"])


def _conversation(out: Prompt, messages: Sequence[Message], thinking: bool) -> None:
    places = [(f"messages[{i}]", message) for i, message in enumerate(messages)]
    calls: list[tuple[Any, str]] = []  # id and name of each call of the last assistant message
    results = 0  # written since that message
    for role, group in groupby(places, key=lambda item: _role(*item)):
        if role == "tool":
            for where, message, name in _in_call_order(list(group), calls):
                results += 1
                name = name or _result_name(message, where, calls[results - 1 : results])
                with out.message("tool", ("tool", name), ("index", str(results))):
                    _content(out, message, where)
            continue
        for where, message in group:
            if role == "system" and message.get("tools"):
                if message.get("content"):
                    raise ConfigError(f"{where}: expected tools or content in a system message, found both")
                declaration = _tools_json(message["tools"], f"{where}.tools")
                out.system("tool-declare", _MORE_TOOLS.format(declaration))
                continue
            name = _string(message, "name", where)
            with out.message(role, *([("name", name)] if name else [])):
                if role == "assistant":
                    calls = _assistant(out, message, where, thinking)
                    results = 0
                else:
                    _content(out, message, where)


def _role(where: str, message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if isinstance(role, str) and role in ("system", "user", "assistant", "tool"):
        return role
    found = repr(role) if isinstance(message, Mapping) else _kind(message)
    raise ConfigError(
        f"{where}: expected a message with a role of system, user, assistant or tool, found {found}"
    )


def _result_name(message: Message, where: str, call: Sequence[tuple[Any, str]]) -> str:
    """Name of the tool of a result that no id connects with a call; ``call``: the one of the same number."""
    name = _string(message, "tool", where) or _string(message, "name", where) or (call[0][1] if call else "")
    if not name:
        raise ConfigError(f"{where}: expected the name of the tool, or a call that this result answers")
    return name


def _assistant(out: Prompt, message: Message, where: str, thinking: bool) -> list[tuple[Any, str]]:
    """Write the channels of an assistant's message; return the id and the name of each call."""
    if thinking:
        with out.element("think"):
            thoughts = _string(message, "reasoning_content", where) or _string(message, "reasoning", where)
            if thoughts.strip():
                out.text(thoughts)
    with out.element("response"):
        _content(out, message, where)
    calls: list[tuple[Any, str]] = []
    tool_calls = message.get("tool_calls") or []
    if not _is_list(tool_calls):
        raise ConfigError(f"{where}.tool_calls: expected a list of calls, found {_kind(tool_calls)}")
    if not tool_calls:
        return calls
    with out.element("tools"):
        for number, call in enumerate(tool_calls, start=1):
            place = f"{where}.tool_calls[{number - 1}]"
            function = call.get("function", call) if isinstance(call, Mapping) else None
            name = _string(function, "name", place) if isinstance(function, Mapping) else ""
            if not isinstance(function, Mapping) or not name:
                raise ConfigError(f"{place}: expected a call with a function and its name, found {call!r}")
            with out.element("call", ("tool", name), ("index", str(number))):
                _arguments(out, function.get("arguments"), f"{place}: arguments")
            calls.append((call.get("id"), name))
    return calls


def _arguments(out: Prompt, arguments: Any, where: str) -> None:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            with out.element("json", ("type", "object")):
                out.text(arguments)
            return
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where}: expected an object or the JSON of one, found {_kind(arguments)}")
    for key, value in arguments.items():
        if not isinstance(key, str):
            raise ConfigError(f"{where}: expected names that are strings, found {key!r}")
        text = value if isinstance(value, str) else json_text(value, f"{where}[{key!r}]")
        with out.element("argument", ("key", key), ("type", json_type(value))):
            out.text(text)


def _in_call_order(
    run: list[tuple[str, Message]], calls: list[tuple[Any, str]]
) -> Iterable[tuple[str, Message, str]]:
    """Sort results that follow each other by the calls they answer, and name each after its call.

    If one of them answers no call, the run is left as it is.
    """
    number: dict[str, int] = {}
    for i, (call_id, _) in enumerate(calls):
        if call_id is not None:
            number.setdefault(str(call_id), i)
    found = []
    for place, result in run:
        answers = result.get("tool_call_id", result.get("id"))
        if answers is None or str(answers) not in number:
            return [(place, result, "") for place, result in run]
        found.append((number[str(answers)], place, result))
    found.sort(key=lambda item: item[0])
    return [(place, result, calls[i][1]) for i, place, result in found]


def _response_format(out: Prompt, response_format: str | Mapping[str, Any] | None) -> None:
    given = response_format if isinstance(response_format, Mapping) else {"type": response_format}
    kind = given.get("type")
    if kind is None or kind == "text":
        return
    body = _RESPONSE_FORMAT.format(kind)
    if kind == "json_schema":
        schema = given.get("json_schema")
        if not isinstance(schema, Mapping):
            raise ConfigError(
                "response_format: expected {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
                f"found {response_format!r}"
            )
        schema = schema.get("schema", schema.get("json_schema", schema))
        body += _SCHEMA.format(json_text(schema, "response_format", compact=True))
    elif kind != "json_object":
        raise ConfigError(f"response_format: expected text, json_object or json_schema, found {kind!r}")
    out.system("response-format", body)


def _tools_json(tools: Any, where: str) -> str:
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConfigError(
            f"{where}: expected a list of JSON objects, each describing a tool, found {tools!r}"
        )
    return json_text(tools, where, compact=True)


def _string(message: Message, key: str, where: str) -> str:
    value = message.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    raise ConfigError(f"{where}: expected a string as {key}, found {_kind(value)}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def _either(choices: Iterable[str]) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}"
