"""`headlab score` and `headlab generate` print what the functions give, and refuse what cannot be."""

import json
import math

import pytest

from headlab import cli, runs
from headlab.pretrained import opening
from headlab.scoring import Rules, generate_text, score

TEXT = "a bc é\n日本 a a"


@pytest.fixture
def run(make_model, byte_tokenizer, monkeypatch):
    """A run's model, without its files."""
    config, model = make_model("untied", "rotary", vocabulary=259, max_length=40)
    restored = runs.Restored(model, "untied", byte_tokenizer, config, 7)
    monkeypatch.setattr(opening, "restore_model", lambda run, step, shards: restored)
    monkeypatch.setenv("COLUMNS", "100")
    return model


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return str(path)


def called(capsys, *arguments):
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_json_is_all_that_score_gives_to_the_last_bit(run, file, byte_tokenizer, capsys):
    found = json.loads(
        called(capsys, "score", "--workdir=r", file, "--json", "--top=3", "--stride=9")
    )
    ids, start = byte_tokenizer.encode(TEXT), [byte_tokenizer.separator_id]
    [expected] = score(run, [ids], prefix=start, top=3, stride=9)
    for one, other in zip(found["scores"], expected, strict=True):
        assert [one[k] for k in ("id", "log_prob", "rank", "entropy", "lse", "context")] == [
            *other[:5],
            other.context,
        ]
        assert [(best["id"], best["log_prob"]) for best in one["top"]] == list(other.top)
    assert bytes.fromhex("".join(token["bytes"] for token in found["scores"])).decode() == TEXT
    nats = -math.fsum(token.log_prob for token in expected)
    assert (found["tokens"], found["bytes"]) == (len(ids), len(TEXT.encode()))
    assert found["nats"] == nats
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(TEXT.encode()))
    assert found["perplexity"] == pytest.approx(math.exp(nats / len(ids)))
    assert (found["stride"], found["max_length"], found["step"]) == (9, 40, 7)


def test_shards_of_the_vocabulary_score_alike(run, file, byte_tokenizer, capsys):
    found = json.loads(called(capsys, "score", "--workdir=r", file, "--json", "--shards=2"))
    [expected] = score(run, [byte_tokenizer.encode(TEXT)], prefix=[byte_tokenizer.start_id])
    for one, other in zip(found["scores"], expected, strict=True):
        assert (one["id"], one["rank"]) == (other.id, other.rank)
        assert one["log_prob"] == pytest.approx(other.log_prob, abs=3e-5)


def test_a_short_text_has_a_line_a_token(run, file, byte_tokenizer, capsys):
    shown = called(capsys, "score", "--workdir=r", file, "--top=1")
    assert "' a'" in shown and "most probable" in shown and "perplexity" in shown
    assert f"{score(run, [[258, 3]])[0][1].log_prob:.4f}"  # of four decimals
    assert shown.count("' a'") >= 2


def test_a_long_text_has_totals_alone_and_says_so(run, tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("ab" * 150)
    shown = called(capsys, "score", "--workdir=r", str(path))
    assert "300" in shown and "rank" not in shown
    assert "Up to 200 tokens are listed one by one" in shown


def test_generate_prints_the_prompt_and_what_follows(run, byte_tokenizer, capsys):
    rules = Rules(0.9, 50, 0.95, 0.01, 1.1)
    flags = ["--temperature=0.9", "--top-k=50", "--top-p=0.95", "--min-p=0.01"]
    flags += ["--repetition-penalty=1.1", "--seed=3", "--max-new-tokens=12", "--stop=zz"]
    [[one]] = generate_text(
        run, byte_tokenizer, ["a b"], rules=rules, max_new_tokens=12, stop=["zz"], seed=3
    )
    assert called(capsys, "generate", "--workdir=r", "a b", *flags) == f"a b{one.text}\n"
    assert (
        called(capsys, "generate", "--workdir=r", "a b", *flags, "--stream") == f"a b{one.text}\n"
    )
    [many] = generate_text(
        run, byte_tokenizer, ["a b"], rules=rules, max_new_tokens=12, samples=2, seed=3
    )
    shown = called(capsys, "generate", "--workdir=r", "a b", *flags[:-1], "--samples=2")
    assert shown == f"--- 1 of 2 ---\na b{many[0].text}\n--- 2 of 2 ---\na b{many[1].text}\n"


def test_without_a_number_the_models_longest_sequence_is_filled(run, byte_tokenizer, capsys):
    [[whole]] = generate_text(run, byte_tokenizer, ["a"], rules=Rules(0.0), max_new_tokens=38)
    assert called(capsys, "generate", "--workdir=r", "a", "--temperature=0") == f"a{whole.text}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["score", "--workdir=r", "EMPTY"], "is empty; give a text"),
        (["score", "--workdir=r", "nowhere.txt"], "cannot read nowhere.txt"),
        (["score", "--workdir=r", "BINARY"], "is not UTF-8 text: byte 1 is 0xff"),
        (["score", "--workdir=r", "FILE", "--top=260"], "top is 260; it must be in 0 … 259"),
        (["score", "--workdir=r", "FILE", "--top=-1"], "top is -1"),
        (["score", "--workdir=r", "FILE", "--stride=41"], "stride is 41; it must be in 1 … 40"),
        (["score", "--workdir=r", "FILE", "--shards=9"], "mesh.vocab=9, and there are 8 devices"),
        (["score", "--workdir=r"], "FILE"),
        (["generate", "--workdir=r", "a", "--stop="], "a stop string is empty"),
        (["generate", "--workdir=r", "a", "--top-k=260"], "top_k is 260; it must be in 1 … 259"),
        (["generate", "--workdir=r", "a", "--top-p=0"], "top_p is 0.0"),
        (["generate", "--workdir=r", "a", "--min-p=2"], "min_p is 2.0"),
        (["generate", "--workdir=r", "a", "--temperature=-1"], "temperature is -1.0"),
        (["generate", "--workdir=r", "a", "--repetition-penalty=0"], "repetition_penalty is 0.0"),
        (["generate", "--workdir=r", "a", "--seed=-1"], "seed is -1"),
        (
            ["generate", "--workdir=r", "b" * 40],
            "prompt 0 has 41 tokens, which with 1 new ones make 42",
        ),
        (["generate", "--workdir=r", "b", "--max-new-tokens=39"], "more than the max_length of 40"),
        (["generate", "--workdir=r", "b", "--samples=2", "--stream"], "leave --samples out"),
    ],
)
def test_what_cannot_be_is_refused(arguments, said, run, file, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"a\xff")
    names = {
        "EMPTY": str(tmp_path / "empty.txt"),
        "BINARY": str(tmp_path / "binary.txt"),
        "FILE": file,
    }
    assert cli.main([names.get(a, a) for a in arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", ["score", "generate"])
def test_an_unknown_run_is_refused(command, file, tmp_path, capsys):
    assert cli.main([command, f"--workdir={tmp_path / 'none'}", file]) == 2
    assert "is not a run" in " ".join(capsys.readouterr().err.split())
