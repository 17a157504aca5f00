"""octavo's logits behind vLLM's names for DeepGEMM's, over stubs of both releases."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from vllm_stub import RECORDS, install, modules_of

from octavo import IndexerCache, Unsupported
from octavo import paged_mqa_logits as octavo_paged
from octavo.integrations import vllm as plugin


@pytest.fixture(params=list(RECORDS))
def release(request):
    return request.param


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr("octavo.notices.said", set())


def put(monkeypatch, release, has_deep_gemm=False):
    """The stub with the modules that ask for DeepGEMM; what each of them has in place of its functions."""
    install(monkeypatch, release)
    names = importlib.import_module("vllm.utils.deep_gemm")
    names.has_deep_gemm = lambda: has_deep_gemm
    askers = []
    for path in ("vllm.model_executor.layers.sparse_attn_indexer", "vllm.v1.attention.backends.mla.indexer"):
        for i in range(path.count(".") + 1):
            part = ".".join(path.split(".")[: i + 1])
            if part not in sys.modules:
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
                sys.modules[part].__path__ = []
        askers.append(sys.modules[path])
        askers[-1].has_deep_gemm = names.has_deep_gemm
    return names, askers


def asked(monkeypatch, plugins="octavo,octavo_indexer"):
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    plugin.register_indexer()


def test_nothing_is_replaced_unless_it_is_asked_for(monkeypatch, release):
    names, askers = put(monkeypatch, release)
    before = vars(names).copy()
    asked(monkeypatch, "octavo")
    monkeypatch.delenv("VLLM_PLUGINS")
    plugin.register_indexer()  # vLLM loads every plug-in then
    assert vars(names) == before and not askers[0].has_deep_gemm()


def test_deep_gemm_is_left_where_it_is_installed(monkeypatch, release, caplog):
    names, _ = put(monkeypatch, release, has_deep_gemm=True)
    before = vars(names).copy()
    asked(monkeypatch)
    assert vars(names) == before and "DeepGEMM is installed" in caplog.text


def test_the_indexer_alone_is_told_that_deep_gemm_is_there(monkeypatch, release):
    names, askers = put(monkeypatch, release)
    asked(monkeypatch)
    assert all(asker.has_deep_gemm() for asker in askers) and not names.has_deep_gemm()


def formula(q, k, weights):
    """relu(q . k) summed over heads by weight, fp32: [rows, keys]."""
    return (torch.einsum("rhd,td->rht", q.float(), k).relu() * weights[..., None]).sum(1)


def test_ragged_logits_as_each_release_calls_them(monkeypatch, release):
    names, _ = put(monkeypatch, release)
    asked(monkeypatch)
    q = torch.randn(5, 64, 128).to(torch.float8_e4m3fn)
    k, scale = torch.randn(30, 128).to(torch.float8_e4m3fn), torch.rand(30) + 0.5
    weights = torch.rand(5, 64)
    starts, ends = torch.tensor([0, 3, 7, 7, 0]).int(), torch.tensor([1, 20, 30, 7, 30]).int()
    right = formula(q, k.float() * scale[:, None], weights)
    packed = (k, scale.view(torch.uint8).view(30, 4))
    call = names._fp8_fp4_mqa_logits_impl
    if release == "0.26":
        found = call((q, None), packed, weights, starts, ends, clean_logits=True)
        columns = torch.arange(30)
        seen = (columns >= starts[:, None]) & (columns < ends[:, None])
        torch.testing.assert_close(found, right.masked_fill(~seen, float("-inf")), rtol=1e-4, atol=1e-3)
    else:
        found = call((q, None), packed, weights, starts, ends, 30)
        for row, (a, b) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            torch.testing.assert_close(found[row, : b - a], right[row, a:b], rtol=1e-4, atol=1e-3)


def test_paged_logits_as_each_release_calls_them(monkeypatch, release):
    names, _ = put(monkeypatch, release)
    asked(monkeypatch)
    pages = torch.zeros(8, 64, 1, 132, dtype=torch.uint8)
    index = IndexerCache.view(pages)
    index.append(torch.randn(200, 128), torch.arange(200) + 64)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    q, weights = torch.randn(2, 1, 64, 128).to(torch.float8_e4m3fn), torch.rand(2, 64)
    lens = torch.tensor([[100], [17]], dtype=torch.int32)
    metadata = names._get_paged_mqa_logits_metadata_impl(lens, 64, 132)
    assert metadata.shape == (133, 2) and metadata.dtype == torch.int32
    extra = {"clean_logits": False} if release == "0.26" else {"indices": torch.tensor([1, 0], dtype=torch.int32)}
    found = names._fp8_fp4_paged_mqa_logits_impl((q, None), pages, weights, lens, table, metadata, 128, **extra)
    right = octavo_paged(q, index, weights, lens, table if release == "0.26" else table.flip(0), 128)
    assert torch.equal(found[0, :100], right[0, :100]) and torch.equal(found[1, :17], right[1, :17])
    assert found.shape == (2, 128)


def test_queries_of_four_bits_are_refused_in_words(monkeypatch, release):
    names, _ = put(monkeypatch, release)
    asked(monkeypatch)
    q = (torch.zeros(1, 64, 64, dtype=torch.uint8), torch.zeros(1, 64, dtype=torch.int32))
    with pytest.raises(Unsupported, match="needs an fp8_e4m3 query whose scale is in the weights"):
        names._fp8_fp4_mqa_logits_impl(q, (q[0], q[1]), torch.zeros(1, 64), q[1][0], q[1][0])


def test_vllms_functions_take_what_octavos_are_called_with(release):
    """The recorded signatures, of which octavo's stand behind: a parameter that is new would show here."""
    functions = RECORDS[release]["functions"]["vllm.utils.deep_gemm"]
    last = {"0.26": "clean_logits", "0.33": "max_seqlen_k"}[release]
    assert functions["fp8_fp4_mqa_logits"] == f"(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, {last})"
    paged = "q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len"
    rest = {"0.26": "clean_logits", "0.33": "indices=..."}[release]
    assert functions["fp8_fp4_paged_mqa_logits"] == f"({paged}, {rest})"
    assert modules_of(release, None)["vllm.utils.deep_gemm"].get_paged_mqa_logits_metadata
