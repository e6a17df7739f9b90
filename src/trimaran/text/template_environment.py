"""The one place where Jinja runs: Hugging Face's dialect in a sandbox with limits that hold.

Owns: the environment of all chat templates, whoever wrote them, and what a rendering may cost. A
thread cannot be stopped from outside, so the limits are inside: everything that repeats or enlarges
(loops, calls, filters, operators, output) is made to pass a ``Meter`` first. Knows nothing of
messages; called by ``chat_template`` only.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 1 << 20
MAX_VALUE_CHARS = 1 << 24  # of one string, and items of one list
MAX_WORK = 1 << 30  # characters and items that all steps together make
MAX_STEPS = 1_000_000  # iterations, calls and filters
MAX_SECONDS = 5.0
MAX_ITEMS = 1_000_000  # of a value made text, nested ones included
# A context variable that no template can name.
_METER = "trimaran.meter"
_FILTERS = frozenset([
    "abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
    "first", "float", "groupby", "indent", "int", "items", "join", "last", "length", "list",
    "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round",
    "safe", "select", "selectattr", "slice", "sort", "string", "striptags", "sum", "title",
    "tojson", "trim", "truncate", "unique", "upper", "wordcount",
])  # fmt: skip
_WIDE = re.compile(r"\d{5}|\*")
# Their result may be as large as one argument times the other.
_MULTIPLYING = frozenset(
    ["center", "expandtabs", "indent", "join", "ljust", "replace", "rjust", "translate", "zfill"]
)


class LimitError(jinja2.TemplateError):
    """A template did more than a chat template has reason to."""


class Meter:
    """What one rendering has used."""

    def __init__(self) -> None:
        self._steps = 0
        self._work = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, work: int = 0) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise LimitError(f"the chat template takes more than {MAX_STEPS} steps")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise LimitError(f"the chat template takes more than {MAX_SECONDS:g} s")
        self.make(work)

    def make(self, size: int) -> None:
        """Account for a value of ``size`` before it is made."""
        if size > MAX_VALUE_CHARS:
            raise LimitError(
                f"the chat template makes a value of more than {MAX_VALUE_CHARS} characters"
            )
        self._work += size
        if self._work > MAX_WORK:
            raise LimitError(f"the chat template makes more than {MAX_WORK} characters")

    def size(self, value: object) -> int:
        """Characters that ``value`` takes as text, nested values included.

        A value that holds another twice takes it twice: a few lines of a template can make one
        that no memory holds as text, so the walk itself has an end.
        """
        total = items = 0
        rest = [value]
        while rest:
            value = rest.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, dict):
                rest += value.keys()
                rest += value.values()
            elif isinstance(value, list | tuple | set | frozenset):
                rest += value
            items += 1
            if items + len(rest) > MAX_ITEMS:
                raise LimitError(f"the chat template makes a value of more than {MAX_ITEMS} items")
        return total + 2 * items

    def product(self, subject: object, arguments: Iterable[object]) -> None:
        """Account for a result that may be ``subject`` times the largest argument."""
        largest = max((_extent(self, argument) for argument in arguments), default=1)
        if (self.size(subject) + 1) * largest > MAX_WORK >> 2:
            raise LimitError("the chat template multiplies two large values")

    def formatted(self, template: str, values: Iterable[object]) -> None:
        """Account for ``%`` or ``format``; a width is as large as its digits say."""
        if _WIDE.search(template):
            raise LimitError("the chat template formats with a width that is not limited")
        self.product(template, values)


def _extent(meter: Meter, argument: object) -> int:
    return abs(argument) if isinstance(argument, int) else meter.size(argument)


def meter_of(context: Context) -> Meter:
    meter = context.parent[_METER]
    if not isinstance(meter, Meter):
        raise TypeError(f"{_METER} is a {type(meter).__name__}")
    return meter


class _Metering(NodeTransformer):
    """Has loops and ``~`` pass through functions of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        # What the body writes by itself; what it computes is accounted for where that happens.
        written = nodes.Const(sum(len(text.data) for text in node.find_all(nodes.TemplateData)))
        node.iter = _call("metered_iteration", [cast(nodes.Expr, node.iter), written], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("metered_concatenation", node.nodes, node.lineno)


def _call(function: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(function)
    return nodes.Call(target, arguments, [], None, None, lineno=line)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the model said, for training. Here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Use ``compile_template`` and ``render``."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
            finalize=_finalize,
        )
        originals = self.filters
        self.filters = {name: _metered_filter(name, originals[name]) for name in _FILTERS}
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_template(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateError."""
        tree = self.parse(source)
        code = self.compile(_Metering().visit(tree))
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def render(self, template: jinja2.Template, variables: dict[str, object]) -> str:
        """Raises jinja2.TemplateError, or whatever an operation in the template raises."""
        parts: list[str] = []
        length = 0
        for part in template.generate({**variables, _METER: Meter()}):
            length += len(part)
            if length > MAX_VALUE_CHARS:
                raise LimitError(f"the chat template writes more than {MAX_VALUE_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = meter_of(context)
        match operator, left, right:
            case "**", _, _:
                raise LimitError("the chat template uses **, which has no limit")
            case "%", str(), _:
                meter.formatted(left, (right,))
            case "+", str() | list() | tuple(), str() | list() | tuple():
                meter.make(len(left) + len(right))
            case "*", str() | list() | tuple(), int():
                meter.make(len(left) * right)
            case "*", int(), str() | list() | tuple():
                meter.make(left * len(right))
            case "*", int(), int():
                meter.make(left.bit_length() + right.bit_length())
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        meter.step()
        name = getattr(function, "__name__", "")
        if name in _MULTIPLYING:
            meter.product(getattr(function, "__self__", ""), (*args, *kwargs.values()))
        elif name in ("format", "format_map"):
            method = getattr(function, "__wrapped__", function)  # the sandbox wraps these two
            meter.formatted(getattr(method, "__self__", ""), (*args, *kwargs.values()))
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, str | list | tuple | dict):
            meter.make(len(result))
        return result

    @staticmethod
    @pass_context
    def metered_iteration(context: Context, iterable: Iterable[Any], written: int) -> Iterator[Any]:
        meter = meter_of(context)
        for item in iterable:
            meter.step(written)
            yield item

    @staticmethod
    @pass_context
    def metered_concatenation(context: Context, *values: object) -> str:
        meter = meter_of(context)
        meter.make(sum(meter.size(value) for value in values))
        return "".join(map(str, values))


@pass_context
def _finalize(context: Context, value: object) -> object:
    """Every ``{{ … }}`` passes here before it is made text."""
    meter = meter_of(context)
    meter.make(meter.size(value))
    return value


# Filters run in an environment without meters, but as sandboxed.
_PLAIN = ImmutableSandboxedEnvironment()


def _metered_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        meter.step()
        arguments = (*args, *kwargs.values())
        if name in _MULTIPLYING:
            meter.product(value, arguments)
        for argument in arguments:
            if isinstance(argument, int):
                meter.make(abs(argument))
        if name in ("string", "e", "escape", "safe", "join", "trim", "upper", "lower", "title"):
            meter.make(meter.size(value))
        result = _PLAIN.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        if isinstance(result, str | list | tuple | dict):
            meter.make(len(result))
        return result

    return metered


@pass_context
def _to_json(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's: no escaping of HTML."""
    meter = meter_of(context)
    meter.step(meter.size(value) * (1 + (indent or 0)))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)
