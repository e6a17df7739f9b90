"""The command line: flags, files, environment, advice, speed of import."""

import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.cli import main
from trimaran.cli.flags_doc import render
from trimaran.cli.parser import build_parser, parse, settings_of
from trimaran.cli.vllm_flags import VLLM_FLAGS, Status
from trimaran.config import fields, resolve
from trimaran.errors import ConfigError

ROOT = Path(__file__).parents[3]


def config_of(*argv: str, environment=None):
    arguments = parse(build_parser(), ["serve", *argv])
    return resolve(settings_of(arguments), environment=environment or {}, file=arguments.config)


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nhost: file\n")
    env = {"TRIMARAN_PORT": "3", "TRIMARAN_MAX_NUM_SEQS": "4"}
    config = config_of("demo", "--config", str(file), "--port", "5", environment=env)
    assert config.server.port == 5
    assert config.scheduler.max_num_seqs == 4
    assert config.server.host == "file"
    assert config.scheduler.max_num_batched_tokens == 512


def test_values_of_every_kind():
    config = config_of(
        "m.gguf", "--kv-cache-memory-bytes", "1.5G", "--no-enable-prefix-caching", "--api-key", "a",
        "b", "--served-model-name", "x", "--block-size", "32", "--kv-cache-memory-fraction", "0.25",
    )  # fmt: skip
    assert config.model.model == "m.gguf"
    assert config.cache.kv_cache_memory_bytes == 3 << 29
    assert config.cache.enable_prefix_caching is False
    assert [key.reveal() for key in config.server.api_key] == ["a", "b"]
    assert config.cache.block_size == 32
    assert config.cache.kv_cache_memory_fraction == 0.25


def test_secrets_do_not_print():
    config = config_of("demo", "--api-key", "hunter2", "--admin-api-key", "hunter3")
    assert "hunter" not in repr(config)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "99999"], ["--port", "99999"]),
        (["--port", "x"], ["--port", "'x'"]),
        (["--dtype", "float8"], ["--dtype", "bfloat16"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs"]),
        (["--kv-cache-memory-bytes", "lots"], ["--kv-cache-memory-bytes", "lots"]),
        (["--kv-cache-memory-fraction", "nan"], ["--kv-cache-memory-fraction"]),
        (["--max-num-seq", "1"], ["--max-num-seq", "did you mean --max-num-seqs?"]),
        (["--trust-remote-code"], ["never run"]),
        (["--gpu-memory-utilization=0.9"], ["--kv-cache-memory-fraction"]),
        (["--tensor-parallel-size", "2"], ["--tensor-parallel-size"]),
    ],
)
def test_a_wrong_flag_is_named(argv, words):
    with pytest.raises(ConfigError) as caught:
        config_of("demo", *argv)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins"])
def test_a_list_does_not_swallow_the_model(flag):
    with pytest.raises(ConfigError, match=f"{flag} took .* put MODEL before the flags"):
        config_of(flag, "one", "my-model", "--port", "0")
    assert config_of("my-model", flag, "one", "two").model.model == "my-model"
    assert config_of(flag, "one").model.model == "demo"


def test_a_misspelt_variable_or_key_names_its_neighbour(tmp_path):
    with pytest.raises(ConfigError, match=r"TRIMARAN_PROT.*TRIMARAN_PORT"):
        config_of("demo", environment={"TRIMARAN_PROT": "1"})
    file = tmp_path / "serve.yaml"
    file.write_text("max_num_seq: 1\n")
    with pytest.raises(ConfigError, match=r"max_num_seq.*max_num_seqs"):
        config_of("demo", "--config", str(file))


def test_a_wrong_file_or_variable_is_named(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("prot: 1\n")
    with pytest.raises(ConfigError, match="prot"):
        config_of("demo", "--config", str(file))
    file.write_text("[1")
    with pytest.raises(ConfigError, match="not YAML"):
        config_of("demo", "--config", str(file))
    with pytest.raises(ConfigError, match="No such file"):
        config_of("demo", "--config", str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError, match="TRIMARAN_PORT"):
        config_of("demo", environment={"TRIMARAN_PORT": "-1"})


def test_a_configuration_error_is_one_line_and_exit_2(capsys):
    assert main(["serve", "demo", "--prot", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--port" in error


def test_vllm_flags_marked_same_exist():
    ours = {field.flag for field in fields()} | {"--config", "--no-enable-prefix-caching"}
    same = {name for name, flag in VLLM_FLAGS.items() if flag.status is Status.SAME}
    assert same <= ours
    assert not (set(VLLM_FLAGS) - same) & ours
    assert len(VLLM_FLAGS) >= 40


def test_the_flags_page_is_current():
    assert (ROOT / "docs" / "flags.md").read_text("utf-8") == render(), (
        "run: python -m trimaran.cli.flags_doc > docs/flags.md"
    )


def test_help_and_import_load_no_torch():
    code = (
        "import sys, trimaran.cli\n"
        "try: trimaran.cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'fastapi', 'zmq', 'yaml', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout
