"""Messages to the text that a model was trained to go on from.

Owns: a template's call (what it is given, in which shape) and what its failures mean to a client.
Knows nothing of tokens: the result is encoded with ``allow_special=True,
add_special_tokens=False``, as a template writes its own start token. The language and its limits
are those of ``template_environment``. Called by server/ and client/, from any thread.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jinja2
from jinja2 import nodes

from trimaran.errors import InvalidRequestError
from trimaran.formats.architecture import TokenizerFiles
from trimaran.text.template_environment import MAX_SOURCE_CHARS, ChatEnvironment

Message = Mapping[str, Any]
PART_SEPARATOR = "\n"  # between text parts, for templates that expect a string
_RESERVED = frozenset([
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "bos_token", "eos_token", "raise_exception", "strftime_now",
])  # fmt: skip
# Marks where the last message ends in the text; the space shows whether the template trims.
_END_MARK = "\ue0f1END-OF-FINAL-MESSAGE\ue0f2"
_ENVIRONMENT = ChatEnvironment()


def choose_template(files: TokenizerFiles, *, tools: bool) -> str | None:
    """The model's own template: "tool_use" of named ones where there are tools, else "default".

    None: a base model, which has none.
    """
    if tools and "tool_use" in files.chat_templates:
        return files.chat_templates["tool_use"]
    return files.chat_template or files.chat_templates.get("default")


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        """Raises InvalidRequestError: ``source`` is not a template."""
        if len(source) > MAX_SOURCE_CHARS:
            raise InvalidRequestError(
                f"the chat template has more than {MAX_SOURCE_CHARS} characters",
                param="chat_template",
            )
        try:
            tree = _ENVIRONMENT.parse(source)
            self._template = _ENVIRONMENT.compile_template(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequestError(
                f"the chat template is not valid: {_shown(error)}", param="chat_template"
            ) from error
        self.content_format: Literal["string", "parts"] = (
            "parts" if _iterates_over_content(tree) else "string"
        )
        self._wraps_strings = self.content_format == "parts" and not _tests_for_strings(tree)
        # A model without such a token has no such variable: templates ask whether it is defined.
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in named.items() if text is not None}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        ``continue_final_message`` ends it within the last message instead of opening a new one.

        Raises InvalidRequestError: with the template's own words where it refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        for name in template_kwargs or ():
            if name in _RESERVED or not name.isidentifier():
                raise InvalidRequestError(
                    f"chat_template_kwargs may not set {name[:40]!r}", param="chat_template_kwargs"
                )
        shaped = [self._message(index, message) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(shaped)
        variables = {
            **(template_kwargs or {}),
            **self._tokens,
            "messages": shaped,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _ENVIRONMENT.render(self._template, variables)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(_shown(error), param="messages") from error
        except Exception as error:  # any operation of a template on any input may fail
            raise InvalidRequestError(
                f"the chat template failed: {type(error).__name__}: {_shown(error)}",
                param="messages",
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _message(self, index: int, message: Message) -> dict[str, Any]:
        """As templates expect it: no null fields, contents in the template's format, arguments of
        tool calls as objects."""
        where = f"messages[{index}]"
        shaped = {name: value for name, value in message.items() if value is not None}
        if not isinstance(shaped.get("role"), str):
            raise InvalidRequestError("every message needs a role", param=f"{where}.role")
        if "content" in shaped:
            shaped["content"] = self._content(shaped["content"], f"{where}.content")
        if "tool_calls" in shaped:
            shaped["tool_calls"] = [
                _tool_call(call, f"{where}.tool_calls[{number}]")
                for number, call in enumerate(shaped["tool_calls"])
            ]
        return shaped

    def _content(self, content: object, where: str) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._wraps_strings else content
        if not isinstance(content, Sequence):
            raise InvalidRequestError("content is a string or a list of parts", param=where)
        parts = [_text_part(part, f"{where}[{number}]") for number, part in enumerate(content)]
        if self.content_format == "parts":
            return parts
        return PART_SEPARATOR.join(part["text"] for part in parts)


def _text_part(part: object, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") in ("text", "refusal"):
        text = part.get(part["type"])
        if isinstance(text, str):
            return {"type": "text", "text": text}
        raise InvalidRequestError("a text part needs its text", param=where)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"content parts of type {str(kind)[:40]!r} are not supported; 'text' is", param=where
    )


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequestError("a tool call needs its function", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                "the arguments of a tool call must be JSON", param=f"{where}.function.arguments"
            ) from error
    if not arguments:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(
            "the arguments of a tool call must be a JSON object",
            param=f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Put the mark behind the last text of the last message."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _END_MARK + " "
    elif content:
        content[-1]["text"] += _END_MARK + " "
    else:
        raise InvalidRequestError(
            "continue_final_message needs a final message with content", param="messages"
        )


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not write the final message as it is",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Whether the template has a loop over a message's content, or over a name that stands for it:
    set to it, or the parameter of a macro that is called so."""
    aliases = {
        argument.name
        for macro in tree.find_all(nodes.Macro)
        for argument in macro.args
        if argument.name == "content"
    }
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and _is_content(node.node, aliases):
            aliases.add(node.target.name)
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _is_content(expression: nodes.Node | None, aliases: set[str]) -> bool:
    """``message.content`` or ``message["content"]``, possibly through filters or a condition."""
    match expression:
        case nodes.Filter():
            return _is_content(expression.node, aliases)
        case nodes.CondExpr():
            return any(_is_content(way, aliases) for way in (expression.expr1, expression.expr2))
        case nodes.Name():
            return expression.name in aliases
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _tests_for_strings(tree: nodes.Template) -> bool:
    return any(test.name == "string" for test in tree.find_all(nodes.Test))


def _shown(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:1000]
