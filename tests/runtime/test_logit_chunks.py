"""How rows and words are cut into chunks of logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_compile.runtime import kernels, logit_chunks, logit_kernels, vocabulary


@pytest.mark.parametrize("num_tokens", [1, 1023, 4093, 4096, 16381])
def test_on_a_gpu_no_chunk_but_the_last_has_an_odd_row_length(num_tokens: int) -> None:
    gpu = torch.device("cuda")
    for words in (32000, 49152, 50257, 151936):
        rows = logit_chunks.token_chunks(num_tokens, gpu)
        columns = logit_chunks.vocabulary_chunks(num_tokens, words, gpu)
        whole = logit_chunks.full_law_chunks(num_tokens, words, gpu)
        for cuts, end in ((rows, num_tokens), (columns, words), (whole, num_tokens)):
            assert [cut.start for cut in cuts[1:]] + [end] == [cut.stop for cut in cuts]
            assert cuts[0].start == 0
            assert all((cut.stop - cut.start) % 8 == 0 for cut in cuts[:-1])
        logits = (rows[0].stop - rows[0].start) * (columns[0].stop - columns[0].start)
        assert logits <= logit_chunks.CHUNK_ELEMENTS * logit_chunks.GPU_FACTOR


def test_a_gpu_without_triton_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, logit_kernels):
        monkeypatch.setattr(module, "triton_mode", lambda kind: None)
    gpu = torch.device("cuda")
    assert not logit_kernels.is_generated(gpu)
    assert any("losses on cuda run as plain tensor code" in text for text in kernels.fallbacks())
    assert kernels.loss_kernel(gpu) == "plain tensor code (no Triton for cuda)"
    assert kernels.loss_kernel(torch.device("cpu")) == "plain tensor code (no GPU)"


def test_a_last_chunk_of_few_rows_takes_more_words_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "CHUNK_ELEMENTS", 40)
    monkeypatch.setattr(logit_chunks, "CHUNK_TOKENS", 4)
    shapes = []

    def record(hidden: Tensor, weight: Tensor) -> Tensor:
        shapes.append((len(hidden), len(weight)))
        return logit_chunks.logits_of(hidden, weight)

    monkeypatch.setattr(vocabulary, "logits_of", record)
    labels = torch.zeros(9, dtype=torch.int64)
    vocabulary.chunked_token_logprobs(
        torch.randn(9, 5), torch.randn(30, 5), labels, torch.tensor(1.0)
    )
    assert shapes == [(4, 10)] * 6 + [(1, 30)]
