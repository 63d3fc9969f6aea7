"""How rows and words are cut into chunks of logits."""

from __future__ import annotations

import pytest
import torch

from spec_compile.runtime import logit_chunks


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
