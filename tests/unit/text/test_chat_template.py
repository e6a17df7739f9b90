"""Renderings equal transformers'; refusals are 400s in the template's words; limits hold."""

import time

import pytest
from tests.unit.text import templates
from transformers import PreTrainedTokenizerFast

from trimaran.errors import InvalidRequestError
from trimaran.formats.architecture import TokenizerFiles
from trimaran.text.chat_template import ChatTemplate, choose_template

USER = {"role": "user", "content": "  hi <b>&amp;</b> 'é' "}
ASSISTANT = {"role": "assistant", "content": " hello\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = {"role": "user", "content": [{"type": "text", "text": t} for t in (" a ", "b")]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <hot> & “é”",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def calls(arguments, **message):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **message}


TOOL_CHAT = [
    USER,
    calls({"city": "Oslo", "days": [1, 2]}, content=None),
    {"role": "tool", "content": "4 °C"},
]
CASES = [
    (templates.LLAMA3, [SYSTEM, USER], {}),
    (templates.LLAMA3, [USER, ASSISTANT, USER], {"date_string": "1 Jan 2030"}),
    (templates.LLAMA3, TOOL_CHAT, {"tools": TOOLS}),
    (templates.MISTRAL, [SYSTEM, USER, ASSISTANT, USER], {}),
    (templates.MISTRAL, [USER, ASSISTANT], {"add_generation_prompt": False}),
    (templates.QWEN, [SYSTEM, USER, ASSISTANT, USER], {}),
    (templates.QWEN, [USER], {"enable_thinking": False}),
    (templates.QWEN, [USER, {**ASSISTANT, "content": "<think>x</think>\n\nyes"}, USER], {}),
    (templates.QWEN, TOOL_CHAT, {"tools": TOOLS}),
    (templates.QWEN, [SYSTEM, *TOOL_CHAT, {"role": "tool", "content": "5"}], {"tools": TOOLS}),
    (templates.GEMMA, [USER, ASSISTANT, USER], {}),
    (templates.GEMMA, [PARTS], {}),
    (templates.GEMMA, [PARTS], {"add_generation_prompt": False}),
    (templates.MACROS, [SYSTEM, PARTS, *[USER] * 8], {"extra": "x"}),
    (templates.MACROS, [USER], {}),
]


@pytest.fixture(scope="module")
def oracle(byte_level_library):
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_library, bos_token="<s>", eos_token="</s>"
    )


def template_of(source, **tokens):
    return ChatTemplate(source, **{"bos_token": "<s>", "eos_token": "</s>", **tokens})


def render(source, messages, **options):
    own = {"tools", "add_generation_prompt", "continue_final_message"}
    keywords = {name: value for name, value in options.items() if name in own}
    extra = {name: value for name, value in options.items() if name not in own}
    return template_of(source).render(messages, **keywords, template_kwargs=extra)


class TestAgainstTransformers:
    @pytest.mark.parametrize(("source", "messages", "options"), CASES)
    def test_renders_the_same(self, oracle, source, messages, options):
        options = {"add_generation_prompt": True, **options}
        expected = oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, **options
        )
        assert render(source, messages, **options) == expected

    @pytest.mark.parametrize(
        ("source", "messages"),
        [
            (templates.LLAMA3, [USER, {"role": "assistant", "content": "The capital is "}]),
            (templates.QWEN, [USER, {"role": "assistant", "content": "The capital is "}]),
            (templates.GEMMA, [USER, {"role": "assistant", "content": "The capital is"}]),
            (templates.GEMMA, [PARTS, {**PARTS, "role": "assistant"}]),
        ],
    )
    def test_continues_the_same(self, oracle, source, messages):
        expected = oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, continue_final_message=True
        )
        text = render(source, messages, add_generation_prompt=False, continue_final_message=True)
        assert text == expected


class TestShapes:
    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            (templates.LLAMA3, "string"),
            (templates.MISTRAL, "string"),
            (templates.QWEN, "string"),
            (templates.GEMMA, "parts"),
            (templates.MACROS, "parts"),
            ("{% set c = messages[0].content %}{% for x in c|list %}{% endfor %}", "parts"),
        ],
    )
    def test_content_format_is_read_off_the_template(self, source, expected):
        assert template_of(source).content_format == expected

    def test_parts_are_joined_for_a_string_template(self):
        source = "{% for m in messages %}{{ m.content + '!' }}{% endfor %}"
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert render(source, [{"role": "user", "content": parts}]) == "a\nb!"
        assert render(source, [{"role": "user", "content": []}]) == "!"
        assert render(source, [{"role": "user", "content": ""}]) == "!"

    def test_a_string_is_a_part_for_a_template_that_knows_only_parts(self):
        source = (
            "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
        )
        assert render(source, [{"role": "user", "content": "ab"}]) == "(ab)"

    def test_unknown_parts_are_refused(self):
        image = {"type": "image_url", "image_url": {"url": "x"}}
        for content in ([image], [3], [{"type": "text"}], 3):
            with pytest.raises(InvalidRequestError) as error:
                render(templates.QWEN, [USER, {"role": "user", "content": content}])
            assert error.value.param.startswith("messages[1].content")

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ('{"city":"Oslo"}', '{"city": "Oslo"}'),
            ({"city": "Oslo"}, '{"city": "Oslo"}'),
            ("", "{}"),
            (None, "{}"),
        ],
    )
    def test_arguments_reach_the_template_as_an_object(self, arguments, expected):
        source = (
            "{% for c in messages[-1].tool_calls %}{% for k, v in c.function.arguments.items() %}"
            "{{ k }}={{ v }}{% endfor %}{{ c.function.arguments|tojson }}{% endfor %}"
        )
        text = render(source, [USER, calls(arguments)])
        assert text == ("city=Oslo" if "Oslo" in expected else "") + expected

    @pytest.mark.parametrize("arguments", ["{", "[1]", "3", ["a"]])
    def test_arguments_that_are_no_object_are_refused(self, arguments):
        with pytest.raises(InvalidRequestError) as error:
            render(templates.QWEN, [USER, calls(arguments)])
        assert error.value.param == "messages[1].tool_calls[0].function.arguments"

    def test_histories_of_tools(self):
        """T-I11: every shape of content beside tool calls, and tool contents in parts."""
        expected = render(templates.QWEN, [USER, calls("{}", content="")])
        for shape in ({"content": None}, {"content": []}, {}):
            assert render(templates.QWEN, [USER, calls("{}", **shape)]) == expected
        parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "C"}]
        assert "4\nC" in render(templates.QWEN, [USER, {"role": "tool", "content": parts}])

    def test_the_callers_messages_are_left_alone(self):
        message = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
        options = {"continue_final_message": True, "add_generation_prompt": False}
        assert render(templates.GEMMA, [USER, message], **options).endswith("x")
        assert message == {"role": "assistant", "content": [{"type": "text", "text": "x"}]}

    def test_a_missing_start_token_is_not_defined(self):
        template = template_of("{{ bos_token is defined }}{{ eos_token }}", bos_token=None)
        assert template.render([USER]) == "False</s>"


class TestRefusals:
    @pytest.mark.parametrize(
        ("source", "messages", "message"),
        [
            (templates.GEMMA, [SYSTEM, USER], "System role not supported"),
            (templates.GEMMA, [USER, USER], "roles must alternate"),
            (templates.LLAMA3, [], "list object has no element 0"),
            ("{{ messages[0].nothing.there }}", [USER], "no attribute 'nothing'"),
            ("{{ messages[0].content + 1 }}", [USER], "TypeError"),
            ("{{ messages.__class__.__mro__ }}", [USER], "unsafe"),
            ("{{ messages.append(1) }}", [USER], "unsafe"),
            ("{% include 'x' %}", [USER], "no loader"),
            ("{{ raise_exception('x' * 5000) }}", [USER], "^x{1000}$"),
        ],
    )
    def test_carries_the_templates_own_message(self, source, messages, message):
        with pytest.raises(InvalidRequestError, match=message):
            render(source, messages)

    @pytest.mark.parametrize("source", ["{{", "{% if %}", "{{ x|lipsum }}", "(" * 3 + "{% for %}"])
    def test_a_template_that_is_none(self, source):
        with pytest.raises(InvalidRequestError, match="not valid") as error:
            template_of(source)
        assert error.value.param == "chat_template"

    @pytest.mark.parametrize(
        "name", ["messages", "tools", "add_generation_prompt", "bos_token", "trimaran.meter", "\0"]
    )
    def test_keywords_cannot_override_the_renderers_own(self, name):
        with pytest.raises(InvalidRequestError) as error:
            template_of("x").render([USER], template_kwargs={name: 1})
        assert error.value.param == "chat_template_kwargs"

    def test_roles_and_calls(self):
        call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
        for message, param in (({}, "messages[0].role"), (call, "messages[0].tool_calls[0]")):
            with pytest.raises(InvalidRequestError) as error:
                render("x", [message])
            assert error.value.param == param

    def test_continuing(self):
        for source, messages, options in (
            ("x", [USER], {"add_generation_prompt": True}),
            ("x", [USER], {"add_generation_prompt": False}),
            (templates.QWEN, [], {"add_generation_prompt": False}),
            (templates.QWEN, [calls("{}")], {"add_generation_prompt": False}),
        ):
            with pytest.raises(InvalidRequestError, match="continue_final_message"):
                render(source, messages, continue_final_message=True, **options)


def doubling(start, step):
    return (
        f"{{% set n = namespace(s={start}) %}}"
        f"{{% for i in range(99) %}}{{% set n.s = {step} %}}{{% endfor %}}"
    )


class TestLimits:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ 'x' * 1000000000 }}",
            "{{ 1000000000 * [1] }}",
            "{{ 'x'.center(1000000000) }}",
            "{{ 'x'.ljust(1000000000) }}",
            "{{ '\\t'.expandtabs(1000000000) }}",
            "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
            "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
            "{{ ('x' * 1000000).join(['y'] * 1000000) }}",
            "{{ (['y'] * 1000000)|join('x' * 1000000) }}",
            "{{ ('\\n' * 1000000)|indent(1000000, true, true) }}",
            "{{ '{:1000000000}'.format(1) }}",
            "{{ '{:{}}'.format(1, 1000000000) }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%*d' % (1000000000, 1) }}",
            "{{ 10 ** 100000000 }}",
            "{{ [1]|batch(1000000000, 0)|list }}",
            "{{ [1]|slice(1000000000)|list }}",
            "{{ {'a': 1}|tojson(indent=1000000000) }}",
            "{% for i in range(1000000000) %}{% endfor %}",
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}" + "x" * 99_999 + "{% endfor %}",
            "{% set t %}{% for i in range(99999) %}" + "x" * 99_999 + "{% endfor %}{% endset %}",
            doubling("'x'", "n.s ~ n.s"),
            doubling("'x'", "n.s + n.s"),
            doubling("[1]", "n.s + n.s"),
            doubling("[1]", "[n.s, n.s]") + "{{ n.s }}",
            doubling("[1]", "[n.s, n.s]") + "{{ n.s|tojson }}",
            doubling("[1]", "[n.s, n.s]") + "{{ n.s|string }}",
            doubling("[1]", "[n.s, n.s]") + "{{ n.s ~ '' }}",
            "{% macro m(n) %}" + "x" * 99 + "{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
            "{{ m(99) }}",
            "{% for x in [1] recursive %}{{ loop([x]) }}{{ loop([x]) }}{% endfor %}",
            "{% for i in range(999) %}{{ 'x' * 100000 }}{% endfor %}",
        ],
    )  # fmt: skip
    def test_every_way_to_be_large_ends_soon(self, source):
        started = time.monotonic()
        with pytest.raises(InvalidRequestError):
            render(source, [USER])
        assert (
            time.monotonic() - started < 20
        )  # the limit is 5 s, in a process that others slow down

    def test_a_long_conversation_is_far_from_them(self):
        messages = [USER, {**ASSISTANT, "content": "word " * 2000}] * 500
        assert len(render(templates.GEMMA, messages)) > 5_000_000


def test_choosing_among_named_templates():
    named = TokenizerFiles("0", chat_templates={"default": "d", "tool_use": "t"})
    assert choose_template(named, tools=False) == "d"
    assert choose_template(named, tools=True) == "t"
    assert choose_template(TokenizerFiles("0", chat_template="x"), tools=True) == "x"
    assert choose_template(TokenizerFiles("0"), tools=False) is None
