"""`octavo bench --engine`: refusals, the sides that are asked for, and the scripts that start engines."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.bench.engines import in_sglang, in_vllm, sides, steps
from octavo.cli.main import app
from octavo.errors import InvalidInput


def bench(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "--out", "r.jsonl", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--engine", "tgi"], "--engine must be one of vllm, sglang"),
        (["--engine", "vllm", "--site", "none"], "needs vllm, which is not installed; came site none"),
        (["--engine", "sglang", "--site", "none"], "needs sglang, which is not installed; came site none"),
    ],
)
def test_an_engine_that_is_not_there_is_exit_code_2(tmp_path, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    code, _, err = bench(*arguments)
    assert code == 2 and why in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("engine", "module"), [("vllm", in_vllm), ("sglang", in_sglang)])
def test_every_side_at_few_and_many_sequences(tmp_path, monkeypatch, engine, module):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site" / engine).mkdir(parents=True)
    called: list[list[str]] = []
    monkeypatch.setattr(module, "main", called.append)
    code, _, err = bench("--engine", engine, "--site", "site")
    assert code == 0, err
    assert {("16x8192x64" in call, "512x512x64" in call) for call in called} == {(True, True)} or len(called) == 2
    for call in called:
        at = call.index("--sides") + 1
        assert call[at : at + 3] == [*steps.SIDES[engine][:3]] and call[call.index("--site") + 1] == "site"
    code, _, _ = bench("--engine", engine, "--site", "site", "--ops", "append", "--device", "cpu", "--seconds", "0.001")
    assert code == 0 and len(called) == (2 if engine == "vllm" else 4)
    assert {json.loads(line)["op"] for line in Path("r.jsonl").read_text().splitlines()} == {"append"}


@pytest.mark.parametrize("module", [in_vllm, in_sglang])
def test_a_side_is_the_module_itself_in_a_process_with_octavo_plugged_in(tmp_path, monkeypatch, module):
    started: dict[str, Any] = {}
    monkeypatch.setattr(sides, "launch", lambda command, env, log: started.update(command=command, env=env, log=log))
    asked: list[Any] = []
    monkeypatch.setattr(module, "drive", asked.append)
    cache = "fp8" if module is in_vllm else "fp8_e4m3"
    module.main(["throughput", "--out", "r.jsonl", "--site", str(tmp_path / "site")])
    module.start(f"octavo-triton:{cache}", asked[0], tmp_path)
    command, env = started["command"], started["env"]
    assert command[:4] == [sys.executable, "-u", "-m", module.__name__]
    assert command[4:9] == ["throughput", "--out", "r.jsonl", "--site", str(tmp_path / "site")]
    assert env["OCTAVO_BACKEND"] == "triton"
    folders = env["PYTHONPATH"].split(":")
    assert str(tmp_path / "site") in folders and (Path(folders[2]) / "octavo" / "__init__.py").is_file()
    assert "octavo.integrations" in (Path(folders[1]) / "octavo-0.dist-info" / "entry_points.txt").read_text()


def test_a_side_that_fails_tells_why_and_one_that_hangs_is_ended(tmp_path):
    def start(side: str) -> subprocess.Popen[bytes]:
        code = "raise SystemExit('Error: no such device')" if side == "a:b" else "import time; time.sleep(600)"
        return sides.launch([sys.executable, "-c", code], {}, sides.path(tmp_path, side, "log"))

    import time

    begin = time.monotonic()
    sides.run_group(["a:b", "c:d"], start, tmp_path, begin + 3, in_turn=False)
    assert time.monotonic() - begin < 30
    assert "Error: no such device" in sides.result(tmp_path, "a:b")["error"]
    assert "no result" in sides.result(tmp_path, "c:d")["error"]


@pytest.mark.parametrize("module", [in_vllm, in_sglang])
def test_records_of_sides(tmp_path, module):
    from octavo.bench.records import read_records

    fp8 = "octavo:fp8" if module is in_vllm else "octavo:fp8_e4m3"
    figures = {"step_ms": 5.0, "step_ms_p20": 4.9, "step_ms_p80": 5.2, "prefill_ms": 100.0}
    found = {fp8: {"64x2048x128": figures} if module is in_vllm else figures, "triton:auto": {"error": "no memory"}}
    asked: list[Any] = []
    drive, module.drive = module.drive, asked.append
    try:
        shapes = ["--shapes", "64x2048x128"] if module is in_vllm else []
        module.main(["throughput", "--out", str(tmp_path / "r.jsonl"), *shapes])
    finally:
        module.drive = drive
    if module is in_vllm:
        monkey = pytest.MonkeyPatch()
        monkey.setattr("octavo.bench.records.environment", lambda _: {"gpu": "none"})
        module.write_records(found, asked[0])
        monkey.undo()
    else:
        module.write_records(found, asked[0])
    records = list(read_records([tmp_path / "r.jsonl"]))
    timed = [r for r in records if r.us is not None]
    assert {(r.case.split("/")[1], r.us) for r in timed} == {("decode", 5000.0), ("prefill", 100000.0)}
    assert {r.op for r in records} == {"step"} and {r.spec["layout"] for r in timed} == {"leaf"}
    assert any(r.error == "no memory" for r in records)
    engine = module.__name__.rpartition("in_")[2]  # a side's name tells its cache: a report keeps one record a name
    assert {r.backend for r in records} == {f"{engine}-{fp8}", f"{engine}-triton:auto"}


def test_a_side_of_text_may_change_several_things():
    asked = in_vllm.options("octavo:fp8:chunked+prefix")
    assert asked["max_num_batched_tokens"] == 256 and asked["enable_prefix_caching"]
    assert asked["cudagraph_capture_sizes"] == in_vllm.CAPTURED and "compilation_config" not in asked
    plain = in_vllm.options("octavo:fp8")
    assert not plain["enable_prefix_caching"] and "max_num_batched_tokens" not in plain
    assert in_vllm.options("octavo:fp8:full+exact").keys() >= {"compilation_config", "additional_config"}


def test_a_prompt_fills_pages_that_a_cache_of_prefixes_can_hit():
    assert max(len(prompt.split()) for prompt in sides.PROMPTS) > 2 * 64


def test_a_shape_whose_batch_is_never_whole_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        in_vllm.main(["throughput", "--shapes", "16x32768x48", "--out", str(tmp_path / "r.jsonl")])
    assert "16x32768x48: its prompts take 65 steps" in capsys.readouterr().err
    for batch, tokens, more in [*map(in_vllm.shape_of, in_vllm.SHAPES), *steps.SHAPES]:
        assert batch * tokens // in_vllm.STEP_TOKENS + 1 < more


def sglang_side(tmp_path: Path, side: str, *more: str, what: str = "text", work: str = "work") -> Any:
    """The arguments that a side's own process parses."""
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_sglang, "drive", asked.append)
        in_sglang.main([what, "--model", "smol", "--out", str(tmp_path / "out.json"), *more])
    (arguments,) = asked
    arguments.side, arguments.work = side, tmp_path / work
    arguments.work.mkdir(exist_ok=True)
    return arguments


def test_engines_that_run_at_once_have_ports_of_their_own(tmp_path):
    def taken(what: str, work: str) -> set[int]:
        sides_there = in_sglang.TEXT_SIDES if what == "text" else in_sglang.SPEED_SIDES
        pairs = [in_sglang.ports(sglang_side(tmp_path, side, what=what, work=work)) for side in sides_there]
        assert len({port for pair in pairs for port in pair}) == 2 * len(sides_there)
        return {port for pair in pairs for port in pair}

    for work in ("a", "b", "c"):  # whatever a work folder's name: text and throughput may even share it
        assert not taken("text", work) & taken("throughput", "a")
    works = [taken("throughput", f"work{i}") for i in range(20)]
    assert len({min(ports) for ports in works}) > 15
    assert all(in_sglang.FIRST_PORT <= port < in_sglang.END_PORT for ports in works for port in ports)


def test_more_sides_than_a_driver_has_ports_for_are_refused(tmp_path, capsys):
    many = [f"triton:auto{i}" for i in range(17)]
    with pytest.raises(SystemExit):
        in_sglang.main(["throughput", "--out", str(tmp_path / "r.jsonl"), "--sides", *many])
    assert "--sides must be 16 at most, 17 came" in capsys.readouterr().err


class StandInEngine:
    """Scores every token with a probability of 1/4 and answers [7, 8]; or fails to answer."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.asked: list[str] = []

    def generate(self, **asked: Any) -> Any:
        self.asked.append("windows" if "input_ids" in asked else "chats")
        if "prompt" in asked:
            if self.fails:
                raise RuntimeError("the engine is gone")
            return [{"text": "yes", "output_ids": [7, 8]} for _ in asked["prompt"]]
        entries = [(math.log(0.25), token, None) for token in range(sides.WINDOW)]
        found = {"input_token_logprobs": entries, "id": asked.get("rid"), "cached_tokens": 0}
        if "rid" in asked:  # one window, not a list of them
            assert len(asked["input_ids"]) == sides.WINDOW
            return {"meta_info": found}
        return [{"meta_info": found} for _ in asked["input_ids"]]


@pytest.fixture
def stand_in(monkeypatch):
    """What sides of text run with here, and the engine options that they asked for."""
    transformers = pytest.importorskip("transformers")

    class Tokenizer:
        def __call__(self, text: str, **_: Any) -> Any:
            return SimpleNamespace(input_ids=list(range(60000)))

        def apply_chat_template(self, chat: Any, **_: Any) -> str:
            return str(chat)

    made = SimpleNamespace(engine=StandInEngine(), options={})

    def make_engine(arguments: Any, **options: Any) -> StandInEngine:
        made.options = options
        return made.engine

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: Tokenizer())
    monkeypatch.setattr(in_sglang, "make_engine", make_engine)
    return made


def test_perplexity_comes_first_and_stays_where_answers_do_not_come(tmp_path, stand_in):
    arguments = sglang_side(tmp_path, "octavo:fp8_e4m3")
    found = in_sglang.write_text(arguments)
    assert stand_in.engine.asked == ["windows", "chats", "chats"]
    assert found["perplexity"] == pytest.approx(4) and found["scored_tokens"] == 8 * 1023
    assert found["again"] and found["tokens"] == [[7, 8]] * len(sides.PROMPTS)
    assert "cuda_graph_bs_prefill" not in stand_in.options

    stand_in.engine = StandInEngine(fails=True)
    arguments = sglang_side(tmp_path, "fa3:fp8_e4m3")
    with pytest.raises(RuntimeError):
        sides.leave(arguments.work, arguments.side, lambda: in_sglang.write_text(arguments))
    left = sides.result(arguments.work, arguments.side)
    assert left["perplexity"] == pytest.approx(4) and "error" not in left and "tokens" not in left
    assert "the engine is gone" in left["unfinished"]
    assert "no result" in sides.result(arguments.work, "triton:auto")["error"]


PERPLEXITY = {"perplexity", "scored_tokens", "window_losses"}


def test_the_reference_writes_no_answers_and_no_graph_is_captured_for_it(tmp_path, stand_in):
    found = in_sglang.write_text(sglang_side(tmp_path, "reference:fp8_e4m3"))
    assert stand_in.engine.asked == ["windows"] and found.keys() == PERPLEXITY
    assert not [name for name in stand_in.options if name.startswith("cuda_graph")]
    found = in_sglang.write_text(sglang_side(tmp_path, "octavo:fp8_e4m3", "--perplexity"))
    assert stand_in.engine.asked == ["windows"] * 2 and found.keys() == PERPLEXITY
    assert stand_in.options["cuda_graph_bs_prefill"] == [stand_in.options["chunked_prefill_size"]]


def test_a_same_bytes_side_reads_each_window_twice_in_an_engine_with_a_plug_in_of_its_own(
    tmp_path, stand_in, monkeypatch
):
    side = "same-bytes-exact:fp8_e4m3"
    found = in_sglang.write_text(sglang_side(tmp_path, side, "--windows", "3"))
    assert stand_in.engine.asked == ["windows"] * 6
    assert found["scored_tokens"] == 3 * 1023 and found["change"]["value"] == 0
    assert not [name for name in stand_in.options if name.startswith("cuda_graph")]

    started: dict[str, Any] = {}
    monkeypatch.setattr(sides, "launch", lambda command, env, log: started.update({log.name: env["PYTHONPATH"]}))
    arguments = sglang_side(tmp_path, side)
    for name in (side, "octavo-exact:fp8_e4m3"):
        in_sglang.start(name, arguments, tmp_path)
    folders = [next(f for f in path.split(":") if f.startswith(str(tmp_path))) for path in started.values()]
    entries = [(Path(folder) / "octavo-0.dist-info" / "entry_points.txt").read_text() for folder in folders]
    assert ["same_bytes" in entry for entry in entries] == [True, False]


def test_windows_are_apart_from_each_other_and_as_many_as_the_text_has():
    def tokenizer(text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=list(range(60000)))

    for count in (1, 8, 58):
        windows = sides.windows(tokenizer, count)
        assert len(windows) == count and {len(w) for w in windows} == {sides.WINDOW}
        assert all(a[-1] < b[0] <= a[0] + 5000 for a, b in zip(windows, windows[1:], strict=False))
    assert [w[0] for w in sides.windows(tokenizer)] == [5000 * i for i in range(sides.WINDOWS)]
    for count in (0, 59):
        with pytest.raises(InvalidInput, match="windows must be 1 to 58: the text has 60000 tokens"):
            sides.windows(tokenizer, count)


def test_a_table_of_sides_of_which_some_wrote_no_answers(capsys):
    whole = {"perplexity": 13.9, "tokens": [[1, 2, 3]], "again": True, "text": ["one two three"]}
    found = {
        "reference:fp8_e4m3": {"perplexity": 14.05},
        "triton:auto": whole,
        "octavo:auto": {**whole, "tokens": [[1, 2, 4]], "perplexity": 14.0},
        "fa3:auto": {"perplexity": 14.1, "unfinished": "the engine is gone"},
        "triton:fp8_e4m3": {"error": "no memory"},
    }
    in_sglang.print_text(found)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["reference:fp8_e4m3"].split()[1:] == ["14.0500"]
    assert "3/3" in lines["triton:auto"] and "2/3" in lines["octavo:auto"]
    assert "14.1000 the engine is gone" in lines["fa3:auto"] and "no memory" in lines["triton:fp8_e4m3"]
