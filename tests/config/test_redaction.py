"""No sink reveals secrets, and user text can control neither a terminal nor a page."""

import html
import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.checkpoint import export
from lockstep.config import error_messages as messages
from lockstep.config.redaction import holds_secret, redact_all
from lockstep.config.run import load
from lockstep.distributed.event_log import EventLog
from lockstep.track import console
from lockstep_trace import redaction
from lockstep_trace.redaction import printable, redact, redact_words, visible
from support.harness import tiny
from support.messages import raises

WORD = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def letters(least: int, most: int = 60, alphabet: str = WORD) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=least, max_size=most)


# How each kind of secret is written: what must not be seen, and the text around it.
FORMS: dict[str, st.SearchStrategy[tuple[str, str]]] = {
    **{
        prefix: letters(least).map(lambda s, p=prefix: (s, p + s))  # type: ignore[misc]
        for prefix, least in {
            "hf_": 30,
            "sk-": 30,
            "sk-ant-api03-": 40,
            "ghp_": 36,
            "gho_": 36,
            "ghs_": 36,
            "github_pat_": 60,
            "glpat-": 20,
            "xoxb-": 24,
            "xoxp-": 24,
            "xapp-1-": 24,
            "npm_": 36,
            "nvapi-": 40,
            "dckr_pat_": 27,
            "sk_live_": 24,
            "wandb_v1_": 40,
            "pypi-": 60,
        }.items()
    },
    "AKIA": letters(16, 16, string.ascii_uppercase + string.digits).map(lambda s: (s, "AKIA" + s)),
    "AIza": letters(35, 35).map(lambda s: (s, "AIza" + s)),
    "jwt": st.tuples(letters(16), letters(16), letters(16)).map(lambda p: (p[2], f"eyJ{p[0]}.eyJ{p[1]}.{p[2]}")),
    "address": letters(6).map(lambda s: (s, f"postgresql://mlflow:{s}@db.example:5432/runs")),
    "an @ in a password": letters(6).map(lambda s: (s, f"https://user:a@{s}@tracking.example/x")),
    "a token for a user": letters(24).map(lambda s: (s, f"https://{s}@github.com/a/b.git")),
    "query": letters(8).map(lambda s: (s, f"https://host/path?region=x&token={s}")),
    "signed": letters(20, 60, HEX).map(lambda s: (s, f"https://bucket/key?X-Amz-Signature={s}")),
    "variable": letters(6).map(lambda s: (s, f"WANDB_API_KEY={s}")),
    "password": letters(6).map(lambda s: (s, f"connect(host='a', password='{s}')")),
    "mapping": letters(6).map(lambda s: (s, repr({"user": "me", "password": s}))),
    "words": letters(6).map(lambda s: (s, repr(["train.py", "--password", s, "--all"]))),
    "connection string": letters(8).map(
        lambda s: (s, f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={s}==;EndpointSuffix=core.windows.net")
    ),
    "private key": letters(40).map(
        lambda s: (s, f"-----BEGIN RSA PRIVATE KEY-----\n{s}\n-----END RSA PRIVATE KEY-----")
    ),
}
around = st.sampled_from(["", " ", "could not reach ", "'", '"', "(", "\n", "=", ": "])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_secrets_of_every_form_are_redacted(form: str, data: st.DataObject) -> None:
    hidden, text = data.draw(FORMS[form])
    told = f"{data.draw(around)}{text}{data.draw(st.sampled_from(['', ' ', chr(10) + 'next', ' and more']))}"
    assume(told.count(hidden) <= 1)  # or what is left may hold it by chance, such as a host's name
    assert holds_secret(told)
    assert hidden not in redact(told)
    assert not holds_secret(redact(told)), "what is struck is no secret any more"
    assert hidden not in str(redact_all({"a": [{"b": [told]}]}))
    assert messages.secret({"section": {"list": ["x", ["y", told]]}}) == "section.list"


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_redaction_is_total_and_idempotent(text: str) -> None:
    assert not any(character in printable(text) for character in "\x1b\r\x07\x08\x9b\u202e\u2028")
    assert visible(visible(text)) == visible(text)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "data       builtin/emotion: 12,000 train, mean 22.0 tokens",
        "https://huggingface.co/settings/tokens and set it in the environment: export HF_TOKEN=...",
        "tokenizer.pad_token = tokenizer.eos_token",
        "http://127.0.0.1:5000/#/experiments/1",
        "s3://bucket/path@2024/x",
        "git@github.com:a/b.git",
        "sk-learn, hf_hub and the eyJ of a test",
        "sqlite:////home/me/mlflow.db",
    ],
)
def test_ordinary_words_are_not_redacted(text: str) -> None:
    assert printable(text) == text
    assert messages.secret({"a": {"b": [text]}}) is None


def test_secrets_of_the_environment_are_redacted_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct horse battery")
    assert redact("login failed for me/correct horse battery.") == "login failed for me/***."


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("track.mlflow.uri", "postgresql://me:hunter2@db/x"),
        ("launch.environment", "[DB_PASSWORD=hunter2]"),
        ("data.source", "https://user:hunter2@host/data.jsonl"),
        ("model.config", "{nested: {deep: [[glpat-aaaaaaaaaaaaaaaaaaaaaa]]}}"),
        ("model.config", "{nested: {api_key: hunter2}}"),
    ],
)
def test_a_run_file_with_a_secret_is_refused_without_quoting_it(key: str, value: str) -> None:
    with raises("LS1118") as caught:
        tiny(f"{key}={value}")
    assert "hunter2" not in str(caught.value)
    assert "glpat-a" not in str(caught.value)


def test_names_of_secrets_are_not_redacted() -> None:
    assert messages.secret({"launch": {"secrets": ["HF_TOKEN=hub/token", "LOCKSTEP_SECRET=job/key"]}}) is None
    assert messages.secret({"launch": {"secrets": ["HF_TOKEN=hf_" + "x" * 30]}}) == "launch.secrets"


TOLD = "mlflow failed: https://me:hunter2@host/ \x1b]0;owned\x07 hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"


def test_console_log_and_errors_are_sinks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    speaker = console.Console(True, log)
    speaker.say(TOLD)
    speaker.note(TOLD)
    speaker.facts({"name": TOLD})
    speaker.table("t", ["a", "b"], [[TOLD, TOLD]])
    console.error(TOLD, log)
    out = "".join(capsys.readouterr())
    for text in (out, log.read_text()):
        assert "hunter2" not in text
        assert "hf_aaa" not in text
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "mlflow failed" in text


def test_events_are_a_sink(tmp_path: Path) -> None:
    class Main:
        is_main = True

    world: Any = Main()
    EventLog(world, tmp_path).event("start", 0, opening={"tracker": TOLD}, list=[TOLD])
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert "hunter2" not in str(line)
    assert line["opening"]["tracker"].startswith("mlflow failed: https://***@host/")


def test_user_text_in_a_card_is_escaped() -> None:
    label = "<img src=x> [click](http://evil) **bold** `code`\n# head | \x1b[2J"
    told = export.words(label)
    assert "\n" not in told
    assert "\x1b" not in told
    for markup in ("<img", "[click]", "**bold**", "`code`", "# head |"):
        assert markup not in told
    assert html.unescape(told).replace("\\", "").startswith("<img src=x> [click](http://evil) **bold** `code` # head |")
    assert export.code("a`b\nc") == "`a'b c`"


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_card_s_head_stays_yaml(label: str) -> None:
    from huggingface_hub import ModelCardData

    head = ModelCardData(license="mit", model_name="m", tags=["lockstep", label]).to_yaml(line_break="\n")
    assert yaml.safe_load(head)["tags"][0] == "lockstep"


def test_a_control_character_in_output_is_refused(tmp_path: Path) -> None:
    with raises("LS1002", "output"):
        load(None, {"output": "a\ntouch owned"}, {"data": {"source": "builtin/emotion"}, "model": {"type": "gpt2"}})


@pytest.mark.parametrize(
    "words",
    [
        ["--token", "plainsecret"],
        ["--token=plainsecret"],
        ["--hf_token=plainsecret"],
        ["--hub-token", "plainsecret"],
        ["hub.token=plainsecret"],
        ["+trainer.wandb.api_key=plainsecret"],
        ["--wandb_key", "plainsecret"],
        ["HF_TOKEN=plainsecret", "python"],
        ["--password=two plainsecret words"],
        ["sh", "-c", "python train.py --token=plainsecret --lr 1"],
        ["curl", "-H", "Authorization: Bearer plainsecret"],
        ["curl", "-H", "X-Auth-Token: plainsecret", "-H", "PRIVATE-TOKEN:plainsecret"],
        ["--hub", '{"token":"plainsecret", "api_key": "plainsecret"}', "--set={'hf': {'hub_token': 'plainsecret'}}"],
        ["sh", "-c", 'python train.py --hub "{\\"token\\": \\"plainsecret\\"}"'],
        ["--url", "https://u:plainsecret@host/x?access_token=plainsecret"],
        ["curl", "-u", "me:plainsecret", "--proxy-user", "me:plainsecret", "-ume:plainsecret", "--user=me:plainsecret"],
        ["wget", "--http-user", "me", "--http-password", "plainsecret", "--ftp-password=plainsecret"],
        [
            "--header",
            "Authorization:plainsecret",
            "--header=Authorization: Basic plainsecret",
            "--auth",
            "a:plainsecret",
        ],
        ["-H", 'Authorization: Digest username="a", response="plainsecret"', "-H", "Cookie: a=1; s=plainsecret"],
        ["-HProxy-Authorization: Basic plainsecret", "--set", '{"Authorization": "Bearer plainsecret"}'],
        ["sh", "-c", "curl -u me:plainsecret x; curl -H 'Authorization: Basic plainsecret' y --cookie plainsecret"],
        [
            "--store",
            "me:plainsecret@host:5432/runs",
            "--store=me:plainsecret@host",
            "sh",
            "-c",
            "rsync a me:plainsecret@b",
        ],
        ["PGPASSWORD=plainsecret", "--db-pass", "plainsecret", "--pwd=plainsecret", "--bearer", "plainsecret"],
        ["--header", "X-Api-Key=plainsecret", "-H", "apikey: plainsecret", "--cookie", "session=plainsecret"],
        ["-HAuthorization: Bearer plainsecret", "-H", "DD-API-KEY: plainsecret", "--config", "{token: plainsecret}"],
        [
            "--accessToken",
            "plainsecret",
            "--wandbApiKey=plainsecret",
            '{"hubToken": "plainsecret"}',
            "--pw=plainsecret",
        ],
        [
            "/usr/bin/mysql",
            "-uroot",
            "-pplainsecret",
            ";",
            "sshpass",
            "-p",
            "plainsecret",
            "mysqldump",
            "-pplainsecret",
        ],
        ["docker", "login", "-u", "me", "-p", "plainsecret", "&&", "redis-cli", "-a", "plainsecret", "ping"],
        ["openssl", "enc", "-k", "plainsecret", "-passin", "pass:plainsecret", "|", "unzip", "-Pplainsecret", "a.zip"],
        [
            "sh",
            "-c",
            "sshpass -p 'plainsecret' ssh h; mysql -pplainsecret a&&wandb login plainsecret\nlftp -u a,plainsecret",
        ],
    ],
    ids=" ".join,
)
def test_secrets_in_commands_are_redacted(words: list[str]) -> None:
    redacted = redact_words(words)
    assert len(redacted) == len(words)
    assert "plainsecret" not in " ".join(redacted)


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--key", "a81bc81bdead4e5dabff"],
        ["train.py", "--key=a81bc81bdead4e5dabff"],
        ["train.py", "--auth", "a81bc81bdead4e5dabff", "--x"],
        ["train.py", "--service-key", "a81bc81bdead4e5dabff"],
        ["train.py", "tracker.auth=a81bc81bdead4e5dabff"],
        ["sh", "-c", "python train.py --auth a81bc81bdead4e5dabff; python b.py --key='a81bc81bdead4e5dabff' c"],
    ],
    ids=" ".join,
)
def test_a_key_or_auth_that_is_no_plain_word_is_a_secret(words: list[str]) -> None:
    redacted = redact_words(words)
    assert "a81bc81bdead4e5dabff" not in " ".join(redacted)
    assert redacted[:1] == words[:1]


def test_letters_in_no_order_of_a_name_and_arguments_of_a_login_in_python_are_secrets() -> None:
    """A password that looks like a word is not recognized behind --key; as the value of a variable it is."""
    commands = [
        "--key aGxLkPqRsTuV",
        "--auth=QwErTyUiOp",
        "login('me', 'plainsecret')",
        "wandb.login(key='plainsecret')",
    ]
    commands += ["f(x, token='plainsecret')", "hf_login( token = 'plainsecret' , add=True)"]
    for command in commands:
        word = command if "(" in command else command.split()
        redacted = " ".join(redact_words(["python", "-c", word] if isinstance(word, str) else ["a.py", *word]))
        assert re.search("aGxLkPqRsTuV|QwErTyUiOp|plainsecret", redacted) is None
        assert "***" in redacted


def test_the_control_other_words_of_a_command_are_kept() -> None:
    words = ["python", "train.py", "--pad_token", "<pad>", "--eos_token=</s>", "--max_tokens=5", "--token-count", "3"]
    words += ['{"pad_token": "<pad>", "token": 3, "eos-token": "</s>", "tokens": "all"}']
    words += ["docker", "-u", "1000:1000", "--user=1000:1000", "repo/image:tag@sha256:0a", "git@github.com:a/b.git"]
    words += ["-u", "-m", "module", "python", "-u", "train.py", "--passes", "3", "--pass", "2", "-L", "80:host:80"]
    words += [
        "srun",
        "-p",
        "gpu",
        "docker",
        "run",
        "-p",
        "80:80",
        "mkdir",
        "-p",
        "a",
        "mysql",
        "-p",
        "db",
        "padToken=x",
    ]
    words += ["sh", "-c", "mkdir -p a && docker run -a stdin -p 80:80 image; srun -pgpu python a.py --sortKey b"]
    words += ["--key", "text", "--sort-key=column_2", "--auth", "basic", "--key", "keys/id.pub", "--key", "3"]
    words += ["sh", "-c", "python a.py --key label --auth=none; sort --key 2,2 b", "--key", "-1"]
    words += [
        "--key",
        "labelName",
        "--key",
        "inputIDs",
        "--key=XMLHttpRequest",
        "--key",
        "textColumnA",
        "--auth",
        "NTLM",
    ]
    words += ["python", "-c", "hub.login(); tokenizer.add(token='[PAD]'); sort(key='name')"]
    words += ["--start", "10:30", "s3://bucket/path@2024/x", "user@host:/data", "sh", "-c", "python -u train.py a:b"]
    assert redact_words(words) == words
    assert redact(" ".join(words)) == " ".join(words)
    said = "tokenizer.pad_token: <pad>; image_token: <image>; the api_key: null; LOCKSTEP_SECRET: too short"
    assert redact(said) == said
    assert redact("hub_token: plainsecret (no counterpart)") == "hub_token: *** (no counterpart)"


def test_nested_values_read_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write lines of many short texts, each of which read all variables anew."""
    monkeypatch.setenv("SERVICE_TOKEN", "opensesame-1")
    read = redaction.secrets_in_environment
    times: list[None] = []
    place = "lockstep.config.redaction.secrets_in_environment"
    monkeypatch.setattr(place, lambda: times.append(None) or read())
    values = {"a": [{"b": f"with opensesame-1 and {n}"} for n in range(9)], "opensesame-1": "\x1b"}
    for filtered in (redact, printable):
        assert "opensesame" not in str(redact_all(values, filtered))
    assert len(times) == 2
