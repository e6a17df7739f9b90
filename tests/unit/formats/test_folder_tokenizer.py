"""Tokenizer files of a folder: templates in all their places, fingerprints, damage."""

import pytest
from tests.unit.formats.folders import TOKENIZER, make_folder

from trimaran.errors import CheckpointError
from trimaran.formats.folder_tokenizer import read_tokenizer


@pytest.fixture
def read(tmp_path):
    def call(**files):
        named = {name.replace("__", "/").replace("_dot_", "."): c for name, c in files.items()}
        return read_tokenizer(make_folder(tmp_path, {}, named))

    return call


def test_no_tokenizer_at_all(read):
    files, ends = read()
    assert (files.tokenizer_json, files.gguf, files.config) == (None, None, {})
    assert (files.chat_template, files.chat_templates, ends) == (None, {}, set())


def test_a_tokenizer(read, tmp_path):
    files, ends = read(tokenizer_dot_json=TOKENIZER, tokenizer_config_dot_json={"eos_token": "x"})
    assert files.tokenizer_json == str(tmp_path / "tokenizer.json")
    assert files.config == {"eos_token": "x"}
    assert ends == set()


def test_the_fingerprint_is_of_both_files(read):
    first = read(tokenizer_dot_json=TOKENIZER)[0].fingerprint
    assert len(first) == 64
    assert read(tokenizer_dot_json=TOKENIZER, other_dot_json={})[0].fingerprint == first
    config = {"add_bos_token": True}
    second = read(tokenizer_dot_json=TOKENIZER, tokenizer_config_dot_json=config)[0].fingerprint
    assert second != first
    changed = TOKENIZER | {"version": "1.1"}
    assert read(tokenizer_dot_json=changed)[0].fingerprint not in (first, second)


def test_the_newest_form_of_a_template_wins(read):
    def template(**files):
        return read(**files)[0].chat_template

    config = {"chat_template": "from tokenizer_config"}
    assert template(tokenizer_config_dot_json=config) == "from tokenizer_config"
    json_file = {"chat_template": "from chat_template.json"}
    assert template(chat_template_dot_json=json_file) == "from chat_template.json"
    assert template(chat_template_dot_jinja="{# file #}") == "{# file #}"


def test_named_templates(read):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    files, _ = read(tokenizer_config_dot_json={"chat_template": named})
    assert files.chat_template == "D"
    assert files.chat_templates == {"default": "D", "tool_use": "T"}
    files, _ = read(additional_chat_templates__rag_dot_jinja="R")
    assert files.chat_templates == {"default": "D", "tool_use": "T", "rag": "R"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config_dot_json": "{"}, r"tokenizer_config\.json: is not valid JSON"),
        ({"tokenizer_config_dot_json": {"chat_template": 5}}, "chat_template has 5, no template"),
        ({"tokenizer_config_dot_json": {"chat_template": [{"name": 1}]}}, "no template"),
        (
            {
                "tokenizer_dot_json": '{"added_tokens": 5}',
                "tokenizer_config_dot_json": {"eos_token": "a"},
            },
            r"tokenizer\.json: is not a tokenizer",
        ),
        (
            {"tokenizer_dot_json": "[" * 10_000, "tokenizer_config_dot_json": {"eos_token": "a"}},
            r"tokenizer\.json: is not a tokenizer",
        ),
    ],
)
def test_damage_names_the_file(read, files, message):
    with pytest.raises(CheckpointError, match=message):
        read(**files)


def test_a_template_that_is_no_text(read, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is not UTF-8"):
        read()
