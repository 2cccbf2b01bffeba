"""The benchmarks of the loss run at any size, and their figures hang together."""

import json

import pytest

from experiments.benchmarks import head_loss, memory
from experiments.benchmarks.turns import in_words, ratios, take_turns


def test_contestants_take_turns_and_the_first_round_is_not_counted():
    order = []

    def turn(name, seconds):
        return lambda: order.append(name) or seconds

    seconds = take_turns({"a": turn("a", 1.0), "b": turn("b", 3.0)}, rounds=3)
    assert "".join(order) == "baabbaab"
    assert {name: taken.tolist() for name, taken in seconds.items()} == {"a": [1] * 3, "b": [3] * 3}
    assert ratios(seconds, "a")["b"] == [3, 3, 3]
    assert in_words([1.0, 2.0, 3.5]) == "2.00 (1.00 to 3.50)"


def test_the_loss_benchmark_compares_equal_losses(tmp_path, capsys):
    output = tmp_path / "new" / "found.json"
    assert head_loss.main(["--size=40x8x300", "--rounds=2", f"--output={output}"]) == 0
    (found,) = json.loads(output.read_text())
    assert {"headlab", "optax, logits materialised", "three multiplies"} <= set(
        found["contestants"]
    )
    assert found["contestants"]["headlab"]["over_headlab"] == [1, 1, 1]
    assert "40 tokens, d 8" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["40x8", "0x8x300", "axbxc"])
def test_an_impossible_size_is_refused_with_an_example(size, capsys):
    for benchmark in (head_loss, memory):
        assert benchmark.main([f"--size={size}"]) == 2
        assert f"--size={size}: it must be tokens x d_model x V" in capsys.readouterr().err


def test_headlabs_memory_does_not_grow_with_tokens_times_v():
    """Both doubled: the temporary bytes stay within those of h, and far below the logits'."""
    small, large = (
        memory.measure("headlab", "float32", n, 64, v, gradients=True)["temporary"]
        for n, v in ((4096, 40_000), (8192, 80_000))
    )
    assert large - small <= 4 * 8192 * 64 * 4
    assert large < 4 * 8192 * 80_000 / 20


@pytest.mark.parametrize("gradients", [False, True])
def test_bfloat16_weights_are_never_copied_as_float32(gradients):
    """Nor is a float32 gradient of all of them held: one bfloat16 table at most, and that for the gradient alone."""
    tokens, d_model, vocab = 256, 512, 100_000
    found = memory.measure("headlab", "bfloat16", tokens, d_model, vocab, gradients=gradients)
    table = 2 * d_model * vocab
    assert found["temporary"] < (1.5 if gradients else 0.5) * table
