"""Numbers of 4 bits, decoded: all of them under each finite scale, beside transformers."""

import numpy as np
import pytest

from gregale.huggingface.safetensors import decoded


def test_every_number_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    scales = np.arange(253, dtype=np.uint8)  # 6 * 2^(253 - 127) is no bfloat16
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 1, 16), (16, 253, 16)).copy()
    found = decoded(blocks, np.broadcast_to(scales, (16, 253)))
    right = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks[None]), torch.tensor(scales).expand(1, 16, 253))
    np.testing.assert_array_equal(found.view(np.uint16), right[0].T.contiguous().view(torch.uint16).numpy())
